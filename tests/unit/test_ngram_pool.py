"""Pools of earlier texts to draft from: bounded, the oldest text goes first, and each is one user's alone."""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from hash_runner import CONFIG, SLOTS, HashRunner, alone, answers
from llamarium.engine.engine import Engine
from llamarium.engine.proposers.lookup import PromptLookup
from llamarium.engine.proposers.ngrams import MAX_MATCH, NgramPool
from llamarium.engine.request import Request
from llamarium.errors import OptionError
from llamarium.runtime.batch import Batch
from llamarium.runtime.runner import Cache
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams


def text(seed: int, length: int = 100, vocab_size: int = 1000) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vocab_size) for _ in range(length)]


def continued(pool: NgramPool, ids: list[int], count: int = 5) -> list[int]:
    place, length = pool.find(ids, len(ids))
    return pool.following(place, count) if length else []


# --- one pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 31, 32, 33, 100, 257])
def test_every_place_of_a_text_is_found(length: int) -> None:
    pool, ids = NgramPool(2**20), text(1, length)
    pool.add(ids)
    for end in range(3, length):
        place, num_equal = pool.find([5000, *ids[:end]], end + 1)
        assert num_equal == min(end, MAX_MATCH) and pool.following(place, 9) == ids[end : end + 9]
    assert continued(pool, ids) == [], "nothing follows its end"


def test_a_pool_stays_within_its_bytes_and_the_oldest_text_goes_first() -> None:
    pool = NgramPool(12 * 1100)
    size = pool.num_bytes
    assert 12 * 1000 <= size <= 12 * 1100
    for number in range(60):
        pool.add(text(number))
        assert continued(pool, text(number)[:50]) == text(number)[50:55]
        assert pool.num_bytes == size and pool.num_tokens <= 1024
    found = [sum(continued(pool, text(n)[:end]) == text(n)[end : end + 5] for end in range(10, 90)) for n in range(60)]
    assert found[:-11] == [0] * 49 and min(found[-3:]) > 40 and min(found[-9:]) > 20


def test_of_a_text_that_is_longer_than_the_pool_the_end_is_kept() -> None:
    pool, ids = NgramPool(12 * 300), text(2, 5000)
    pool.add(ids)
    assert continued(pool, ids[:4980]) == ids[4980:4985] and continued(pool, ids[:1000]) == []
    for num_bytes in (0, 11, 12, 200):
        small = NgramPool(num_bytes)
        small.add(ids)
        assert continued(small, ids[:100]) == [] and small.num_tokens * 12 <= num_bytes


def test_what_is_there_is_not_added_again() -> None:
    pool, ids = NgramPool(2**20), text(3, 3200)
    pool.add(ids)
    before = pool.num_tokens
    pool.add(ids)
    pool.add([*text(4), *ids])  # at other places of its blocks, too
    pool.add([*ids, *text(5)])
    assert before + 200 <= pool.num_tokens < before + 1000, "besides blocks whose n-gram has another one's slot"
    turned = [*ids, *text(5)]
    for end in range(100, 3300, 77):
        assert continued(pool, turned[:end]) == turned[end : end + 5]


def test_texts_do_not_run_into_each_other() -> None:
    pool = NgramPool(2**20)
    pool.add([1, 2, 3, 4])
    pool.add([5, 6, 7, 8])
    assert continued(pool, [2, 3, 4]) == [] == continued(pool, [3, 4, 5]) and continued(pool, [5, 6, 7]) == [8]


def test_two_n_grams_with_the_same_slot_are_told_apart() -> None:
    """A pool of few slots: what is found always continues an n-gram that really stood there."""
    pool, ids = NgramPool(12 * 200), text(6, 180, 4)
    pool.add(ids)
    for end in range(10, 180):
        place, length = pool.find(ids, end)
        if length:
            found = [*ids[end - length : end], *pool.following(place, 1)]
            assert any(ids[i : i + len(found)] == found for i in range(180))


@pytest.mark.parametrize("pool_bytes", [-1, True, 1.5, "9"])
def test_bytes_are_checked(pool_bytes: object) -> None:
    for name in ("pool_bytes", "all_pools_bytes"):
        with pytest.raises(OptionError, match=f"^{name} is .*expected a number of bytes"):
            PromptLookup(**{name: pool_bytes})  # type: ignore[arg-type]


# --- pools of an engine -----------------------------------------------------------------------------------------------


class Told(HashRunner):
    """Says what `says` returns of a position, mostly; a pass takes a second, and each further token a twentieth."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(CONFIG, vocab_size=1000))
        self.now_s, self.says = 0.0, (lambda _: 7)
        self.times: list[float] = []

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> NDArray[np.float32]:
        self.now_s += 1 + 0.05 * (len(batch.token_ids) - 1)
        self.times.append(self.now_s)
        logits = super().run(batch, cache, taps)
        for row, place in enumerate(batch.logit_rows):
            logits[row, self.says(int(batch.positions[place]) + 1)] += 20
        return logits


class Timeline:
    """An engine with drafts, and how long each answer takes."""

    def __init__(self, **options: int) -> None:
        self.runner, self.lookup = Told(), PromptLookup(**options)
        self.engine = Engine(self.runner, 2000, block_size=SLOTS, proposer=self.lookup, clock=lambda: self.runner.now_s)

    def answer(self, prompt: list[int], answer: list[int], **how: object) -> list[float]:
        """Return the seconds from token to token; the answer is checked to be this one."""
        self.runner.says = lambda position: [*prompt, *answer, 0][min(position, len(prompt) + len(answer))]
        params = SamplingParams(temperature=0.0, max_tokens=len(answer))
        self.engine.add(Request(prompt, params, **how))  # type: ignore[arg-type]
        ids, times = [], []
        while not self.engine.is_idle:
            begin_s = self.runner.now_s
            ids += [event.token_id for event in self.engine.step()]
            times.append(self.runner.now_s - begin_s)
        assert ids == answer
        return times


PROMPT, ANSWER = text(10, 60), text(11, 200)
OTHER = text(12, 200)


def test_an_answer_that_comes_again_is_drafted() -> None:
    line = Timeline()
    line.answer(PROMPT, OTHER)  # nothing repeats: what passes cost is measured
    first, second = (sum(line.answer(PROMPT, ANSWER)) for _ in range(2))
    assert second < first / 3
    assert sum(line.answer(text(13, 60), ANSWER)) < first / 3, "after another prompt, too"
    assert line.lookup.num_pool_tokens >= 2 * 200 + 2 * 60


@pytest.mark.parametrize(
    "how",
    [{"ngram_pool": "b"}, {"ngram_pool": None}, {"salt": "x"}, {"salt": "x", "ngram_pool": "a"}],
    ids=str,
)
def test_a_text_of_another_key_gives_no_speed(how: dict[str, object]) -> None:
    """The time of each step is the same whether another user had this very text before, or a text of no use."""

    def times(earlier: list[int]) -> list[list[float]]:
        line = Timeline()
        for _ in range(3):
            line.answer(PROMPT, earlier, ngram_pool="a")
        return [line.answer(text(14, 60), ANSWER, **how) for _ in range(2)]

    assert times(ANSWER) == times(OTHER)
    line = Timeline()
    for _ in range(3):
        line.answer(PROMPT, ANSWER, ngram_pool="a")
    own_s = sum(line.answer(text(14, 60), ANSWER, ngram_pool="a"))
    assert own_s < sum(times(ANSWER)[0]) / 3, "for the key itself it does"


@pytest.mark.parametrize("how", [{"ngram_pool": None}, {"salt": "x"}], ids=str)
def test_a_private_text_is_not_kept(how: dict[str, object]) -> None:
    line = Timeline()
    for _ in range(3):
        line.answer(PROMPT, ANSWER, **how)
    assert line.lookup.num_pool_tokens == 0
    repeated = [*ANSWER[:40]] * 4
    assert len(line.answer([*PROMPT, *ANSWER[:40]], repeated, **how)) < 60, "its own text is still looked up"


def test_a_corpus_is_for_all() -> None:
    runner = Told()
    lookup = PromptLookup(pool_bytes=0, corpus=ANSWER)
    engine = Engine(runner, 2000, block_size=SLOTS, proposer=lookup, clock=lambda: runner.now_s)
    runner.says = lambda position: [*PROMPT, *ANSWER, 0][min(position, 260)]
    for how in ({"ngram_pool": "a"}, {"salt": "x"}):
        before = engine.counts.steps
        number = engine.add(Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=200), **how))  # type: ignore[arg-type]
        assert answers(list(engine.run()), [number]) == [[ANSWER]]
        assert engine.counts.steps - before < 60
    assert lookup.num_pool_tokens == 0


def test_all_pools_together_have_a_bound_and_the_key_that_was_not_seen_for_longest_goes_first() -> None:
    size = 12 * 1024
    line = Timeline(pool_bytes=size, all_pools_bytes=3 * size + 100)
    for name in ("a", "b", "c", "a", "d"):
        line.answer(PROMPT, ANSWER, ngram_pool=name)
        assert line.lookup.pools_bytes <= 3 * size
    assert line.lookup.pools_bytes == 3 * size

    seconds = {name: sum(line.answer(text(14, 60), ANSWER, ngram_pool=name)) for name in "acdb"}
    assert max(seconds[name] for name in "acd") < seconds["b"] / 3


def test_one_pool_may_be_larger_than_the_bound_of_all() -> None:
    line = Timeline(pool_bytes=12 * 1024, all_pools_bytes=0)
    first, second = (sum(line.answer(PROMPT, ANSWER, ngram_pool="a")) for _ in range(2))
    assert second < first / 3 and line.lookup.pools_bytes == 12 * 1024


def test_a_pool_that_goes_while_its_request_runs_gives_its_memory_back_and_changes_no_token() -> None:
    line = Timeline(pool_bytes=12 * 1024, all_pools_bytes=12 * 1024)
    for _ in range(2):
        line.answer(PROMPT, ANSWER, ngram_pool="a")
    pool = line.lookup.pool("a")
    number = line.engine.add(Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=200), ngram_pool="a"))
    events = [event for _ in range(8) for event in line.engine.step()]
    assert 20 < len(events) < 200, "in the midst of a copy"

    line.lookup.pool("b")
    assert pool.texts.num_bytes < 100
    assert answers([*events, *line.engine.run()], [number]) == [[ANSWER]]
    assert pool.texts.num_tokens == 0, "nothing is added to it"


@pytest.mark.parametrize("num_bytes", [12 * 150, 2**24])
def test_tokens_are_the_same_in_any_company_and_pool(num_bytes: int) -> None:
    """Greedy and drawn, with adapters, stops, log-probabilities and preemption; in two pools and none."""
    rng, kept = random.Random(1), PromptLookup(pool_bytes=num_bytes)
    kept.record_pass = _cheap(kept)  # type: ignore[method-assign]
    num_accepted = 0
    for num_blocks in (900, 30):
        engine = Engine(HashRunner(circle=4.0), num_blocks, block_size=SLOTS, proposer=kept)
        for _ in range(2):
            requests = [_request(rng) for _ in range(16)]
            numbers = [engine.add(one) for one in requests]
            assert answers(list(engine.run()), numbers) == [alone(one, circle=4.0) for one in requests]
        assert engine.snapshot().used_blocks == 0
        num_accepted += engine.counts.accepted_tokens
    assert num_accepted > 10 and kept.num_pool_tokens <= 2 * num_bytes // 12


def _request(rng: random.Random) -> Request:
    temperature = rng.choice((0.0, 0.3))
    params = SamplingParams(
        temperature=temperature, seed=rng.randrange(3), max_tokens=rng.randint(5, 40),
        n=rng.choice((1, 3)) if temperature else 1, logprobs=rng.choice((None, 2)),
    )  # fmt: skip
    prompt = [*rng.choice(([1] * 7, [4, 5, 6, 7, 8])), *(rng.randrange(50) for _ in range(rng.randint(1, 9)))]
    return Request(prompt, params, stop_ids=(3, 9), adapter=rng.choice((-1, 0)), ngram_pool=rng.choice(("", "a", None)))


def _cheap(lookup: PromptLookup) -> Callable[[int, int, float], None]:
    record = lookup.record_pass
    return lambda num_rows, num_drafted, _: record(num_rows, num_drafted, 1 + num_drafted / 1000)


def test_a_place_behind_the_ring_agrees_with_nothing() -> None:
    pool = NgramPool(12 * 256)
    pool.add(list(range(200)), 0)
    assert pool.length_at(10**6, list(range(8)), 8) == 0
