"""How a prepared text is cut into pieces of the vocabulary, to read; `encoder` does it a word at a time.

**BPE** begins with single characters. Of all neighbours that together are a piece, those whose piece has the highest
score are joined, the leftmost of equals; this repeats until no neighbours are a piece.

**Unigram** takes the cut whose pieces have the highest sum of scores. Going from left to right, the best way to reach a
place is the best over all pieces that end there (Viterbi).

Source: google/sentencepiece, `src/bpe_model.cc` and `src/unigram_model.cc`.
"""

import heapq
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from llamarium.tokenizer.sentencepiece.model import PieceType

UNKNOWN_PENALTY = np.float32(10)
"""How much worse than the worst piece a character without a piece is."""

_LARGEST_SUM = 100_000.0


def merge_characters(
    parts: Sequence[str],
    frozen: Sequence[bool],
    ids: Mapping[str, int],
    scores: Sequence[float],
    unused: frozenset[int],
) -> list[str]:
    """Join neighbouring parts into pieces, the highest score first.

    Args:
        parts: Characters; longer parts are user-defined pieces.
        frozen: Whether a part is never joined to another.
        ids: Of each piece.
        scores: By id.
        unused: Ids of pieces that are steps to longer ones only: where one is left, it is taken apart again.
    """
    at = list(parts)
    before = list(range(-1, len(at) - 1))
    after = [*range(1, len(at)), -1]
    halves: dict[str, int] = {}  # of an unused piece: how long its left half was when it was last seen
    heap: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left < 0 or right < 0 or frozen[left] or frozen[right]:
            return
        text = at[left] + at[right]
        if (token_id := ids.get(text)) is not None:
            heapq.heappush(heap, (-scores[token_id], left, right, len(text)))
            if token_id in unused:
                halves[text] = len(at[left])

    for left in range(len(at) - 1):
        consider(left, left + 1)
    while heap:
        _, left, right, size = heapq.heappop(heap)
        if not at[left] or not at[right] or len(at[left]) + len(at[right]) != size:
            continue  # one of the two has been joined to another since
        at[left], at[right] = at[left] + at[right], ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [piece for part in at if part for piece in _used(part, ids, unused, halves)]


def _used(text: str, ids: Mapping[str, int], unused: frozenset[int], halves: Mapping[str, int]) -> list[str]:
    """Take unused pieces apart into the halves from which they were joined."""
    done: list[str] = []
    waiting = [text]
    while waiting:
        part = waiting.pop()
        if ids.get(part) in unused and part in halves:
            waiting += (part[halves[part] :], part[: halves[part]])
        else:
            done.append(part)
    return done


def best_cut(text: str, ids: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[str]:
    """Cut a text so that the sum of its pieces' scores is highest; what no piece covers is single characters.

    Sums are float32, as in the library, since they decide between cuts that are nearly as good.

    Args:
        text: Prepared, as pieces spell it.
        ids: Of each piece.
        scores: By id, float32 values.
        types: By id.
    """
    ordinary = [score for score, kind in zip(scores, types, strict=True) if kind == PieceType.NORMAL]
    unknown_score = float(np.float32(min(ordinary, default=0)) - UNKNOWN_PENALTY)
    lengths = _lengths(ids)
    sums = array("f", bytes(4 * (len(text) + 1)))  # it rounds what is put into it, and so does this:
    rounded = array("f", [0.0])
    starts = [-1] * (len(text) + 1)
    reached = 0
    for start, character in enumerate(text):
        if abs(sums[start]) > _LARGEST_SUM:
            _begin_again(sums, starts, start, reached)
        so_far, covered = sums[start], False
        for size in lengths.get(character, ()):
            token_id = ids.get(text[start : start + size])
            end = start + size
            if token_id is None or end > len(text) or types[token_id] == PieceType.UNUSED:
                continue
            score = scores[token_id]
            if types[token_id] == PieceType.USER_DEFINED:  # so much that it is nearly always taken
                score = float(np.float32(0.1 * (len(text[start:end].encode("utf-8")) - 1)))
            reached = max(reached, end)
            rounded[0] = score + so_far
            if starts[end] < 0 or rounded[0] > sums[end]:
                sums[end], starts[end] = rounded[0], start
            covered = covered or size == 1
        if not covered:
            reached = max(reached, start + 1)
            rounded[0] = unknown_score + so_far
            if starts[start + 1] < 0 or rounded[0] > sums[start + 1]:
                sums[start + 1], starts[start + 1] = rounded[0], start
    cuts = [len(text)]
    while cuts[-1] > 0:
        cuts.append(starts[cuts[-1]])
    return [text[start:end] for start, end in zip(cuts[:0:-1], cuts[-2::-1], strict=True)]


def _lengths(ids: Mapping[str, int]) -> dict[str, list[int]]:
    """Return how long the pieces are that begin with a character, the shortest first."""
    lengths: dict[str, set[int]] = {}
    for piece in ids:
        lengths.setdefault(piece[0], set()).add(len(piece))
    return {first: sorted(sizes) for first, sizes in lengths.items()}


def _begin_again(sums: "array[float]", starts: Sequence[int], start: int, reached: int) -> None:
    """Count from 0 again at `start`, so that float32 still tells sums apart in a long text."""
    offset = sums[start]
    for place in range(start, reached + 1):
        if place == start or starts[place] >= 0:
            sums[place] -= offset
