"""SentencePiece vocabularies: megabytes of text per second of the processor, against `tokenizers` and `sentencepiece`.

    python bench/sentencepiece_speed.py [--model tokenizer.model]

A BPE and a Unigram vocabulary of 7,000 pieces are trained on this repository's documents and code in a minute; --model
measures another one too, such as the one of Mistral that the package mistral-common holds. `tokenizers` gets the
pipeline that transformers makes of such a file: BPE with merges from the scores and without a pre-tokenizer (Llama),
Unigram with Metaspace (T5). A figure is the median of the rounds, each side in turn, on one thread.
"""

import io
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

import common
from llamarium.kernels.native import library
from llamarium.tokenizer.sentencepiece.encoder import Encoder
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel, read_model

os.environ["TOKENIZERS_PARALLELISM"] = "false"
VOCAB_SIZE = 7000


def main() -> None:
    """Measure each kind of text with each vocabulary."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a tokenizer.model (repeatable)")
    parser.add_argument("--megabytes", type=float, default=1.0, help="size of each text (default 1)")
    options = parser.parse_args()
    assert library() is not None, "the C library is not used here"

    markdown, python = read_all("docs/**/*.md"), read_all("src/**/*.py")
    vocabularies = {kind: train(kind, markdown, python) for kind in ("bpe", "unigram")}
    vocabularies |= {path.name: path.read_bytes() for path in options.model}
    texts = {name: cut(text, options.megabytes) for name, text in texts_of(markdown, python).items()}

    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for name, data in vocabularies.items():
        encoders = encoders_of(data)
        for kind, text in texts.items():
            sides = {side: partial(measure, encode, text) for side, encode in encoders.items()}
            measured = common.alternate(options.rounds, sides)
            results.setdefault(name, {})[kind] = {side: value["MB/s"] for side, value in measured.items()}
            rows.append({"MB/s": f"{name}, {kind}", **results[name][kind]})
    options.model = [path.name for path in options.model]
    common.report("sentencepiece_speed", options, rows, results)


def read_all(pattern: str) -> str:
    """Return all files of a kind as one text."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(common.ROOT.glob(pattern)))


def texts_of(markdown: str, python: str) -> dict[str, str]:
    """Return texts of each kind; the last four have neither words nor lines."""
    rng = random.Random(0)
    return {
        "English": markdown,
        "Python": python,
        "random Chinese": "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(10**6)),
        "no spaces": "".join(markdown.split()),
        "one letter": "a",
        "spaces": " ",
        "random letters": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=10**6)),
    }


def cut(text: str, megabytes: float) -> str:
    """Repeat a text, or cut it off, so that it has this size in UTF-8."""
    size = int(megabytes * 10**6)
    data = text.encode("utf-8")
    return (data * (size // len(data) + 1))[:size].decode("utf-8", "ignore")


def train(kind: str, *texts: str) -> bytes:
    """Return a `tokenizer.model` as Llama's: byte fallback, and no text is changed."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text[:400_000].splitlines()),
        model_writer=out,
        model_type=kind,
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return out.getvalue()


def encoders_of(data: bytes) -> dict[str, Callable[[str], Any]]:
    """Return each side's function from a text to ids."""
    model = read_model(data, "tokenizer.model")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    inner = as_tokenizers(model)
    return {
        "Llamarium": Encoder(model, "tokenizer.model").encode,
        "tokenizers": lambda text: inner.encode(text, add_special_tokens=False).ids,
        "sentencepiece": theirs.encode,
    }


def as_tokenizers(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """Return the pipeline that transformers makes of a vocabulary."""
    if model.kind == "unigram":
        scored = list(zip(model.pieces, model.scores, strict=True))
        result = tokenizers.Tokenizer(
            models.Unigram(scored, unk_id=model.unknown_id, byte_fallback=model.byte_fallback)
        )
        result.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
        return result
    ids = {piece: i for i, piece in enumerate(model.pieces)}
    merges: list[tuple[str, str]] = []
    for piece in sorted(ids, key=lambda piece: -model.scores[ids[piece]]):
        halves = [(piece[:size], piece[size:]) for size in range(1, len(piece))]
        pairs = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    unknown = None if model.unknown_id is None else model.pieces[model.unknown_id]
    bpe = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
    result = tokenizers.Tokenizer(bpe)
    result.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return result


def measure(encode: Callable[[str], Any], text: str) -> dict[str, float]:
    """Return the speed of one side, by the processor's time."""
    start = time.process_time()
    encode(text)
    return {"MB/s": len(text.encode("utf-8")) / 1e6 / (time.process_time() - start)}


if __name__ == "__main__":
    main()
