"""Encode a text: normalize it and split it into pieces; characters without a piece become bytes or the unknown id."""

from functools import cached_property

from llamarium.tokenizer.sentencepiece.model import SentencePieceModel
from llamarium.tokenizer.sentencepiece.normalize import Normalizer
from llamarium.tokenizer.sentencepiece.segment import Segmenter, make_segmenter


class Encoder:
    """Encodes texts with a vocabulary."""

    def __init__(self, model: SentencePieceModel, source: str) -> None:
        """Prepare a checked model; TokenizerError if its normalization rules are damaged."""
        self._model = model
        self._normalizer = Normalizer(model, source)

    def encode(self, text: str, *, dummy_prefix: bool = True) -> list[int]:
        """Return the ids of a text; `dummy_prefix` False adds no space before it."""
        return self._segmenter.ids(self._normalizer.normalize(text, dummy_prefix=dummy_prefix))

    @cached_property
    def _segmenter(self) -> Segmenter:
        return make_segmenter(self._model)
