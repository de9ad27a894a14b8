"""From a text to ids: normalized, cut into pieces, and what no piece covers as bytes or as the unknown piece."""

from functools import cached_property

from llamarium.tokenizer.sentencepiece.model import PieceType, SentencePieceModel
from llamarium.tokenizer.sentencepiece.normalize import KeptTexts, Normalizer, split_matches
from llamarium.tokenizer.sentencepiece.segment import best_cut, merge_characters


class Encoder:
    """Encodes texts with one vocabulary."""

    def __init__(self, model: SentencePieceModel, source: str) -> None:
        """Prepare a checked model; TokenizerError if its normalization rules are damaged."""
        self._model = model
        self._normalizer = Normalizer(model, source)

    def encode(self, text: str, *, dummy_prefix: bool = True) -> list[int]:
        """Return the ids of a text; without `dummy_prefix`, no space is put before it."""
        return self._ids(self._cut(self._normalizer.normalize(text, dummy_prefix=dummy_prefix)))

    def _cut(self, text: str) -> list[str]:
        """Cut a normalized text into pieces; other characters stand alone."""
        model = self._model
        if model.kind == "unigram":
            return best_cut(text, model.ids, model.scores, model.types)
        parts: list[str] = []
        frozen: list[bool] = []
        for plain, piece in split_matches(text, (self._user_defined,)):
            parts += plain
            frozen += [False] * len(plain)
            if piece is not None:
                parts.append(piece)
                frozen.append(True)
        return merge_characters(parts, frozen, model.ids, model.scores, self._unused)

    def _ids(self, pieces: list[str]) -> list[int]:
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
