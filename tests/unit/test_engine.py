"""The engine: the same tokens in any company, blocks and order of things; nothing lost, nobody starved."""

import gc
import random
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from hash_runner import SLOTS, Cheap, HashRunner, alone, answers, check_scores, check_states, request_of
from llamarium.engine.engine import Engine
from llamarium.engine.proposers.lookup import LookupProposer
from llamarium.engine.request import Request, TokenEvent
from llamarium.engine.scheduler import MAX_OVERTAKEN
from llamarium.errors import ContextLengthError, InputError, MemoryBudgetError, OptionError
from llamarium.runtime.batch import Batch
from llamarium.runtime.runner import Cache
from llamarium.runtime.taps import Taps
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(400, 64), (30, 64), (20, 3), (400, 1)])
def test_everybody_gets_the_tokens_that_they_get_alone(num_blocks: int, max_num_seqs: int) -> None:
    rng = random.Random(num_blocks)
    requests = [request_of(rng, n=rng.choice((1, 1, 3))) for _ in range(40)]
    engine = Engine(HashRunner(), num_blocks, block_size=SLOTS, max_num_seqs=max_num_seqs)
    numbers = [engine.add(request) for request in requests]
    events = list(engine.run())
    assert answers(events, numbers) == [alone(request) for request in requests]
    for number, request in zip(numbers, requests, strict=True):
        check_states(events, number, request)
    assert engine.snapshot().used_blocks == 0
    assert engine.counts.cached_tokens > 0
    assert (engine.counts.preempted > 0) == (num_blocks < 400)


@pytest.mark.parametrize("num_blocks", [900, 30])
def test_guesses_change_nothing_in_any_company(num_blocks: int) -> None:
    rng, lookup = random.Random(1), Cheap()
    requests = [request_of(rng, n=rng.choice((1, 3)), temperature=0.3, max_tokens=40) for _ in range(20)]
    engine = Engine(HashRunner(circle=4.0), num_blocks, block_size=SLOTS, proposer=lookup)
    numbers = [engine.add(request) for request in requests]
    events = list(engine.run())
    found = answers(events, numbers)
    assert found == [alone(request, circle=4.0) for request in requests]
    for number, request in zip(numbers, requests, strict=True):
        check_states(events, number, request)
    assert lookup.accepted > 20 and engine.counts.steps < engine.counts.generated_tokens
    proposer = engine._scheduler.proposer
    assert isinstance(proposer, LookupProposer) and not proposer._sequences
    assert engine.snapshot().used_blocks == 0 and (engine.counts.preempted > 0) == (num_blocks < 900)


def test_what_was_run_before_is_not_run_again() -> None:
    runner = HashRunner()
    engine = Engine(runner, 40, block_size=SLOTS)
    prompt = list(range(4, 22))  # four blocks, and two tokens
    first = engine.add(Request(prompt, SamplingParams(temperature=0.0, max_tokens=3)))
    events = list(engine.run())
    dialog = [*prompt, *(event.token_id for event in events), 5, 6]
    runner.batches.clear()
    second = engine.add(Request(dialog, SamplingParams(temperature=0.0, max_tokens=1)))
    (event,) = engine.run()
    assert (first, second) == (0, 1)
    assert event.num_cached == len(dialog) - 3  # the answer's last token had not been run
    assert sum(len(batch.token_ids) for batch in runner.batches) == 3
    assert event.token_id == alone(Request(dialog, SamplingParams(temperature=0.0, max_tokens=1)))[0][0]


def test_a_beginning_that_many_have_is_run_once_though_they_come_together() -> None:
    runner = HashRunner()
    engine = Engine(runner, 400, block_size=SLOTS, chunk=16)
    beginning = [random.Random(0).randrange(50) for _ in range(60)]
    requests = [Request([*beginning, i, i], SamplingParams(temperature=0.0, max_tokens=3)) for i in range(10)]
    numbers = [engine.add(request) for request in requests]
    engine.step()
    assert engine.snapshot().running == 1
    engine.add(other := Request([9, 9, 9], requests[0].params))
    assert [event.request for event in engine.step()] == [10], "nobody else waits for it"
    first = numbers.pop(0)
    engine.abort(first)
    found = answers(list(engine.run()), [*numbers, 10])
    assert found[:-1] == [alone(request) for request in requests[1:]] and other
    assert sum(len(batch.token_ids) for batch in runner.batches) < 60 + 10 * 6 + 32
    assert not engine._scheduler._promised


@pytest.mark.parametrize("other", [{"adapter": 0}, {"salt": "mine"}])
def test_what_others_have_run_otherwise_is_not_taken(other: dict[str, object]) -> None:
    engine = Engine(HashRunner(), 40, block_size=SLOTS)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for kind in ({}, other, other):
        engine.add(Request([1] * 20, params, **kind))
        (event,) = engine.run()
        assert event.num_cached == (19 if kind is other and event.request == 2 else 0)
        assert [[event.token_id]] == alone(Request([1] * 20, params, **kind))


def test_several_answers_share_one_reading_of_their_prompt() -> None:
    runner = HashRunner()
    engine = Engine(runner, 100, block_size=SLOTS)
    request = Request(list(range(4, 34)), SamplingParams(n=5, seed=1, max_tokens=4))
    engine.add(request)
    found = answers(list(engine.run()), [0])
    assert found == [alone(request)]
    assert sum(len(batch.token_ids) for batch in runner.batches) == 30 + 5 * 3


def test_who_streams_gets_a_token_in_every_step_while_a_giant_is_read() -> None:
    engine = Engine(HashRunner(), 400, block_size=SLOTS, clock=iter(range(10**6)).__next__)  # each step takes a second
    engine.add(Request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=60)))
    engine.step()
    engine.add(Request([4] * 300, SamplingParams(temperature=0.0, max_tokens=1)))
    steps = []
    while len(steps) < 20 and not any(event.request == 1 for event in (steps[-1] if steps else ())):
        steps.append(engine.step())
    assert len(steps) > 2
    assert all(sum(event.request == 0 for event in events) == 1 for events in steps)


def test_a_step_is_mixed_while_a_prompt_is_read_beside_streams() -> None:
    engine = Engine(HashRunner(), 400, block_size=SLOTS, chunk=8)
    mixed = list[bool]()
    engine.add(Request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=9)))
    for step in range(6):
        if step == 2:
            engine.add(Request(range(20), SamplingParams(temperature=0.0, max_tokens=2)))
        engine.step()
        mixed.append(engine.was_mixed)
    assert mixed == [False, False, True, True, True, False]


def test_a_short_prompt_is_not_kept_waiting_by_a_giant() -> None:
    engine = Engine(HashRunner(), 400, block_size=SLOTS, clock=iter(range(10**6)).__next__)  # each step takes a second
    giant = engine.add(Request([4] * 390, SamplingParams(temperature=0.0, max_tokens=1)))
    engine.step()
    short = engine.add(Request([5] * 16, SamplingParams(temperature=0.0, max_tokens=1)))
    came = [event.request for _ in range(3) for event in engine.step()]
    assert came == [short]
    assert [event.request for event in engine.run()] == [giant]


def test_who_waits_for_memory_is_overtaken_a_bounded_number_of_times() -> None:
    rng = random.Random(0)
    engine = Engine(HashRunner(), 40, block_size=SLOTS)
    for _ in range(4):
        engine.add(Request([rng.randrange(50) for _ in range(20)], SamplingParams(max_tokens=8, seed=1)))
    engine.step()
    giant = engine.add(Request([7] * 140, SamplingParams(max_tokens=2, seed=1)))
    order: list[int] = []
    for _ in range(300):
        while engine.snapshot().waiting < 3:  # a smaller one always waits
            engine.add(Request([rng.randrange(50) for _ in range(20)], SamplingParams(max_tokens=8, seed=1)))
        order.extend(event.request for event in engine.step() if event.finish_reason)
        if giant in order:
            break
    assert giant in order
    assert len(order) < 4 + MAX_OVERTAKEN + 20


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    now = [0.0]
    engine = Engine(HashRunner(), 40, block_size=SLOTS, max_num_seqs=1, clock=lambda: now[0])
    params = SamplingParams(temperature=0.0, max_tokens=100)
    engine.add(Request([1, 2], params, deadline_s=5.0))
    engine.add(Request([3, 4], SamplingParams(n=2, max_tokens=100), deadline_s=5.0))
    last = engine.add(Request([5, 6], SamplingParams(temperature=0.0, max_tokens=2)))
    engine.step()
    now[0] = 5.0
    ended = [event for event in engine.step() if event.finish_reason == "timeout"]
    assert [(event.request, event.row) for event in ended] == [(0, 0), (1, 0), (1, 1)]
    assert {event.token_id for event in ended} == {NoToken.TIMED_OUT}
    assert {event.request for event in engine.run()} <= {last}
    assert engine.snapshot().used_blocks == 0


def test_deadlines_that_are_far_away_are_forgotten_with_their_requests() -> None:
    """A server's requests have ten minutes and take a second: those that have ended are not kept for the rest."""
    now, runner = [0.0], HashRunner()
    engine = Engine(runner, 40, block_size=SLOTS, clock=lambda: now[0])
    short, endless = (SamplingParams(temperature=0.0, max_tokens=count) for count in (1, 100))

    def answer(count: int) -> int:
        """Answer so many; return what Python has allocated then."""
        for i in range(count):
            engine.add(Request([3, i % 40], short, deadline_s=1e9 + i))
            list(engine.run())
            runner.batches.clear()
        gc.collect()
        return sys.getallocatedblocks()

    before = answer(1000)
    assert answer(1000) - before < 1000  # three of each request: its number, its deadline, and both together
    first = engine.add(Request([1, 2], endless, deadline_s=1e6))
    for i in range(200):
        engine.add(Request([3, i % 40], short, deadline_s=1e9))
        engine.abort(first + 1 + i)
    second = engine.add(Request([5, 6], endless, deadline_s=1e7))
    for number, deadline_s in ((first, 1e6), (second, 1e7)):
        now[0] = deadline_s
        assert [event.request for event in engine.step() if event.finish_reason == "timeout"] == [number]
    assert engine.snapshot().used_blocks == 0


def test_nan_ends_one_answer_alone() -> None:
    class Broken(HashRunner):
        def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> NDArray[np.float32]:
            logits = super().run(batch, cache, taps)
            logits[batch.token_ids[batch.logit_rows] == 49] = np.nan
            return logits

    engine = Engine(Broken(), 40, block_size=SLOTS)
    params = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={49: -100.0})
    engine.add(Request([1, 49], params))
    engine.add(Request([1, 2], params))
    events = list(engine.run())
    assert [event.finish_reason for event in events if event.request == 0] == ["error"]
    assert answers(events, [0, 1])[1] == alone(Request([1, 2], params))


def test_without_memory_to_choose_one_gives_way_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, lookup = random.Random(2), Cheap()
    requests = [request_of(rng, n=n, temperature=0.3, max_tokens=30) for n in (1, 3, 1, 1)]
    engine = Engine(HashRunner(circle=4.0), 400, block_size=SLOTS, proposer=lookup)
    numbers, events, calls = [engine.add(request) for request in requests], [], iter(range(10**6))
    true = engine._sampler.sample

    def sample(rows: object, logits: object) -> object:
        if next(calls) in (0, 9, 20):
            raise MemoryBudgetError("no memory for candidates")
        return true(rows, logits)  # type: ignore[arg-type]

    monkeypatch.setattr(engine._sampler, "sample", sample)
    gone = []
    while not engine.is_idle:
        try:
            events.extend(engine.step())
        except MemoryBudgetError:
            gone.append(engine.abort_largest())
    assert len(set(gone)) == 3 and lookup.accepted > 0 and engine.snapshot().used_blocks == 0
    (left,) = set(numbers) - set(gone)
    own = [event for event in events if event.request == left]
    assert answers(own, [left])[0] == alone(requests[left], circle=4.0)


def test_what_cannot_be_answered_is_refused() -> None:
    engine = Engine(HashRunner(), 20, block_size=SLOTS)
    for request, error in (
        (Request([], SamplingParams()), InputError),
        (Request([50], SamplingParams()), InputError),
        (Request([1] * 400, SamplingParams()), ContextLengthError),
        (Request([1] * 60, SamplingParams(max_tokens=22)), MemoryBudgetError),
    ):
        with pytest.raises(error):
            engine.add(request)
    assert engine.is_idle
    engine.add(Request([1] * 60, SamplingParams(max_tokens=21, temperature=0.0)))
    assert len(list(engine.run())) == 21
    for options in ({"num_blocks": 0}, {"num_blocks": 1, "max_num_seqs": 0}):
        with pytest.raises(OptionError, match="at least 1"):
            Engine(HashRunner(), **options)


class Company(RuleBasedStateMachine):
    """Requests come, go, and are ended in any order: who is left gets what it gets alone, and no block is lost."""

    @initialize(num_blocks=st.integers(16, 40), max_num_seqs=st.integers(1, 6))
    def begin(self, num_blocks: int, max_num_seqs: int) -> None:
        self.runner = HashRunner()
        self.engine = Engine(self.runner, num_blocks, block_size=SLOTS, max_num_seqs=max_num_seqs)
        self.requests: dict[int, Request] = {}
        self.events: list[TokenEvent] = []
        self.cut: set[tuple[int, int]] = set()

    @rule(seed=st.integers(0, 10**6), n=st.sampled_from([1, 1, 1, 2, 4]))
    def come(self, seed: int, n: int) -> None:
        scored = {"prompt_logprobs": seed % 3} if seed % 4 == 0 else {}
        request = request_of(random.Random(seed), longest=24, n=n, **scored)
        self.requests[self.engine.add(request)] = request

    @rule(count=st.integers(1, 6))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.events.extend(self.engine.step())

    @rule(pick=st.integers(0, 10**6), one=st.booleans())
    def leave(self, pick: int, one: bool) -> None:
        if self.requests:
            number = sorted(self.requests)[pick % len(self.requests)]
            n = self.requests[number].params.n
            rows = [pick % n] if one else range(n)
            self.cut.update((number, row) for row in rows)
            self.engine.abort(number, rows[0] if one else None)

    @invariant()
    def blocks_are_those_of_the_running(self) -> None:
        held = {block for answer in self.engine._scheduler.running for block in answer.table.blocks}
        assert self.engine.snapshot().used_blocks == len(held)
        assert all(not answer.table.blocks for answer in self.engine._scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.events.extend(self.engine.run())
        assert (
            self.engine.snapshot().used_blocks == self.engine.snapshot().waiting == self.engine.snapshot().running == 0
        )
        got: dict[tuple[int, int], list[int]] = {}
        for event in self.events:
            got.setdefault((event.request, event.row), []).append(event.token_id)
        for number, request in self.requests.items():
            check_scores(self.events, number, request)
            check_states(self.events, number, request)
            for row, expected in enumerate(alone(request)):
                tokens = got.get((number, row), [])
                assert tokens == expected[: len(tokens)]
                assert (number, row) in self.cut or tokens == expected


Company.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestCompany = Company.TestCase
