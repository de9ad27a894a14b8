"""Merges of a vocabulary that is a list of ranks: those that C finds give the ids of BPE by ranks, on any text."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from llamarium.kernels import ranks
from llamarium.kernels.ranks import find_merges

pytestmark = pytest.mark.quick

BYTES = b"abc "


def made_up(rng: random.Random, size: int) -> list[bytes]:
    """A vocabulary: bytes at any rank, words that merges lead to, and some that none does."""
    tokens = {bytes([byte]) for byte in BYTES}
    while len(tokens) < size:
        known = sorted(tokens)
        if rng.random() < 0.85:
            tokens.add((rng.choice(known) + rng.choice(known))[:9])
        else:
            tokens.add(bytes(rng.choices(BYTES, k=rng.randint(2, 7))))
    found = sorted(tokens)
    rng.shuffle(found)
    if rng.random() < 0.5:  # as a trained vocabulary is: parts come before what they make
        found.sort(key=len)
    return found


def by_ranks(text: bytes, tokens: Sequence[bytes]) -> list[bytes]:
    """Join the two neighbours that are the token of the lowest rank, the leftmost first, until none are."""
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    parts = [text[i : i + 1] for i in range(len(text))]
    while True:
        joined = [(rank_of.get(one + other, len(tokens)), i) for i, (one, other) in enumerate(pairwise(parts))]
        rank, i = min(joined, default=(len(tokens), 0))
        if rank == len(tokens):
            return parts
        parts[i : i + 2] = [tokens[rank]]


def by_merges(text: bytes, merges: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """Join by a list of merges, as the `tokenizers` package does."""
    place_of = {pair: place for place, pair in enumerate(merges)}
    parts = [text[i : i + 1] for i in range(len(text))]
    while True:
        joined = [(place_of.get(pair, len(merges)), i) for i, pair in enumerate(pairwise(parts))]
        place, i = min(joined, default=(len(merges), 0))
        if place == len(merges):
            return parts
        parts[i : i + 2] = [b"".join(merges[place])]


@pytest.mark.parametrize("seed", range(60))
def test_the_merges_that_are_found_are_enough(seed: int) -> None:
    rng = random.Random(seed)
    tokens = made_up(rng, rng.randint(5, 60))
    found = find_merges(tokens)
    assert found is not None
    merges = [(tokens[left], tokens[right]) for left, right in found.tolist()]
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    led_to = [rank_of[left + right] for left, right in merges]
    assert led_to == sorted(led_to), "those that lead to a lower rank come first"
    assert len(set(merges)) == len(merges)
    texts = [bytes(rng.choices(BYTES, k=rng.randint(1, 40))) for _ in range(60)] + tokens
    for text in [*texts, *(b"".join(rng.choices(tokens, k=6)) for _ in range(60))]:
        assert by_merges(text, merges) == by_ranks(text, tokens), text


def test_a_token_has_the_merge_that_makes_it_and_no_other() -> None:
    tokens = [b"a", b"b", b"c", b"ab", b"bc", b"abc"]
    found = find_merges(tokens)
    assert found is not None and found.dtype == "int32"
    assert found.tolist() == [[0, 1], [1, 2], [3, 2]], "abc is ab and c, as ab comes before bc"


def test_a_token_that_no_merge_makes_keeps_all_ways_to_cut_it() -> None:
    tokens = [b"a", b"b", b"c", b"bc", b"ab", b"d", b"cd", b"abcd"]  # bc joins first, and then nothing does
    found = find_merges(tokens)
    assert found is not None
    assert found.tolist() == [[1, 2], [0, 1], [2, 5], [4, 6]]


def test_without_the_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "library", lambda: None)
    assert find_merges([b"a"]) is None
