"""A draft model: no guess changes a token, no block of its cache is lost, and it rests where it does not pay."""

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hash_runner import SLOTS, HashRunner, alone, answers, request_of
from llamarium.engine.engine import Engine
from llamarium.engine.proposers.draft import DraftModel, DraftProposer
from llamarium.engine.request import Request
from llamarium.errors import MemoryBudgetError, OptionError
from llamarium.runtime.batch import Batch
from llamarium.runtime.runner import Cache
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.quick

PROMPT = [5, 6, 7, 8, 9, 10, 4, 5, 6]


class Clock:
    """Seconds that pass only while models run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(HashRunner):
    """A pass takes `pass_s`, and `token_s` for each token."""

    def __init__(self, clock: Clock, pass_s: float, token_s: float, circle: float = 4.0, **changes: Any) -> None:
        super().__init__(dataclasses.replace(HashRunner().config, **changes), circle)
        self.clock, self.pass_s, self.token_s = clock, pass_s, token_s

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Any:
        self.clock.now_s += self.pass_s + self.token_s * len(batch.token_ids)
        return super().run(batch, cache, taps)


class Other(Timed):
    """A draft that is always wrong."""

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Any:
        return -super().run(batch, cache, taps)


def drafted(
    num_blocks: int = 400, kind: Callable[..., Timed] = Timed, cost: float = 0.05, **changes: Any
) -> tuple[Engine, DraftModel]:
    """An engine with a draft whose passes cost so much of the model's."""
    clock = Clock()
    draft = DraftModel(kind(clock, cost, cost / 100, **changes))
    runner = Timed(clock, 1.0, 0.01)
    return Engine(runner, num_blocks, block_size=SLOTS, chunk=64, proposer=draft, clock=clock), draft


def drafter_of(engine: Engine) -> DraftProposer:
    proposer = engine._scheduler.proposer
    assert isinstance(proposer, DraftProposer)
    return proposer


@pytest.mark.parametrize("kind", [Timed, Other])
@pytest.mark.parametrize("num_blocks", [900, 30])
def test_guesses_change_nothing_in_any_company(num_blocks: int, kind: Callable[..., Timed]) -> None:
    rng = random.Random(1)
    requests = [request_of(rng, n=rng.choice((1, 3)), temperature=0.3, max_tokens=40) for _ in range(20)]
    engine, draft = drafted(num_blocks, kind)
    numbers = [engine.add(request) for request in requests]
    assert answers(list(engine.run()), numbers) == [alone(request, circle=4.0) for request in requests]
    assert draft.drafted > 0 and (draft.accepted > 50) == (kind is Timed)
    assert engine.snapshot().used_blocks == drafter_of(engine).num_used_blocks == 0
    assert (engine.counts.preempted > 0) == (num_blocks < 900)
    assert not drafter_of(engine)._states


def test_the_model_itself_is_always_right() -> None:
    """What the draft's cache holds after a rejection, a preemption or a find would show as a wrong guess."""
    rng = random.Random(3)
    requests = [request_of(rng, temperature=0.0, max_tokens=40) for _ in range(12)]
    requests = [dataclasses.replace(request, adapter=-1) for request in requests]
    engine, draft = drafted(60)
    numbers = [engine.add(request) for request in requests]
    assert answers(list(engine.run()), numbers) == [alone(request, circle=4.0) for request in requests]
    assert engine.counts.preempted > 0
    assert engine.counts.accepted_tokens == draft.accepted > 100
    # a few come after an answer's end
    assert engine.counts.drafted_tokens - engine.counts.accepted_tokens <= 8 * len(requests)
    assert engine.counts.steps < engine.counts.generated_tokens / 2


def test_after_a_wrong_guess_the_draft_goes_on_from_what_came() -> None:
    """Its next guess is the token that it says to these ids when nothing was guessed before."""
    engine, draft = drafted(kind=partial(Timed, circle=1.0), cost=0.001)
    engine.add(Request(PROMPT, SamplingParams(temperature=1.0, seed=5, max_tokens=100)))
    first = SamplingParams(temperature=0.0, max_tokens=1)
    engine.step()
    (sequence,) = engine.sequences
    num_compared = 0
    while not engine.is_idle:
        ids = list(sequence.ids)
        engine.step()
        if sequence.draft.ids:
            assert [sequence.draft.ids[:1]] == alone(Request(ids, first), circle=1.0)
            num_compared += 1
    assert num_compared > 20 and 0 < draft.accepted < draft.drafted - 20


def test_blocks_come_back_when_an_answer_is_aborted_while_it_is_guessed_for() -> None:
    engine, draft = drafted()
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=100)
    numbers = [engine.add(Request([*PROMPT, i], params)) for i in range(4)]
    while draft.drafted < 40:
        engine.step()
    assert drafter_of(engine).num_used_blocks > 0
    engine.abort(numbers[0])
    engine.abort(numbers[1], 1)
    expected = alone(Request([*PROMPT, 2], params), circle=4.0)
    drafter = drafter_of(engine)
    held = {block for sequence in engine.sequences for block in drafter._states[sequence].table.blocks}
    assert drafter.num_used_blocks == len(held)
    for number in numbers[1:]:
        engine.abort(number)
    assert engine.snapshot().used_blocks == drafter_of(engine).num_used_blocks == 0
    number = engine.add(Request([*PROMPT, 2], params))
    assert answers(list(engine.run()), [number])[0] == expected


def test_a_bad_draft_rests_and_is_tried_again_for_a_hundredth_of_the_time() -> None:
    engine, draft = drafted(kind=Other, cost=0.2)
    engine.add(Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=380)))
    list(engine.run())
    first = draft.drafted
    assert 0 < first < 60
    clock = engine._clock
    assert isinstance(clock, Clock)
    for _ in range(5):
        begin_s = clock.now_s
        engine.add(Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=380)))
        num_tokens = len(list(engine.run()))
    assert clock.now_s - begin_s < 1.03 * num_tokens * 1.01, "little more than a pass for each token"
    assert draft.drafted > first, "it is still being tried"


def test_a_draft_as_slow_as_the_model_rests() -> None:
    engine, draft = drafted(cost=1.0)
    engine.add(Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=300)))
    list(engine.run())
    assert draft.best_length(1) == (0, 0.0) and draft.drafted < 20


def test_it_guesses_further_the_more_often_it_is_right() -> None:
    draft = DraftModel(HashRunner())
    draft.record_pass(1, 0, 1.0)
    draft.record_draft(1, 1, 0.1)
    draft.record_pass(1, 2, 1.02)
    lengths = []
    for is_right in [False] * 40 + [True] * 80:
        draft.record_token(is_right)
        lengths.append(draft.best_length(1)[0])
    assert lengths[39] == 0 and lengths[-1] == draft.num_tokens
    assert lengths[39:] == sorted(lengths[39:])


def test_what_it_is_compared_with_is_measured_again() -> None:
    draft = DraftModel(HashRunner())
    draft.record_pass(1, 0, 1.0)
    for _ in range(64):
        assert draft.best_length(1)[0] > 0
        draft.record_pass(1, 3, 1.01)
    assert draft.best_length(1) == (0, 0.0) and draft.trial_length(1) == 0
    draft.record_pass(1, 0, 1.0)
    assert draft.best_length(1)[0] > 0


@pytest.mark.parametrize(("max_tokens", "num_read"), [(2, 0), (60, 300)])
def test_a_prompt_is_read_only_where_that_pays(max_tokens: int, num_read: int) -> None:
    engine, draft = drafted(cost=0.3)
    assert isinstance(draft.runner, Timed)
    draft.runner.token_s = 0.01  # so that 300 tokens are three passes of the model
    for prompt in (PROMPT * 4, [1] * 300):  # the first shows what reading costs
        draft.runner.batches.clear()
        engine.add(
            Request(prompt, SamplingParams(temperature=0.0, max_tokens=60 if prompt != [1] * 300 else max_tokens))
        )
        list(engine.run())
    assert sum(len(batch.token_ids) for batch in draft.runner.batches if not len(batch.logit_rows)) == num_read


def test_several_answers_to_a_prompt_read_it_once() -> None:
    engine, draft = drafted()
    assert isinstance(draft.runner, Timed)
    prompt = [*range(4, 40)] * 3
    engine.add(Request(prompt, SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=40)))
    list(engine.run())
    read = sum(len(batch.token_ids) for batch in draft.runner.batches if len(batch.logit_rows) == 0)
    assert len(prompt) - 2 * SLOTS <= read < 1.5 * len(prompt)
    draft.runner.batches.clear()
    engine.add(Request(prompt, SamplingParams(temperature=1.0, seed=2, max_tokens=40)))
    list(engine.run())
    assert all(len(batch.token_ids) < 20 for batch in draft.runner.batches), "a later one finds it"


def test_a_shorter_context_and_a_full_cache_end_the_guesses_alone() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    for options in ({"max_position_embeddings": 60}, {}):
        engine, draft = drafted(**options)
        if not options:
            drafter = drafter_of(engine)
            drafter._index.pool.take(drafter.cache.num_blocks - 10)
        engine.add(Request(PROMPT, params))
        assert answers(list(engine.run()), [0])[0] == alone(Request(PROMPT, params), circle=4.0)
        assert 0 < draft.accepted < 60


def test_a_draft_without_memory_for_a_pass_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, draft = drafted()
    true, calls = draft.runner.run, iter(range(10**6))

    def run(batch: Batch, cache: Cache, taps: Taps | None = None) -> Any:
        if next(calls) % 3 == 1:
            raise MemoryBudgetError("no memory")
        return true(batch, cache, taps)

    monkeypatch.setattr(draft.runner, "run", run)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    engine.add(Request(PROMPT, params))
    assert answers(list(engine.run()), [0])[0] == alone(Request(PROMPT, params), circle=4.0)
    assert draft.accepted > 0 and drafter_of(engine).num_used_blocks == 0


def test_the_number_of_tokens_is_checked() -> None:
    with pytest.raises(OptionError, match="1 to 64"):
        DraftModel(HashRunner(), 0)
