"""Log-probabilities of prompts from the engine: right in any company, in bounded memory, none of them skipped."""

import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hash_runner import CONFIG, SLOTS, HashRunner, alone, answers, check_scores, request_of
from llamarium.engine import scoring
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request
from llamarium.errors import ContextLengthError, MemoryBudgetError, SamplingError
from llamarium.runtime.batch import Batch
from llamarium.runtime.runner import Cache
from llamarium.runtime.taps import Taps
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.quick

MOST = 3  # tokens of prompts whose logits are there at once


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_LOGITS_BYTES", MOST * 4 * CONFIG.vocab_size)


def scored(request: Request, num_top: int = 0) -> Request:
    return replace(request, params=replace(request.params, prompt_logprobs=num_top))


@pytest.mark.parametrize(("num_blocks", "shares"), [(400, True), (30, True), (400, False)])
def test_scores_are_right_in_any_company(num_blocks: int, shares: bool) -> None:
    rng = random.Random(num_blocks)
    requests = [request_of(rng, n=rng.choice((1, 1, 3))) for _ in range(40)]
    requests = [scored(one, i % 4) if i % 2 else one for i, one in enumerate(requests)]
    runner = HashRunner()
    engine = Engine(runner, num_blocks, block_size=SLOTS, shares=shares)
    numbers = [engine.add(request) for request in requests]
    events = list(engine.run())
    assert answers(events, numbers) == [alone(request) for request in requests]
    for number, request in zip(numbers, requests, strict=True):
        check_scores(events, number, request)
    assert (engine.counts.preempted > 0) == (num_blocks == 30)
    assert engine.snapshot().used_blocks == 0
    assert max(len(batch.logit_rows) - len(batch.block_tables) for batch in runner.batches) <= MOST
    assert max(len(batch.token_ids) for batch in runner.batches) > 2 * MOST + 40 or num_blocks == 30


def test_a_scored_prompt_is_run_once_for_all_its_answers_and_others_go_on_from_it() -> None:
    runner = HashRunner()
    engine = Engine(runner, 100, block_size=SLOTS)
    prompt = list(range(4, 34))
    for request in (
        Request(prompt, SamplingParams(n=5, seed=1, max_tokens=4, prompt_logprobs=0)),
        Request(prompt, SamplingParams(temperature=0.0, max_tokens=1)),
    ):
        engine.add(request)
    events = list(engine.run())
    assert sum(len(batch.token_ids) for batch in runner.batches) == 30 + 5 * 3 + 2  # of the last, what no block holds
    assert {event.num_cached for event in events if event.request == 0} == {0}


def test_what_is_cached_without_its_logits_is_run_again() -> None:
    runner = HashRunner()
    engine = Engine(runner, 100, block_size=SLOTS)
    plain = Request(list(range(4, 34)), SamplingParams(temperature=0.0, max_tokens=1))
    for request in (plain, scored(plain), plain):
        number = engine.add(request)
        events = list(engine.run())
        assert events[-1].num_cached == {0: 0, 1: 0, 2: 29}[number]
    assert engine.counts.cached_tokens == 29


def test_after_a_preemption_only_what_is_not_scored_is_scored() -> None:
    runner = HashRunner()
    engine = Engine(runner, 20, block_size=SLOTS, chunk=40)
    engine.add(Request(list(range(4, 20)), SamplingParams(temperature=0.0, max_tokens=60, logit_bias={3: -100})))
    engine.step()
    late = engine.add(request := scored(Request([7] * 52, SamplingParams(temperature=0.0, max_tokens=2))))
    events = list(engine.run())
    assert engine.counts.preempted > 0
    check_scores(events, late, request)
    assert sum(len(batch.logit_rows) for batch in runner.batches) == 51 + engine.counts.generated_tokens


def test_without_tokens_only_the_prompt_is_scored_up_to_the_whole_context() -> None:
    engine = Engine(HashRunner(), 100, block_size=SLOTS)
    prompt = [random.Random(1).randrange(50) for _ in range(CONFIG.max_position_embeddings)]
    request = Request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=2, n=2, seed=1))
    number = engine.add(request)
    first, second = events = list(engine.run())
    assert (first.row, second.row) == (0, 1)
    assert {(one.token_id, one.finish_reason) for one in events} == {(NoToken.NOT_ASKED, "length")}
    check_scores(events, number, request)
    assert engine.is_idle and engine.snapshot().used_blocks == 0 and engine.counts.generated_tokens == 0
    with pytest.raises(ContextLengthError):
        engine.add(replace(request, params=replace(request.params, max_tokens=1)))
    with pytest.raises(SamplingError, match="max_tokens is 0; expected a whole number, at least 1"):
        SamplingParams(max_tokens=0)
    with pytest.raises(SamplingError, match="prompt_logprobs is 51; expected at most 50"):
        engine.add(scored(request, 51))
    number = engine.add(single := Request([5], SamplingParams(max_tokens=0, prompt_logprobs=2)))
    check_scores(list(engine.run()), number, single)
    with pytest.raises(MemoryBudgetError):
        Engine(HashRunner(), 2, block_size=SLOTS).add(replace(request, prompt_ids=prompt[: 2 * SLOTS + 1]))


@pytest.mark.parametrize("place", [1, 20])
def test_logits_that_are_no_numbers_end_the_scored_one_alone(place: int) -> None:
    class Broken(HashRunner):
        def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> NDArray[np.float32]:
            logits = super().run(batch, cache, taps)
            logits[batch.token_ids[batch.logit_rows] == 49] = np.nan
            return logits

    engine = Engine(runner := Broken(), 60, block_size=SLOTS)
    params = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={49: -100.0})
    ill = [*range(4, 4 + place), 49, *range(4, 14)]
    engine.add(scored(Request(ill, params)))
    engine.add(well := scored(Request([1, 2], params)))
    events = list(engine.run())
    assert [(one.finish_reason, one.token_id, one.prompt_scores) for one in events if one.request == 0] == [
        ("error", NoToken.NOT_FINITE, None)
    ]
    assert answers(events, [0, 1])[1] == alone(well)
    check_scores(events, 1, well)
    assert max(batch.positions.max() for batch in runner.batches) < max(place + MOST, 8), "it ends where it is seen"
    assert engine.snapshot().used_blocks == 0
