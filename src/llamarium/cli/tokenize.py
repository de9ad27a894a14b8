"""Follow a text from bytes to token ids.

A vocabulary first cuts the text into pieces, then merges the bytes of each
piece, the lowest rank first, until no merge applies. What is left are tokens.

  llamarium tokenize "The cat sat" -m llama3
  llamarium tokenize "tokenization" --merges
  llamarium tokenize "The cat sat" --ids
"""

import argparse
from typing import TYPE_CHECKING

from llamarium.cli.options import DEFAULT_MODEL, UsageError, add_json
from llamarium.cli.output import emit, show, table
from llamarium.cli.text import add_text, require_text
from llamarium.errors import TokenizerError, counted, escape

if TYPE_CHECKING:
    from llamarium.tokenizer.base import Tokenizer
    from llamarium.tokenizer.bpe import Explanation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "what to encode")
    text = "a model, or a tokenizer: llama3, tokenizer.json, tokenizer.model (default: %(default)s)"
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL, metavar="NAME", help=text)
    parser.add_argument("--merges", action="store_true", help="show every merge")
    parser.add_argument("--ids", action="store_true", help="the ids alone, as the model gets them: BOS first if any")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Encode the text and show how."""
    if args.ids and args.merges:
        raise UsageError("argument --merges: not allowed with argument --ids")
    text = require_text(args, "TEXT")
    from llamarium.checkpoints.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    if args.ids:
        ids = tokenizer.encode(text)
        if args.json:
            emit({"text": text, "ids": ids})
        else:
            print(*ids)
        return 0
    if not args.merges and not _is_explained(tokenizer):
        return _run_without_places(tokenizer, text, as_json=args.json)
    explanation = tokenizer.explain(text)
    if args.json:
        emit(explanation.to_dict())
        return 0
    _print(explanation, with_merges=args.merges)
    print(f"\n{_summary(explanation, tokenizer)}")
    return 0


def _is_explained(tokenizer: "Tokenizer") -> bool:
    """Whether the vocabulary's merges can be followed; those of SentencePiece's kind cannot."""
    try:
        tokenizer.backend.byte_level_bpe()
    except TokenizerError:
        return False
    return True


def _run_without_places(tokenizer: "Tokenizer", text: str, *, as_json: bool) -> int:
    """Show the tokens alone, where they cannot be traced to places in the text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = [(i, tokenizer.token_bytes(i)) for i in ids]
    if as_json:
        described = [{"id": i, "text": tokenizer.token_text(i), "bytes": list(data)} for i, data in tokens]
        emit({"text": text, "utf8": list(text.encode()), "ids": ids, "tokens": described})
        return 0
    rows = ((_quoted(data), str(i), data.hex(" ")) for i, data in tokens)
    show(table("token", "id", "bytes", right=("id",), rows=rows))
    print(f"\n{counted(len(ids), 'token')}, {counted(len(text), 'character')}, {counted(len(text.encode()), 'byte')}")
    return 0


def _print(explanation: "Explanation", *, with_merges: bool) -> None:
    names = (("" if i else _quoted(piece.text.encode())) for piece in explanation.pieces for i in range(len(piece.ids)))
    rows = (
        (name, _quoted(token.bytes), str(token.id), f"{token.start}-{token.end}", token.bytes.hex(" "))
        for name, token in zip(names, explanation.tokens, strict=True)
    )
    show(table("piece", "token", "id", "at", "bytes", right=("id", "at"), rows=rows))
    if not with_merges:
        return
    merges = table("piece", "rank", "left", "right", "result", right=("rank",))
    for piece in explanation.pieces:
        for step, merge in enumerate(piece.merges):
            name = "" if step else _quoted(piece.text.encode())
            merges.add_row(name, str(merge.rank), *map(_quoted, (merge.left, merge.right, merge.result)))
    print()
    show(merges)


def _quoted(data: bytes) -> str:
    """Show bytes so that spaces and stray bytes are seen."""
    return f'"{escape(data.decode("utf-8", "backslashreplace"))}"'


def _summary(explanation: "Explanation", tokenizer: "Tokenizer") -> str:
    counts = ", ".join(
        (
            counted(len(explanation.tokens), "token"),
            counted(len(explanation.text), "character"),
            counted(len(explanation.utf8), "byte"),
        )
    )
    with_bos, bos = tokenizer.encode(explanation.text), tokenizer.bos_token_id
    if bos is not None and len(with_bos) > len(explanation.tokens):
        return f"{counts}\nbefore them goes {tokenizer.token_text(bos)} ({bos})"
    return counts
