"""Hugging Face's `tokenizer.json`, run by the `tokenizers` package.

The file describes a pipeline: normalizer, pre-tokenizer, BPE model, decoder, and a post-processor that may add BOS. The
package encodes texts, with control tokens under private names (`private_names`). BOS, padding and decoding are
implemented in `base`, so that they are the same for every file format.

Two families are supported: byte-level BPE (Llama 3, SmolLM2) and SentencePiece-style BPE with byte fallback (Llama 2).
Word-level vocabularies are handled by `words`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.errors import TokenizerError, escape, warn_caller
from llamarium.file_names import TOKENIZER_CONFIG
from llamarium.tokenizer.backends import huggingface_rules as rules
from llamarium.tokenizer.backends.files import MAX_SMALL_FILE_BYTES, guard_rust, of_rust, read_json, save_huggingface
from llamarium.tokenizer.backends.private_names import PrivateTokenizer
from llamarium.tokenizer.backends.template_files import read_templates
from llamarium.tokenizer.backends.unigram import unigram_list, unigram_table
from llamarium.tokenizer.base import Backend, Tokenizer
from llamarium.tokenizer.bpe import BYTE_TO_CHARACTER, ByteLevelBPE, unspell
from llamarium.tokenizer.special import Parts, SpecialTokens, split_spellings

if TYPE_CHECKING:
    import tokenizers

_MAX_BLANKS = 9_900_000  # at Oniguruma's retry limit of 10 million the package panics and prints to stderr
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def load_huggingface(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, with the `tokenizer_config.json` and chat templates in the same folder.

    Warns (UserWarning, one per rule) if the file's rules change texts, so that decoding does not restore them.
    """
    source = str(path)
    raw = read_json(path)
    config_path = path.with_name(TOKENIZER_CONFIG)
    config = read_json(config_path, MAX_SMALL_FILE_BYTES) if config_path.exists() else {}
    if isinstance(model := raw.get("model"), dict) and model.get("type") == "WordLevel":
        from llamarium.tokenizer.backends.words import load_words

        return load_words(path, raw, config)
    if isinstance(model, dict) and model.get("type") == "Unigram":
        raw["model"] = unigram_table(model, source)
    ids = rules.check_tokenizer_json(raw, source)
    templates = read_templates(path.parent, config)
    byte_level = rules.is_byte_level(raw, source)
    rules.check_pieces(raw, source)
    raw["model"]["merges"] = rules.merges(raw, source)
    reading = rules.read_special_tokens(raw, config, templates.text, source)
    raw["added_tokens"] = reading.added
    changes = list(rules.text_changes(raw, source, byte_level=byte_level))
    special = reading.special
    backend = guard_rust(lambda: _build(path, raw, special, byte_level=byte_level), source)
    for note in (*reading.notes, *(f"text is changed: {change}" for change in changes)):
        warn_caller(f"{escape(source, 4096)}: {note}")
    return Tokenizer(
        backend,
        special,
        vocab_size=max(*ids, *(token["id"] for token in reading.added), -1) + 1,
        source=source,
        chat_template=templates,
        strip_first_space=rules.strips_first_space(raw, source),
    )


def _build(path: Path, raw: dict[str, Any], special: SpecialTokens, *, byte_level: bool) -> "HuggingFaceBackend":
    """Build the backend; on failure the package reads the file itself to give a better error."""
    import tokenizers

    try:
        return HuggingFaceBackend(raw, special.ids, byte_level=byte_level, source=str(path))
    except TokenizerError:
        raise
    except Exception:
        tokenizers.Tokenizer.from_file(str(path))
        raise


class HuggingFaceBackend(Backend):
    """A vocabulary that the `tokenizers` package runs."""

    def __init__(self, raw: Mapping[str, Any], control: Mapping[str, int], *, byte_level: bool, source: str) -> None:
        """Build the package's tokenizer.

        Args:
            raw: Content of a `tokenizer.json`; merges may be tuples.
            control: Control tokens, spelling to id; all of them are added tokens.
            byte_level: Tokens are bytes in GPT-2's printable characters instead of SentencePiece pieces.
            source: The file, for messages.
        """
        self._package = PrivateTokenizer(raw, control, source)
        self._inner = self._package.inner
        self._control = dict(control)
        self._byte_level = byte_level
        self._source = source
        self._added: dict[int, str] = {token["id"]: token["content"] for token in raw["added_tokens"]}
        unknown = raw["model"].get("unk_token")  # a text may give this one
        self._counted = frozenset(i for spelling, i in control.items() if spelling != unknown)
        missing = [byte for byte, character in BYTE_TO_CHARACTER.items() if self._inner.token_to_id(character) is None]
        self._missing_bytes = bytes(missing) if byte_level else b""

    def encode(self, text: str) -> list[int]:
        """Encode text without control tokens; TokenizerError for missing bytes or millions of consecutive blanks."""
        self._check(text)
        return self._run(self._inner, text).ids

    def encode_parts(self, parts: Parts) -> list[int]:
        """Encode texts and control tokens as one string, with control tokens under their private names."""
        pieces: list[str] = []
        pending: dict[int, int] = {}  # the control tokens, by their place in `parts`
        for place, part in enumerate(parts):
            if isinstance(part, str):
                self._check(part)
                pieces.append(part)
            else:
                pending[place] = part
                pieces.append(self._package.names.by_id[part])
        while True:
            encoding = self._run(self._inner, "".join(pieces))
            ids = encoding.ids
            if [i for i in ids if i in self._counted] == [i for i in pending.values() if i in self._counted]:
                return ids
            # The token's flags prevent a match here: inside a word, or in text changed by a normalizer.
            unmatched = list(_unmatched(encoding, pieces, pending))
            if not unmatched:
                raise TokenizerError(f"{self._source}: the normalizer or pre-tokenizer changes control tokens")
            for place in unmatched:
                pieces[place] = self._added[pending.pop(place)]

    def encode_parsed(self, text: str, control: Mapping[str, int]) -> list[int]:
        """Encode a text like the package, which recognizes added tokens by their spelling."""
        self._check(text)
        return self._run(self._exact, text).ids

    @cached_property
    def _exact(self) -> "tokenizers.Tokenizer":
        """Tokenizer that knows control tokens by their real spelling."""
        return PrivateTokenizer(self._package.to_json(), {}, self._source).inner

    def with_control(self, control: Mapping[str, int]) -> "HuggingFaceBackend":
        """Return a backend of the same vocabulary with other control tokens."""
        if control == self._control:
            return self
        raw = self._package.to_json()
        return HuggingFaceBackend(raw, control, byte_level=self._byte_level, source=self._source)

    def _run(self, inner: "tokenizers.Tokenizer", text: str) -> "tokenizers.Encoding":
        try:
            return inner.encode(text, add_special_tokens=False)
        except BaseException as error:
            if (refusal := of_rust(error, self._source)) is None:
                raise
            raise refusal from None

    def _check(self, text: str) -> None:
        if self._missing_bytes:
            utf8 = text.encode("utf-8")
            if len(utf8.translate(None, self._missing_bytes)) < len(utf8):
                self._refuse_missing(text)
        if len(text) > _MAX_BLANKS:
            self._refuse_blanks(text)

    def _refuse_missing(self, text: str) -> None:
        """Raise for bytes without tokens (SmolLM2 lacks some control characters), which the package silently drops."""
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
        """Return the readable implementation, with this file's merges and pre-tokenizer."""
        if not self._byte_level or self._inner.normalizer is not None:
            raise TokenizerError(
                f"{self._source}: merges can be shown for byte-level BPE without a normalizer (Llama 3, SmolLM2) only"
            )
        return self._twin

    @cached_property
    def _twin(self) -> ByteLevelBPE:
        raw = self._package.to_json()
        model = raw["model"]
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        ranks = {(unspell(left), unspell(right)): rank for rank, (left, right) in enumerate(pairs)}
        plain = {i: text for i, text in self._added.items() if text not in self._control}
        ids = {unspell(token): i for token, i in model["vocab"].items() if i not in self._added}
        return ByteLevelBPE(
            ids=ids | {text.encode("utf-8"): i for i, text in plain.items()},
            rank=lambda left, right: ranks.get((left, right)),
            cut=self._cutter(list(plain.values())),
            whole_pieces=bool(model.get("ignore_merges")),
            added=frozenset(text.encode("utf-8") for text in plain.values()),
        )

    def _cutter(self, plain: list[str]) -> Callable[[str], list[str]]:
        """Return the pre-tokenizer: extract the added tokens in `plain`, then split as in the file."""
        pre_tokenizer: Any = self._inner.pre_tokenizer

        def cut(text: str) -> list[str]:
            pieces: list[str] = []
            for position, part in enumerate(split_spellings(text, plain)):
                if position % 2:
                    pieces.append(part)
                elif part:
                    pieces += [unspell(piece).decode("utf-8") for piece, _ in pre_tokenizer.pre_tokenize_str(part)]
            return pieces

        return cut

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`."""
        raw = self._package.to_json()
        if raw["model"]["type"] == "Unigram":
            raw["model"] = unigram_list(raw["model"])
        save_huggingface(folder, tokenizer, raw)


def _unmatched(encoding: "tokenizers.Encoding", pieces: list[str], pending: Mapping[int, int]) -> Iterator[int]:
    """Yield the indices of control tokens whose private names were not encoded as control tokens."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for i, span in zip(encoding.ids, encoding.offsets, strict=True):
        spans.setdefault(i, []).append(span)
    start = 0
    for place, piece in enumerate(pieces):
        end = start + len(piece)
        if place in pending and not any(left < end and start < right for left, right in spans.get(pending[place], ())):
            yield place
        start = end


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode("utf-8")
