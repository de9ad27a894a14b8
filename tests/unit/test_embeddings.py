"""Vectors from the engine: the model's own hidden states, to the bit in any company, beside those who stream."""

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import llamarium
from llamarium.attention import CausalAttend
from llamarium.engine.engine import Engine
from llamarium.engine.pooling import Pool, Pooling
from llamarium.engine.request import Request, TokenEvent
from llamarium.errors import (
    ContextLengthError,
    EngineStoppedError,
    InputError,
    LlamariumError,
    OptionError,
    RequestTimeoutError,
)
from llamarium.generation.text_engine import TextEngine
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.batch import Batch
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.runner import Cache, Runner
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams
from native_models import build, native_runner

pytestmark = pytest.mark.torch

KINDS: tuple[Pooling, ...] = ("mean", "last")
RANDOM = np.random.default_rng(7)
TEXTS = [RANDOM.integers(0, 300, count).tolist() for count in (1, 2, 7, 31, 32, 33, 64, 100, 190)]


@functools.cache
def model() -> LlamaForCausalLM:
    return build(None)


def embedded(text: Sequence[int], kind: Pooling) -> Request:
    return Request(text, SamplingParams(max_tokens=1), pooling=kind)


def answered(text: Sequence[int], count: int = 30) -> Request:
    return Request(text, SamplingParams(max_tokens=count, temperature=0.0))


@torch.no_grad()
def expected(text: Sequence[int], kind: Pooling) -> NDArray[np.float64]:
    """What the modules' hidden states say, by the definition."""
    ids, positions = torch.tensor([text]), torch.arange(len(text))[None]
    hidden = model().model(ids, positions, CausalAttend())[0].double().numpy()
    vector = hidden.mean(0) if kind == "mean" else hidden[-1]
    return vector / np.linalg.norm(vector)


def vectors(events: Sequence[TokenEvent]) -> dict[int, NDArray[np.float32]]:
    return {event.request: event.vector for event in events if event.vector is not None}


def alone(text: Sequence[int], kind: Pooling) -> NDArray[np.float32]:
    engine = Engine(native_runner(model()), 40, shares=False, chunk=2048)
    engine.add(embedded(text, kind))
    (vector,) = vectors(list(engine.run())).values()
    return vector


class Spy:
    """A runner that keeps its batches."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.batches: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Any:
        self.batches.append(batch)
        return self._runner.run(batch, cache, taps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_c", [True, False])
def test_a_vector_is_made_of_the_models_hidden_states(kind: Pooling, in_c: bool) -> None:
    engine = Engine(native_runner(model()) if in_c else ModuleRunner(model()), 40)
    numbers = [engine.add(embedded(text, kind)) for text in TEXTS]
    found = vectors(list(engine.run()))
    for number, text in zip(numbers, TEXTS, strict=True):
        assert found[number].dtype == np.float32 and found[number].shape == (96,)
        np.testing.assert_allclose(found[number], expected(text, kind), rtol=2e-4, atol=2e-5)
        assert np.linalg.norm(found[number]) == pytest.approx(1, abs=1e-6)


def test_modules_in_bfloat16_have_vectors_too() -> None:
    engine = Engine(ModuleRunner(build(None, torch.bfloat16)), 40)
    engine.add(embedded(TEXTS[3], "mean"))
    (vector,) = vectors(list(engine.run())).values()
    assert vector.dtype == np.float32
    assert vector @ expected(TEXTS[3], "mean") > 0.999


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how",
    [{}, {"chunk": 1}, {"chunk": 33}, {"chunk": 40, "num_blocks": 9}, {"chunk": 7, "max_num_seqs": 3}],
)
def test_no_bit_depends_on_company_chunks_and_cache(kind: Pooling, how: dict[str, Any]) -> None:
    how = {"num_blocks": 60, **how}
    engine = Engine(native_runner(model()), **how)
    streams = [engine.add(answered(TEXTS[i], 60)) for i in (3, 6)]
    numbers = [engine.add(embedded(text, kind)) for text in [*TEXTS, *TEXTS]]  # the second time from a warm cache
    events = list(engine.run())
    found = vectors(events)
    for number, text in zip(numbers, [*TEXTS, *TEXTS], strict=True):
        assert (found[number] == alone(text, kind)).all()
    assert engine.snapshot().used_blocks == 0
    for number, i in zip(streams, (3, 6), strict=True):
        single = Engine(native_runner(model()), 40, shares=False)
        single.add(answered(TEXTS[i], 60))
        told = [event.token_id for event in events if event.request == number]
        assert told == [event.token_id for event in single.run()]


@pytest.mark.parametrize("kind", KINDS)
def test_who_has_to_give_its_blocks_back_begins_anew(kind: Pooling) -> None:
    engine = Engine(native_runner(model()), 15, chunk=1)
    for i in (3, 6):
        engine.add(answered(TEXTS[i], 200))
    for _ in range(100):
        engine.step()
    assert engine.snapshot().running == 2
    number = engine.add(embedded(TEXTS[-1], kind))
    events = list(engine.run())
    assert engine.counts.preempted > 0
    assert (vectors(events)[number] == alone(TEXTS[-1], kind)).all()


def test_the_last_state_needs_only_what_is_not_there_and_a_mean_needs_all() -> None:
    engine = Engine(native_runner(model()), 40)
    text = TEXTS[-1]
    for kind, cached in (("last", 0), ("last", len(text) - 1), ("mean", 0)):
        engine.add(embedded(text, kind))
        (event,) = engine.run()
        assert event.num_cached == cached
    engine.add(answered(text, 1))
    (event,) = engine.run()
    assert event.num_cached == len(text) - 1  # what vectors were made of, answers go on from
    assert engine.counts.prompt_tokens == 4 * len(text)
    assert engine.counts.cached_tokens == 2 * (len(text) - 1)


def test_those_who_stream_get_a_token_in_every_step_and_steps_stay_short() -> None:
    spy = Spy(native_runner(model()))
    engine = Engine(spy, 80, chunk=16)
    stream = engine.add(answered(TEXTS[0], 40))
    engine.step()
    engine.add(embedded(RANDOM.integers(0, 300, 500).tolist(), "mean"))
    while True:
        events = engine.step()
        assert [event.request for event in events if event.request == stream], "a step without a token"
        assert len(spy.batches[-1].token_ids) <= 16 + 1
        if vectors(events):
            break


def test_hidden_states_that_are_no_numbers_end_that_request_alone() -> None:
    broken = build(None)
    broken.model.embed_tokens.weight[5] = torch.nan
    engine = Engine(native_runner(broken), 40)
    bad, good = engine.add(embedded([1, 5, 2], "mean")), engine.add(embedded([1, 2], "mean"))
    events = {event.request: event for event in engine.run()}
    assert (events[bad].finish_reason, events[bad].vector) == ("error", None)
    assert events[good].finish_reason == "stop"


def test_a_step_without_memory_to_choose_loses_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(native_runner(model()), 40, chunk=8)
    engine.add(answered(TEXTS[1], 10))
    number = engine.add(embedded(TEXTS[-1], "mean"))
    sample, failed = engine._sampler.sample, 0  # pyright: ignore[reportPrivateUsage]

    def seldom(*args: Any) -> Any:
        nonlocal failed
        failed += 1
        if failed in (2, 3):
            raise llamarium.errors.MemoryBudgetError("there is none")
        return sample(*args)

    monkeypatch.setattr(engine._sampler, "sample", seldom)  # pyright: ignore[reportPrivateUsage]
    events: list[TokenEvent] = []
    while not engine.is_idle:
        try:
            events += engine.step()
        except llamarium.errors.MemoryBudgetError:
            continue
    assert failed > 3
    assert (vectors(events)[number] == alone(TEXTS[-1], "mean")).all()


def test_a_pool_begins_anew_at_the_beginning() -> None:
    pool = Pool("mean")
    pool.take(np.ones((3, 2), np.float32), 0)
    pool.take(np.array([[3, 4]], np.float32), 0)
    assert pool.vector() == pytest.approx([0.6, 0.8])
    pool.take(np.array([[-3, -4]], np.float32), 1)
    assert pool.vector() is None  # zeros have no direction


# --- in an engine of its own thread -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> llamarium.Llama:
    return llamarium.load("shakespeare-char", device="cpu")


@pytest.fixture
def engine(llama: llamarium.Llama) -> Iterator[TextEngine]:
    with llama.engine(kv_memory=2**24, max_num_seqs=8) as engine:
        yield engine


def test_any_thread_may_ask_and_cancel(
    llama: llamarium.Llama, engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = llama.encode("To be, or not to be")
    first = engine.embed(ids).result()
    assert (first.num_tokens, first.num_cached) == (len(ids), 0)
    assert engine.embed(ids, "last").result().num_cached == len(ids) - 1
    begun, gate, run = threading.Event(), threading.Event(), llama.runner.run

    def hold(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        gate.wait(10)
        return run(*args, **kwargs)

    with monkeypatch.context() as held:
        held.setattr(llama.runner, "run", hold)
        engine.embed(ids)
        assert begun.wait(10)
        left = engine.embed(ids * 5)
        assert left.cancel()
        gate.set()
    end = time.monotonic() + 5
    while engine.snapshot.used_blocks or engine.snapshot.running or engine.snapshot.waiting:
        assert time.monotonic() < end
    assert (engine.embed(ids).result().vector == first.vector).all()


def test_what_cannot_be_embedded_is_refused(engine: TextEngine) -> None:
    for ids, error in ([], InputError), ([10**6], InputError), ([1] * 10**5, ContextLengthError):
        with pytest.raises(error):
            engine.embed(ids)
    with pytest.raises(OptionError, match="mean, last"):
        engine.embed([1], "max")  # type: ignore[arg-type]
    with pytest.raises(RequestTimeoutError):
        engine.embed([1, 2], timeout_s=0).result()
    engine.close()
    with pytest.raises(EngineStoppedError):
        engine.embed([1])


def test_an_engine_that_breaks_says_so(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("on fire")

    monkeypatch.setattr(engine._thread.engine.runner, "run", fail)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(LlamariumError, match="on fire"):
        engine.embed([1]).result()
