"""From a text to ids: normalized, cut into pieces, and what no piece covers as bytes or as the unknown piece."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import add

from llamarium.tokenizer.sentencepiece.model import PieceType, SentencePieceModel
from llamarium.tokenizer.sentencepiece.normalize import KeptTexts, Normalizer, split_matches
from llamarium.tokenizer.sentencepiece.segment import best_cut, merge_characters

_KEPT_CHARACTERS = 32
_KEPT_CHUNKS = 2**16


class Encoder:
    """Encodes texts with one vocabulary."""

    def __init__(self, model: SentencePieceModel, source: str) -> None:
        """Prepare a checked model; TokenizerError if its normalization rules are damaged."""
        self._model = model
        self._normalizer = Normalizer(model, source)
        self._kept: dict[str, Sequence[str]] = {}

    def encode(self, text: str, *, dummy_prefix: bool = True) -> list[int]:
        """Return the ids of a text; without `dummy_prefix`, no space is put before it."""
        return self._ids(self._cut(self._normalizer.normalize(text, dummy_prefix=dummy_prefix)))

    def _cut(self, text: str) -> Iterable[str]:
        """Cut a normalized text into pieces; other characters stand alone."""
        model = self._model
        if model.kind == "unigram":
            return best_cut(text, model.ids, model.scores, model.types)
        if self._unused:  # how these are taken apart again depends on the whole text
            return self._merge_all(text)
        return chain.from_iterable(map(self._merge_chunk, self._chunks(text)))

    def _merge_all(self, text: str) -> list[str]:
        parts: list[str] = []
        frozen: list[bool] = []
        for plain, piece in split_matches(text, (self._user_defined,)):
            parts += plain
            frozen += [False] * len(plain)
            if piece is not None:
                parts.append(piece)
                frozen.append(True)
        return merge_characters(parts, frozen, self._model.ids, self._model.scores, self._unused)

    def _chunks(self, text: str) -> Iterator[str]:
        """Cut a text where no piece could reach over: usually before each space. User-defined pieces stand alone."""
        for plain, piece in split_matches(text, (self._user_defined,)):
            start = 0
            for end, pair in enumerate(map(add, plain, plain[1:]), 1):
                if pair not in self._pairs:
                    yield plain[start:end]
                    start = end
            if plain:
                yield plain[start:]
            if piece is not None:
                yield piece

    def _merge_chunk(self, chunk: str) -> Sequence[str]:
        """Return the pieces of a chunk. Words come again and again, so those of short ones are kept."""
        pieces = self._kept.get(chunk)
        if pieces is not None:
            return pieces
        if chunk in self._user_defined:
            return (chunk,)
        pieces = merge_characters(chunk, [False] * len(chunk), self._model.ids, self._model.scores, self._unused)
        if len(chunk) <= _KEPT_CHARACTERS:
            if len(self._kept) >= _KEPT_CHUNKS:
                self._kept.clear()
            self._kept[chunk] = pieces
        return pieces

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Every two characters that are neighbours in a piece."""
        pieces = (self._model.pieces[i] for i in self._model.of_type(PieceType.NORMAL))
        return frozenset(chain.from_iterable(map(add, piece, piece[1:]) for piece in pieces))

    def _ids(self, pieces: Iterable[str]) -> list[int]:
        """Look the pieces up; several unknown characters in a row are one unknown piece."""
        model = self._model
        ids: list[int] = []
        was_unknown = False
        for piece in pieces:
            token_id = model.ids.get(piece)
            if token_id in self._unused:  # a single character: what longer ones were joined of is known
                token_id = None
            if token_id is not None:
                ids.append(token_id)
            elif model.byte_ids:
                ids += [model.byte_ids[byte] for byte in piece.encode("utf-8")]
            elif not was_unknown and model.unknown_id is not None:
                ids.append(model.unknown_id)
            was_unknown = token_id is None
        return ids

    @cached_property
    def _user_defined(self) -> KeptTexts:
        return KeptTexts(self._model.pieces[i] for i in self._model.of_type(PieceType.USER_DEFINED))

    @cached_property
    def _unused(self) -> frozenset[int]:
        return frozenset(self._model.of_type(PieceType.UNUSED))
