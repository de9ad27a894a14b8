"""The vocabulary in a GGUF file.

The metadata contains the tokens, their types and the merges as lists, and the name of the pre-tokenizer. From these the
same `tokenizers` pipeline is built as from the model's `tokenizer.json`.

Source: llama.cpp, `src/llama-vocab.cpp`, and the GGUF specification, section "Tokenizer".
"""

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from llamarium.errors import TokenizerError, UnsupportedTokenizerError, counted, escape, show_value, warn_caller
from llamarium.tokenizer.backends.files import MAX_TOKENS, guard_rust
from llamarium.tokenizer.backends.gguf_cutters import Cutter, find_cutter
from llamarium.tokenizer.backends.gguf_longest import LONGEST_MATCH, longest_match_tokenizer
from llamarium.tokenizer.backends.huggingface import HuggingFaceBackend
from llamarium.tokenizer.backends.pipeline import byte_level_json
from llamarium.tokenizer.backends.template_files import templates_of_gguf
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.sentencepiece.piece_type import PieceType
from llamarium.tokenizer.special import SpecialTokens, TypedToken, find_special_tokens

_KEY = "tokenizer.ggml."

_NORMAL = int(PieceType.NORMAL)  # comparing with the enum member takes four times as long
_DEFAULT_IDS = {"bos": 1, "eos": 2}  # for SentencePiece vocabularies


def from_gguf_metadata(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Build the tokenizer from a GGUF file's metadata, with arrays as lists.

    Raises:
        TokenizerError: If the metadata is inconsistent.
        UnsupportedTokenizerError: If the kind of vocabulary or the pre-tokenizer is not supported.
    """
    model = metadata.get(_KEY + "model")
    if model not in ("gpt2", "llama", LONGEST_MATCH):
        what = "is missing" if model is None else f"is {show_value(model)}"
        raise UnsupportedTokenizerError(
            f'{source}: {_KEY}model {what}; supported are "gpt2" (byte-level BPE), "llama" (SentencePiece) and '
            f'"{LONGEST_MATCH}" (characters and words)'
        )
    if model == LONGEST_MATCH:
        tokens, _, types = _tokens(metadata, source)
        return longest_match_tokenizer(metadata, tokens, types, templates_of_gguf(metadata, source), source)
    cutter = find_cutter(metadata.get(_KEY + "pre"), source) if model == "gpt2" else None
    tokens, ids, types = _tokens(metadata, source)
    typed = {i: kind for i, kind in enumerate(types) if kind != _NORMAL}
    templates = templates_of_gguf(metadata, source)
    named = _named_ids(metadata, tokens, source, defaults=_DEFAULT_IDS if cutter is None else {})
    special = _special_tokens(metadata, tokens, typed, named, cutter is None or cutter.add_bos, templates.text, source)
    if cutter is not None:
        user_defined = {tokens[i]: i for i, kind in typed.items() if kind == PieceType.USER_DEFINED and tokens[i]}
        backend = _byte_level(metadata, ids, user_defined, special, cutter, source)
        return Tokenizer(backend, special, vocab_size=len(tokens), source=source, chat_template=templates)
    from llamarium.tokenizer.backends.gguf_sentencepiece import sentencepiece_backend

    names = {"bos": named["bos"], "eos": named["eos"], "pad": named["padding"]}
    backend = sentencepiece_backend(metadata, tokens, types, special.ids, names, source)
    return Tokenizer(
        backend,
        special,
        vocab_size=len(tokens),
        source=source,
        chat_template=templates,
        strip_first_space=backend.model.add_dummy_prefix,
    )


def _tokens(metadata: Mapping[str, Any], source: str) -> tuple[list[str], dict[str, int], list[int]]:
    """Return the tokens, their ids, and the type of each id."""
    tokens = _list(metadata, "tokens", str, source)
    types: list[int] = [PieceType.NORMAL] * len(tokens)
    if _KEY + "token_type" in metadata:
        types = _list(metadata, "token_type", int, source)
    if len(types) != len(tokens) or not 0 < len(tokens) <= MAX_TOKENS:
        raise TokenizerError(
            f"{source}: {counted(len(tokens), 'token')} and {counted(len(types), 'token type')}; "
            f"expected as many, 1 to {MAX_TOKENS}"
        )
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        if twice:
            raise TokenizerError(f"{source}: {_KEY}tokens holds {escape(twice)!r} twice; expected each token once")
    return tokens, ids, types


def _byte_level(
    metadata: Mapping[str, Any],
    ids: dict[str, int],
    user_defined: Mapping[str, int],
    special: SpecialTokens,
    cutter: Cutter,
    source: str,
) -> HuggingFaceBackend:
    contents = byte_level_json(
        vocab=ids,
        merges=_merges(metadata, source),
        special=special.ids,
        cutter=cutter.build(),
        whole_pieces=cutter.whole_pieces,
        plain={token: i for token, i in user_defined.items() if token not in special.ids},
    )
    return guard_rust(lambda: HuggingFaceBackend(contents, special.ids, byte_level=True, source=source), source)


def _merges(metadata: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    """Parse the merges, each "left right"; tokens in printable characters contain no space, so there is exactly one."""
    merges = _list(metadata, "merges", str, source)
    if set(map(str.count, merges, repeat(" "))) <= {1}:  # a loop over 280,000 of them takes long
        parts = " ".join(merges).split(" ") if merges else []
        if all(parts):
            return list(zip(parts[::2], parts[1::2], strict=True))
    i = next(i for i, merge in enumerate(merges) if len(pair := merge.split(" ")) != 2 or not all(pair))
    raise TokenizerError(
        f"{source}: {_KEY}merges[{i}] is {show_value(merges[i])}; expected two tokens and a space between"
    )


def _special_tokens(
    metadata: Mapping[str, Any],
    tokens: list[str],
    typed: Mapping[int, int],
    named: Mapping[str, int | None],
    bos_default: bool,
    template: str | None,
    source: str,
) -> SpecialTokens:
    flagged = {i for i, kind in typed.items() if kind in (PieceType.UNKNOWN, PieceType.CONTROL)}
    flagged |= {i for i in named.values() if i is not None}
    user_defined = {i for i, kind in typed.items() if kind == PieceType.USER_DEFINED}
    add_bos = metadata.get(_KEY + "add_bos_token", bos_default)
    if not isinstance(add_bos, bool):
        raise TokenizerError(f"{source}: {_KEY}add_bos_token is {show_value(add_bos)}; expected true or false")
    if add_bos and named["bos"] is None:
        raise TokenizerError(f"{source}: a text begins with BOS, but {_KEY}bos_token_id is missing")
    if metadata.get(_KEY + "add_eos_token"):
        warn_caller(
            f"{escape(source, 4096)}: {_KEY}add_eos_token puts a token after each text; none is put after a prompt, "
            "which is continued"
        )
    ends = (named["eos"], named["eot"], named["eom"])
    return find_special_tokens(
        [TypedToken(tokens[i], i, i in flagged) for i in sorted(flagged | user_defined) if tokens[i]],
        template,
        bos=named["bos"],
        eos=tuple(dict.fromkeys(i for i in ends if i is not None)),
        pad=named["padding"],
        add_bos=add_bos,
    )


def _named_ids(
    metadata: Mapping[str, Any], tokens: list[str], source: str, *, defaults: Mapping[str, int]
) -> dict[str, int | None]:
    """Return the ids in the metadata, or the format's defaults for missing ones."""
    ids = {name: _token_id(metadata, name, len(tokens), source) for name in ("bos", "eos", "padding", "eot", "eom")}
    return ids | {name: i for name, i in defaults.items() if ids[name] is None and i < len(tokens)}


def _token_id(metadata: Mapping[str, Any], name: str, count: int, source: str) -> int | None:
    key = f"{_KEY}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < count:
        raise TokenizerError(f"{source}: {key} is {show_value(value)}; expected an id of 0 to {count - 1}")
    return value


def _list(metadata: Mapping[str, Any], name: str, kind: type, source: str) -> list[Any]:
    value = metadata.get(_KEY + name)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise TokenizerError(f"{source}: {_KEY}{name} is {escape(type(value).__name__)}; expected an array")
    items = list(value)
    if set(map(type, items)) - {kind}:
        i = next(i for i, item in enumerate(items) if type(item) is not kind)
        shown = show_value(items[i])
        raise TokenizerError(f"{source}: {_KEY}{name}[{i}] is {shown}; expected {kind.__name__}")
    return items
