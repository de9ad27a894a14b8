"""Segment a normalized text into pieces of the vocabulary: by the C library, or in Python if it is not available.

**BPE** starts with single characters. Of all adjacent parts whose concatenation is a piece, the pair with the highest
score is merged (the leftmost of equals); this repeats until no concatenation is a piece.

**Unigram** chooses the segmentation with the highest sum of scores. From left to right, the best segmentation up to a
position is the best over all pieces that end there (Viterbi).

Source: google/sentencepiece, `src/bpe_model.cc` and `src/unigram_model.cc`.
"""

import heapq
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamarium.kernels import segmenter
from llamarium.kernels.native import library
from llamarium.tokenizer.sentencepiece.model import SentencePieceModel
from llamarium.tokenizer.sentencepiece.normalize import KeptTexts, split_matches
from llamarium.tokenizer.sentencepiece.piece_type import PieceType

UNKNOWN_PENALTY = np.float32(10)
"""The score of a character without a piece is the lowest score minus this."""

_LARGEST_SUM = 100_000.0


class Segmenter(Protocol):
    """Splits a text into pieces."""

    def ids(self, text: str) -> list[int]:
        """Return the ids of a normalized text."""
        ...


_MAX_C_CHARACTERS = 8 * 2**20  # total length of all pieces; a vocabulary of 256,000 has 2 million


def make_segmenter(model: SentencePieceModel) -> Segmenter:
    """Return a segmenter: in C, unless the library is missing or the pieces are far longer than any model's.

    The tables in C take up to 90 bytes per byte of the pieces.
    """
    is_huge = sum(map(len, model.pieces)) > _MAX_C_CHARACTERS
    if library() is None or is_huge:
        return PythonSegmenter(model)
    is_unigram = model.kind == "unigram"
    scores, unknown_score = unigram_scores(model) if is_unigram else (None, 0.0)
    return segmenter.Segmenter(
        model.pieces,
        model.types,
        ranks=None if is_unigram else merge_ranks(model),
        scores=scores,
        unknown_score=unknown_score,
        unknown_id=model.unknown_id,
        byte_ids=model.byte_ids,
    )


def merge_ranks(model: SentencePieceModel) -> NDArray[np.int32]:
    """Return the rank of each piece's score, 0 for the highest; equal scores have the same rank, and -0.0 < 0.0."""
    bits = np.array(model.scores, np.float64).view(np.int64)
    ascending = np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits)
    return np.unique(~ascending, return_inverse=True)[1].astype(np.int32)


def unigram_scores(model: SentencePieceModel) -> tuple[NDArray[np.float32], float]:
    """Return the score of each piece, and that of a character without a piece.

    The score of a user-defined piece depends on its length, and is so high that the piece is nearly always chosen.
    """
    scores = np.array(model.scores, np.float32)
    ordinary = scores[np.array(model.types) == int(PieceType.NORMAL)]
    worst = ordinary.min() if len(ordinary) else np.float32(0)
    for i in model.of_type(PieceType.USER_DEFINED):
        scores[i] = np.float32(0.1 * (len(model.pieces[i].encode("utf-8")) - 1))
    return scores, float(worst - UNKNOWN_PENALTY)


class PythonSegmenter:
    """A segmenter in Python, with the same ids as the C library but many times slower."""

    def __init__(self, model: SentencePieceModel) -> None:
        """Prepare a validated model."""
        self._model = model
        self._unused = frozenset(model.of_type(PieceType.UNUSED))
        self._user_defined = KeptTexts(model.pieces[i] for i in model.of_type(PieceType.USER_DEFINED))
        self._usable = {piece: i for piece, i in model.ids.items() if i not in self._unused}
        if model.kind == "unigram":
            scores, self._unknown_score = unigram_scores(model)
            self._scores = scores.tolist()
            self._lengths = _lengths(self._usable)
        else:
            self._ranks = merge_ranks(model).tolist()

    def ids(self, text: str) -> list[int]:
        """Return the ids of a normalized text; consecutive unknown characters become one unknown id."""
        model = self._model
        ids: list[int] = []
        was_unknown = False
        for piece in self._cut(text):
            token_id = self._usable.get(piece)
            if token_id is not None:
                ids.append(token_id)
            elif model.byte_ids:
                ids += [model.byte_ids[byte] for byte in piece.encode("utf-8")]
            elif not was_unknown and model.unknown_id is not None:
                ids.append(model.unknown_id)
            was_unknown = token_id is None
        return ids

    def _cut(self, text: str) -> Iterable[str]:
        """Split a text into pieces and single characters without a piece."""
        if self._model.kind == "unigram":
            return best_cut(text, self._usable, self._lengths, self._scores, self._unknown_score)
        parts: list[str] = []
        frozen: list[bool] = []
        for plain, piece in split_matches(text, (self._user_defined,)):
            parts += plain
            frozen += [False] * len(plain)
            if piece is not None:
                parts.append(piece)
                frozen.append(True)
        return merge_characters(parts, frozen, self._model.ids, self._ranks, self._unused)


def merge_characters(
    parts: Sequence[str],
    frozen: Sequence[bool],
    ids: Mapping[str, int],
    ranks: Sequence[int],
    unused: frozenset[int],
) -> list[str]:
    """Merge adjacent parts into pieces, the lowest rank first.

    Args:
        parts: Characters; longer parts are user-defined pieces.
        frozen: Whether each part is excluded from merging.
        ids: Id of each piece.
        ranks: Rank of each id.
        unused: Ids of pieces that are only intermediate merges: remaining ones are split again.
    """
    at = list(parts)
    before = list(range(-1, len(at) - 1))
    after = [*range(1, len(at)), -1]
    halves: dict[str, int] = {}  # length of the left part in the latest merge of each unused piece
    heap: list[tuple[int, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left < 0 or right < 0 or frozen[left] or frozen[right]:
            return
        text = at[left] + at[right]
        if (token_id := ids.get(text)) is not None:
            heapq.heappush(heap, (ranks[token_id], left, right, len(text)))
            if token_id in unused:
                halves[text] = len(at[left])

    for left in range(len(at) - 1):
        consider(left, left + 1)
    while heap:
        _, left, right, size = heapq.heappop(heap)
        if not at[left] or not at[right] or len(at[left]) + len(at[right]) != size:
            continue  # stale: one of the parts has been merged with another
        at[left], at[right] = at[left] + at[right], ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [piece for part in at if part for piece in _used(part, ids, unused, halves)]


def _used(text: str, ids: Mapping[str, int], unused: frozenset[int], halves: Mapping[str, int]) -> list[str]:
    """Split unused pieces into the parts from which they were merged."""
    done: list[str] = []
    waiting = [text]
    while waiting:
        part = waiting.pop()
        if ids.get(part) in unused and part in halves:
            waiting += (part[halves[part] :], part[: halves[part]])
        else:
            done.append(part)
    return done


def best_cut(
    text: str,
    ids: Mapping[str, int],
    lengths: Mapping[str, Sequence[int]],
    scores: Sequence[float],
    unknown_score: float,
) -> list[str]:
    """Return the segmentation of a text with the highest sum of scores; other characters are single parts.

    Sums are float32, as in the library, since rounding decides between nearly equal segmentations.

    Args:
        text: Normalized text.
        ids: Id of each piece.
        lengths: Lengths of the pieces by first character, ascending.
        scores: Score of each id, float32 values.
        unknown_score: Score of a character without a piece.
    """
    sums = array("f", bytes(4 * (len(text) + 1)))  # arrays round values to float32
    rounded = array("f", [0.0])
    starts = [-1] * (len(text) + 1)
    reached = 0
    for start, character in enumerate(text):
        if abs(sums[start]) > _LARGEST_SUM:
            _begin_again(sums, starts, start, reached)
        ways = [
            (start + size, scores[token_id])
            for size in lengths.get(character, ())
            if (token_id := ids.get(text[start : start + size])) is not None and start + size <= len(text)
        ]
        if not ways or ways[0][0] != start + 1:
            ways.insert(0, (start + 1, unknown_score))
        for end, score in ways:
            rounded[0] = score + sums[start]
            if starts[end] < 0 or rounded[0] > sums[end]:
                sums[end], starts[end] = rounded[0], start
        reached = max(reached, ways[-1][0])
    cuts = [len(text)]
    while cuts[-1] > 0:
        cuts.append(starts[cuts[-1]])
    return [text[start:end] for start, end in zip(cuts[:0:-1], cuts[-2::-1], strict=True)]


def _lengths(ids: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the lengths of the pieces by first character, ascending."""
    lengths: dict[str, set[int]] = {}
    for piece in ids:
        lengths.setdefault(piece[0], set()).add(len(piece))
    return {first: sorted(sizes) for first, sizes in lengths.items()}


def _begin_again(sums: "array[float]", starts: Sequence[int], start: int, reached: int) -> None:
    """Shift the sums to 0 at `start`, so that float32 remains precise enough for a long text."""
    offset = sums[start]
    for place in range(start, reached + 1):
        if place == start or starts[place] >= 0:
            sums[place] -= offset
