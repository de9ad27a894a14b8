"""From text to vectors."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.types import Floats, Ints

Rank = Callable[[bytes, bytes], int | None]


def merge(piece: bytes, rank: Rank) -> list[bytes]:
    """Join the bytes of a piece into tokens.

    Begin with one part for each byte. Of all pairs of neighbours that have a rank, join the one with the lowest rank,
    the leftmost of equals. Repeat until no pair of neighbours has a rank.

    Args:
        piece: A word with the space before it, as UTF-8 bytes.
        rank: rank(left, right) is a number, or None where the two never merge.

    Returns:
        The tokens in order, a list of bytes; joined they are the piece.
    """
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        candidates = [(rank(parts[i], parts[i + 1]), i) for i in range(len(parts) - 1)]
        ranked = [(number, i) for number, i in candidates if number is not None]
        if not ranked:
            return parts
        _, i = min(ranked)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def embed(ids_T: Ints, table_VD: Floats) -> Floats:
    """Return the row of the table for each id.

    Args:
        ids_T: Token ids, (T,).
        table_VD: One row of D numbers for each token of the vocabulary, (V, D).

    Returns:
        (T, D).
    """
    return table_VD[ids_T]


def _bytes_of(piece: bytes) -> list[bytes]:
    return [piece[i : i + 1] for i in range(len(piece))]


def _characters_of(piece: bytes) -> list[bytes]:
    return [character.encode() for character in piece.decode("utf-8", "replace")]


def _merge_by(
    order: Callable[[list[tuple[int, int]]], tuple[int, int]],
    times: int = 1 << 30,
    parts_of: Callable[[bytes], list[bytes]] = _bytes_of,
) -> Callable[..., object]:
    """Return `merge` with another choice among the (rank, place) of the neighbours that merge, or another beginning."""

    def merge_so(piece: bytes, rank: Rank) -> list[bytes]:
        parts = parts_of(piece)
        for _ in range(times):
            numbers = [rank(*pair) for pair in pairwise(parts)]
            ranked = [(number, i) for i, number in enumerate(numbers) if number is not None]
            if not ranked:
                break
            _, i = order(ranked)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts

    return merge_so


def _embed_with_positions(ids_T: Ints, table_VD: Floats) -> Floats:
    width = table_VD.shape[1]
    angles = np.arange(len(ids_T))[:, None] / 10_000.0 ** (np.arange(width) // 2 * 2 / width)
    return table_VD[ids_T] + np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles))


def _merge_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    """Yield pieces over vocabularies that were learned as real ones are: a pair's tokens have lower ranks than it has.

    So joining all places of a pair in one round, as GPT-2's code does, is right as well.
    """
    yield b"aaa", lambda left, right: 1 if left == right == b"a" else None
    letters = "abé"
    for _ in range(32):
        tokens = [bytes([byte]) for byte in sorted(set(letters.encode()))]
        ranks: dict[tuple[bytes, bytes], int] = {}
        while len(ranks) < 40:
            left, right = (tokens[int(rng.integers(len(tokens)))] for _ in range(2))
            if (left, right) not in ranks and len(left + right) <= 6:
                ranks[left, right] = len(ranks)
                tokens.append(left + right)
        word = "".join(rng.choice(list(letters), rng.integers(4, 16))).encode()
        yield word, lambda left, right, ranks=ranks: ranks.get((left, right))


def _embed_cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for rows, width in ((6, 6), (11, 4), (5, 9)):
        yield rng.integers(0, rows - 1, 7), rng.normal(size=(rows, width)).astype(np.float32)


STEPS = (
    Step(
        merge,
        "Bytes and merges",
        "A text becomes bytes, and bytes become tokens. The vocabulary has learned which two neighbours to join, and "
        "in which order: the pair that was learned first has the lowest rank.",
        "1-from-text-to-vectors#Text becomes ids",
        "tokens",
        ("",),
        (
            "Keep a list of parts, one byte each. In every round look at all neighbours, not at the first that merges.",
            "min() over (rank, place) finds the lowest rank and the leftmost of equals; parts[i:i+2] = [left + right].",
        ),
        _merge_cases,
        (
            Mistake("The first pair that has a rank is joined; the pair with the lowest rank goes first.",
                    _merge_by(lambda ranked: min(ranked, key=lambda pair: pair[1]))),
            Mistake("The pair with the highest rank is joined first; the lowest was learned first.",
                    _merge_by(lambda ranked: max(ranked, key=lambda pair: (pair[0], -pair[1])))),
            Mistake("The pair with the highest rank is joined first, the rightmost of equals; the lowest was learned "
                    "first.", _merge_by(max)),
            Mistake("Of equal pairs the rightmost is joined; the leftmost goes first.",
                    _merge_by(lambda ranked: min(ranked, key=lambda pair: (pair[0], -pair[1])))),
            Mistake("Only one merge is made; repeat until no neighbours have a rank.", _merge_by(min, 1)),
            Mistake("Nothing is merged: each byte is a token of its own.", _merge_by(min, 0)),
            Mistake("The piece is cut into characters; it begins as bytes, and é is two of them.",
                    _merge_by(min, parts_of=_characters_of)),
            Mistake("Bytes are taken for characters and encoded again: chr(195) becomes two bytes. A part is "
                    "piece[i : i + 1].",
                    _merge_by(min, parts_of=lambda piece: [chr(byte).encode() for byte in piece])),
            Mistake("The parts are text (str), characters instead of bytes; tokens are bytes: piece[i : i + 1].",
                    lambda piece, rank: [part.decode("latin-1") for part in merge(piece, rank)]),
            Mistake("The parts are text (str), and none of them merges; tokens are bytes: piece[i : i + 1].",
                    lambda piece, rank: list(piece.decode("utf-8", "replace"))),
            Mistake("The parts are numbers: list(piece) and piece[i] give ints; a part is piece[i : i + 1].",
                    lambda piece, rank: list(piece)),
            Mistake("The pair with rank 0 is never joined, as `if rank(...)` is false for 0; compare with None.",
                    lambda piece, rank: merge(piece, lambda left, right: rank(left, right) or None)),
        ),
    ),
    Step(
        embed,
        "A row of the table",
        "Each token id chooses one row of the embedding table. Nothing is computed: the row is looked up.",
        "1-from-text-to-vectors#Ids become vectors",
        "embedding",
        ("x TD",),
        ("An id is the number of a row.", "An array can be indexed with an array of ids: table_VD[ids_T]."),
        _embed_cases,
        (
            Mistake("Columns are taken; an id is the number of a row.", lambda ids_T, table_VD: table_VD[:, ids_T].T),
            Mistake("Ids count from 0; the row after each id is taken.", lambda ids_T, table_VD: table_VD[ids_T + 1]),
            Mistake("Ids count from 0; the row before each id is taken.", lambda ids_T, table_VD: table_VD[ids_T - 1]),
            Mistake("Positions are added to the rows (sines and cosines), as in the first Transformer; Llama rotates "
                    "queries and keys instead.", _embed_with_positions),
            Mistake("The rows are scaled by the root of D, as the first Transformer and Gemma do; Llama does not.",
                    lambda ids_T, table_VD: table_VD[ids_T] * np.sqrt(np.float32(table_VD.shape[1]))),
            Mistake("The rows are divided by their length; Llama takes them as they are.",
                    lambda ids_T, table_VD: table_VD[ids_T] / np.linalg.norm(table_VD[ids_T], axis=-1, keepdims=True)),
        ),
    ),
)  # fmt: skip
