"""Hugging Face's `tokenizer.json`, run by the `tokenizers` package.

The file holds a pipeline: normalizer, pre-tokenizer, BPE model, decoder, and a post-processor that says whether BOS
is put before a text. The package encodes ordinary text only (`encode_special_tokens`); BOS, control tokens, padding
and decoding are done in `base`, so that they are the same for every kind of file.

Two families are read: byte-level BPE (Llama 3, SmolLM2) and SentencePiece-style BPE with byte fallback (Llama 2).
Vocabularies of words are `words`' matter.
"""

import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.errors import TokenizerError, escape, warn_caller
from llamarium.tokenizer.backends import huggingface_rules as rules
from llamarium.tokenizer.backends.files import MAX_SMALL_FILE_BYTES, guard_rust, read_json, save_huggingface
from llamarium.tokenizer.backends.template_files import read_templates
from llamarium.tokenizer.base import Backend, Tokenizer
from llamarium.tokenizer.bpe import BYTE_TO_CHARACTER, ByteLevelBPE, unspell

if TYPE_CHECKING:
    import tokenizers

_MAX_BLANKS = 9_900_000  # Oniguruma's retry limit is 10 million; at it the package prints a panic to stderr
_BPE_OPTIONS = (
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges",
)  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def load_huggingface(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, with the `tokenizer_config.json` and chat templates beside it.

    Warns (UserWarning, one per rule) if the file's rules change texts, so that decoding does not give them back.
    """
    source = str(path)
    raw = read_json(path)
    config_path = path.with_name("tokenizer_config.json")
    config = read_json(config_path, MAX_SMALL_FILE_BYTES) if config_path.exists() else {}
    if isinstance(model := raw.get("model"), dict) and model.get("type") == "WordLevel":
        from llamarium.tokenizer.backends.words import load_words

        return load_words(path, raw, config)
    ids = rules.check_tokenizer_json(raw, source)
    special = rules.special_tokens(raw, config, source)
    raw["added_tokens"] = [
        token | {"special": token["content"] in special.ids} for token in rules.added_tokens(raw, source)
    ]
    byte_level = rules.is_byte_level(raw, source)
    rules.check_pieces(raw, source)
    changes = list(rules.text_changes(raw, source, byte_level=byte_level))
    merges = rules.merges(raw, source)
    inner = guard_rust(lambda: _build(path, raw, merges), source)
    for token in rules.added_tokens(raw, source):
        found = inner.token_to_id(token["content"])
        if found != token["id"]:
            raise TokenizerError(
                f"{source}: the added token {escape(token['content'])!r} has the id {token['id']}, but the vocabulary "
                f"gives it {found}; expected one id"
            )
    for change in changes:
        warn_caller(f"{escape(source, 4096)}: text is changed: {change}")
    backend = HuggingFaceBackend(inner, byte_level=byte_level, source=source)
    return Tokenizer(
        backend,
        special,
        vocab_size=max(ids) + 1,
        source=source,
        chat_template=read_templates(path.parent, config),
        strip_first_space=rules.strips_first_space(raw, source),
    )


def _build(path: Path, raw: dict[str, Any], merges: list[tuple[str, str]]) -> "tokenizers.Tokenizer":
    """Build the tokenizer that the package would read from the file, which it reads only to explain what it refuses."""
    import tokenizers

    try:
        return _from_parts(raw, merges)
    except Exception:
        tokenizers.Tokenizer.from_file(str(path))
        raise


def _from_parts(raw: dict[str, Any], merges: list[tuple[str, str]]) -> "tokenizers.Tokenizer":
    """Let the package read the small parts as JSON, and take the vocabulary and the merges as they lie here.

    That takes half as long: for Llama 3 it saves a quarter of a second. Added tokens come after the vocabulary, from
    which they get their ids.
    """
    import tokenizers

    model = raw["model"]
    small = raw | {"model": model | {"type": "BPE", "vocab": {}, "merges": []}}
    added = tokenizers.Tokenizer.from_str(json.dumps(small)).get_added_tokens_decoder()
    inner = tokenizers.Tokenizer.from_str(json.dumps(small | {"added_tokens": []}))
    options = {name: model[name] for name in _BPE_OPTIONS if model.get(name) is not None}
    inner.model = tokenizers.models.BPE(model["vocab"], merges, **options)
    inner.add_tokens([added[i] for i in sorted(added)])
    return inner


class HuggingFaceBackend(Backend):
    """A vocabulary that the `tokenizers` package runs."""

    def __init__(self, inner: "tokenizers.Tokenizer", *, byte_level: bool, source: str) -> None:
        """Wrap a tokenizer of the package and set it to encode control tokens as ordinary text."""
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._byte_level = byte_level
        self._source = source
        self._added = {i: token.content for i, token in inner.get_added_tokens_decoder().items()}
        missing = [byte for byte, character in BYTE_TO_CHARACTER.items() if inner.token_to_id(character) is None]
        self._missing_bytes = bytes(missing) if byte_level else b""

    def encode(self, text: str) -> list[int]:
        """Encode ordinary text, unless the vocabulary lacks a byte of it or millions of blanks stand in a row."""
        if self._missing_bytes:
            self._refuse_missing(text)
        if len(text) > _MAX_BLANKS:
            self._refuse_blanks(text)
        return guard_rust(lambda: self._inner.encode(text, add_special_tokens=False).ids, self._source)

    def _refuse_missing(self, text: str) -> None:
        """Refuse bytes without tokens (SmolLM2 lacks some control characters); the package would drop them silently."""
        utf8 = text.encode("utf-8")
        if len(utf8.translate(None, self._missing_bytes)) == len(utf8):
            return
        missing = set(self._missing_bytes)
        place, character = next((i, c) for i, c in enumerate(text) if not missing.isdisjoint(c.encode("utf-8")))
        raise TokenizerError(
            f"{self._source}: the vocabulary has no tokens for U+{ord(character):04X}, character {place} of the text; "
            "remove it"
        )

    def _refuse_blanks(self, text: str) -> None:
        longest = max((len(found[0]) for found in re.finditer(r"\s+", text)), default=0)
        if longest > _MAX_BLANKS:
            raise TokenizerError(
                f"{self._source}: the text has {longest:,} blanks in a row, on which the pre-tokenizer's regular "
                f"expression gives up; expected at most {_MAX_BLANKS:,}"
            )

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token; an added token is its own text."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode("utf-8")
        token = self._inner.id_to_token(token_id)
        if token is None:
            return None
        return unspell(token) if self._byte_level else _sentencepiece_bytes(token)

    def byte_level_bpe(self) -> ByteLevelBPE:
        """Return the readable twin, with this file's merges and pre-tokenizer."""
        if not self._byte_level or self._inner.normalizer is not None:
            raise TokenizerError(
                f"{self._source}: merges can be shown for byte-level BPE without a normalizer (Llama 3, SmolLM2) only"
            )
        return self._twin

    @cached_property
    def _twin(self) -> ByteLevelBPE:
        raw: dict[str, Any] = json.loads(self._inner.to_str())
        model = raw["model"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        ranks = {(unspell(left), unspell(right)): rank for rank, (left, right) in enumerate(pairs)}
        plain = {token["id"]: str(token["content"]) for token in raw["added_tokens"] if not token["special"]}
        ids = {unspell(token): i for token, i in model["vocab"].items() if i not in self._added}
        return ByteLevelBPE(
            ids=ids | {text.encode("utf-8"): i for i, text in plain.items()},
            rank=lambda left, right: ranks.get((left, right)),
            cut=self._cutter(list(plain.values())),
            whole_pieces=bool(model.get("ignore_merges")),
            added=frozenset(text.encode("utf-8") for text in plain.values()),
        )

    def _cutter(self, plain: list[str]) -> Callable[[str], list[str]]:
        """Return the pre-tokenizer: cut out the added tokens that are ordinary text, then as the file says."""
        pattern = re.compile("(" + "|".join(map(re.escape, sorted(plain, key=len, reverse=True))) + ")")
        pre_tokenizer: Any = self._inner.pre_tokenizer

        def cut(text: str) -> list[str]:
            pieces: list[str] = []
            for position, part in enumerate(pattern.split(text) if plain else [text]):
                if position % 2:
                    pieces.append(part)
                elif part:
                    pieces += [unspell(piece).decode("utf-8") for piece, _ in pre_tokenizer.pre_tokenize_str(part)]
            return pieces

        return cut

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        save_huggingface(folder, tokenizer, self._inner)


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode("utf-8")
