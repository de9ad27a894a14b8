"""A SentencePiece vocabulary behind `Tokenizer`: its text, its control tokens, and tokens added to it.

Whether a space is put before the text after a control token is a question of the files. `sentencepiece` itself encodes
each text alone, so that Meta's and Mistral's code put one there; Hugging Face's `legacy: true`, which is the default of
old files, and llama.cpp do the same. With `legacy: false` only the beginning of the whole string gets one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llamarium.errors import TokenizerError
from llamarium.file_names import TOKENIZER_CONFIG, TOKENIZER_MODEL
from llamarium.io import atomic_file, unwritable
from llamarium.tokenizer.backends.files import write_json
from llamarium.tokenizer.base import Backend, Tokenizer
from llamarium.tokenizer.bpe import ByteLevelBPE
from llamarium.tokenizer.sentencepiece.encoder import Encoder
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel, write_model
from llamarium.tokenizer.sentencepiece.normalize import SPACE
from llamarium.tokenizer.sentencepiece.piece_type import PieceType
from llamarium.tokenizer.special import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token beside the pieces, or a piece with rules of its own; it is found in a text before pieces are.

    Attributes:
        content: Its text.
        id: Its id.
        lstrip: It takes the white space before it away.
        rstrip: It takes the white space behind it away.
        single_word: It is found between other characters than letters, digits and `_` only.
    """

    content: str
    id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class SentencePieceBackend(Backend):
    """Pieces that `llamarium.tokenizer.sentencepiece` finds."""

    def __init__(
        self,
        model: SentencePieceModel,
        control: Mapping[str, int],
        source: str,
        *,
        added: Sequence[AddedToken] = (),
        prefix_after_tokens: bool = True,
        longest_first: bool = False,
        file: bytes | None = None,
    ) -> None:
        """Take a checked model.

        Args:
            model: The pieces.
            control: The control tokens, spelling to id; no text becomes one, whatever the model or `added` says.
            source: The file, for messages.
            added: Further tokens, and pieces with rules.
            prefix_after_tokens: Put the dummy prefix before every text between tokens, not only before the first.
            longest_first: Find the longest of the added tokens everywhere, then the next (llama.cpp); otherwise they
                are found from left to right (Hugging Face).
            file: The bytes of the `tokenizer.model` that the model was read from.
        """
        self.model = model
        self.added = tuple(added)
        self.prefix_after_tokens = prefix_after_tokens
        self._encoder = Encoder(_with_control_pieces(model, set(control.values())), source)
        self._control = control
        self._source = source
        self._longest_first = longest_first
        self._file = file
        self._plain = {token.content: token.id for token in added if token.content not in control}
        self._spelled = {token.id: token.content for token in added}
        self._lstrip = frozenset(token.id for token in added if token.lstrip)
        self._rstrip = frozenset(token.id for token in added if token.rstrip)

    def with_control(self, control: Mapping[str, int]) -> "SentencePieceBackend":
        """Return a backend of the same vocabulary with other control tokens."""
        return SentencePieceBackend(
            self.model,
            control,
            self._source,
            added=self.added,
            prefix_after_tokens=self.prefix_after_tokens,
            longest_first=self._longest_first,
            file=self._file,
        )

    def encode(self, text: str) -> list[int]:
        """Encode ordinary text."""
        return self.encode_parts([text] if text else [])

    def encode_parts(self, parts: Parts) -> list[int]:
        """Encode texts and tokens as one string, with the dummy prefix where the vocabulary adds it."""
        found = list(self._with_added(parts))
        ids: list[int] = []
        for place, part in enumerate(found):
            if not isinstance(part, str):
                ids.append(part)
                continue
            if place and found[place - 1] in self._rstrip:
                part = part.lstrip()
            if place + 1 < len(found) and found[place + 1] in self._lstrip:
                part = part.rstrip()
            ids += self._encoder.encode(part, dummy_prefix=place == 0 or self.prefix_after_tokens) if part else []
        return ids

    def _with_added(self, parts: Parts) -> Iterator[str | int]:
        """Yield the parts, with added tokens extracted from the texts."""
        for part in parts:
            if not isinstance(part, str) or not self._plain:
                yield part
            elif self._longest_first:
                yield from _partition(part, self._plain_in_order)
            else:
                split = self._pattern.split(part)
                yield from (self._plain[p] if place % 2 else p for place, p in enumerate(split) if p)

    @cached_property
    def _plain_in_order(self) -> list[tuple[str, int]]:
        return sorted(self._plain.items(), key=lambda item: len(item[0].encode("utf-8")), reverse=True)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        words = {token.content for token in self.added if token.single_word}
        ordered = sorted(self._plain, key=len, reverse=True)
        spelled = [rf"(?<!\w){re.escape(t)}(?!\w)" if t in words else re.escape(t) for t in ordered]
        return re.compile("(" + "|".join(spelled) + ")")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of one token; a control token is its own spelling."""
        if (spelled := self._spelled.get(token_id)) is not None:
            return spelled.encode("utf-8")
        if token_id >= len(self.model.pieces):
            return None
        piece, kind = self.model.pieces[token_id], self.model.types[token_id]
        if kind == PieceType.BYTE:
            return self._bytes_of.get(token_id, piece.encode("utf-8"))
        is_text = kind not in (PieceType.CONTROL, PieceType.UNKNOWN)
        return (piece.replace(SPACE, " ") if is_text else piece).encode("utf-8")

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        return {token_id: bytes([byte]) for byte, token_id in enumerate(self.model.byte_ids)}

    def byte_level_bpe(self) -> ByteLevelBPE:
        """Refuse: pieces are merged by scores of characters, not of bytes."""
        raise TokenizerError(
            f"{self._source}: merges can be shown for byte-level BPE (Llama 3, SmolLM2) only; this is a SentencePiece "
            "vocabulary"
        )

    def save(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write `tokenizer.model` and `tokenizer_config.json`, as transformers and `load_sentencepiece` read them."""
        path = folder / TOKENIZER_MODEL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as file:
                file.write(write_model(self.model) if self._file is None else self._file)
        except OSError as error:
            raise unwritable(path, error) from error
        write_json(folder / TOKENIZER_CONFIG, _config(self, tokenizer))


def _with_control_pieces(model: SentencePieceModel, ids: set[int]) -> SentencePieceModel:
    """Return the model with these pieces as control tokens, which never match text."""
    ids = ids - set(model.of_type(PieceType.UNKNOWN))
    return replace(model, types=[PieceType.CONTROL if i in ids else kind for i, kind in enumerate(model.types)])


def _config(backend: SentencePieceBackend, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the fields of tokenizer_config.json that differ from the format's defaults."""
    spelling = {i: text for text, i in tokenizer.special.ids.items()}
    named = {
        "bos_token": tokenizer.bos_token_id,
        "pad_token": tokenizer.pad_token_id,
        "unk_token": backend.model.unknown_id,
    }
    named["eos_token"] = next(iter(tokenizer.eos_token_ids), None)
    config: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": backend.prefix_after_tokens,
        "add_bos_token": tokenizer.special.add_bos,
        "add_eos_token": False,
        **{name: spelling[i] for name, i in named.items() if i is not None and i in spelling},
        "clean_up_tokenization_spaces": False,
    }
    flagged = {token.id: token for token in backend.added}
    if not backend.model.add_dummy_prefix:
        config["add_prefix_space"] = False
    for i in sorted({*spelling, *flagged}):
        token = flagged.get(i) or AddedToken(content=spelling[i], id=i)
        config.setdefault("added_tokens_decoder", {})[str(i)] = {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": False,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": i in spelling,
        }
    templates = tokenizer.chat_templates.stored
    return config if templates is None else config | {"chat_template": templates}


def _partition(text: str, tokens: Sequence[tuple[str, int]]) -> Iterator[str | int]:
    """Cut tokens out of a text, the first of them everywhere before the next."""
    parts: list[str | int] = [text]
    for content, token_id in tokens:
        if content in text:
            parts = [piece for part in parts for piece in _cut_out(part, content, token_id)]
    yield from parts


def _cut_out(part: str | int, content: str, token_id: int) -> Iterator[str | int]:
    if not isinstance(part, str):
        yield part
        return
    for place, text in enumerate(part.split(content)):
        if place:
            yield token_id
        if text:
            yield text
