"""llama.engine(): many requests in text, from threads and event loops; who leaves, who is late, and what breaks."""

import asyncio
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest

import llamarium
from llamarium.engine.engine import Engine
from llamarium.engine.thread import Reader
from llamarium.errors import (
    AnswerError,
    ContextLengthError,
    EngineStoppedError,
    InputError,
    MemoryBudgetError,
    OptionError,
    OverloadedError,
    RequestTimeoutError,
    SamplingError,
    SlowReaderError,
)
from llamarium.generation.text_engine import MAX_BUFFERED, TextEngine

pytestmark = pytest.mark.torch("it quantizes while loading")

PROMPTS = ["ROMEO:", "To be", "KING RICHARD:\nNow", "Enter"]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def llama() -> llamarium.Llama:
    return llamarium.load("shakespeare-char", device="cpu")


@pytest.fixture
def engine(llama: llamarium.Llama) -> Iterator[TextEngine]:
    with llama.engine(kv_memory=2**24, max_num_seqs=8) as engine:
        yield engine


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.005)


def wait_until_free(engine: TextEngine) -> None:
    wait_until(lambda: engine.snapshot.used_blocks == engine.snapshot.running == engine.snapshot.waiting == 0)


def test_answers_are_those_of_generate_in_threads_and_loops(llama: llamarium.Llama, engine: TextEngine) -> None:
    options = [SAMPLED | {"seed": seed} for seed in range(4)] + [
        {"temperature": 0.0, "seed": 9, "max_new_tokens": 9}
    ] * 4
    asked = [(PROMPTS[i % 4], option) for i, option in enumerate(options)]
    expected = [llama.generate(prompt, **option) for prompt, option in asked]

    async def together() -> list[Any]:
        return await asyncio.gather(*(engine.stream(prompt, **option) for prompt, option in asked))

    assert asyncio.run(together()) == expected
    found: dict[int, Any] = {}

    def one(i: int) -> None:
        found[i] = engine.stream(asked[i][0], **asked[i][1]).result()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(asked))] == expected
    wait_until_free(engine)
    assert engine.snapshot.counts.cached_tokens > 0


def test_pieces_joined_are_the_answer_and_say_whose_they_are(llama: llamarium.Llama, engine: TextEngine) -> None:
    options: dict[str, Any] = SAMPLED | {"n": 3, "seed": 5, "logprobs": 2, "stop": ["\n"]}
    expected = llama.generate("To be", **options)
    answers = engine.stream("To be", **options)
    texts, ids = ["", "", ""], [[], [], []]
    for piece in answers:
        texts[piece.index] += piece.text
        ids[piece.index].extend(piece.token_ids)
    assert texts == [one.text for one in expected.completions]
    assert ids == [list(one.token_ids) for one in expected.completions]
    assert answers.result() == expected
    wait_until_free(engine)  # though some ended at a stop string, which the engine does not know


def test_a_dialog_is_answered_as_chat_does(llama: llamarium.Llama, smollm2: llamarium.Llama) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    options: dict[str, Any] = {"temperature": 0.0, "seed": 1, "max_new_tokens": 8}
    with smollm2.engine(kv_memory=2**26) as engine:
        first = engine.stream_chat(messages, **options)
        assert first.result() == smollm2.chat(messages, **options)
        again = engine.stream_chat(messages, **options)
        assert again.result() == first.result()
    assert (first.num_cached, again.num_cached) == (0, len(first.prompt_ids) - 1)


@pytest.mark.usefixtures("slow")
def test_who_leaves_gives_everything_back(engine: TextEngine) -> None:
    long: dict[str, Any] = {"max_new_tokens": 200, "temperature": 1.0, "stop_token_ids": []}
    closed, dropped = engine.stream("ROMEO:", **long), engine.stream("ROMEO:", n=3, **long)
    next(closed), next(dropped)
    closed.close()
    assert list(closed) == []
    del dropped
    gc.collect()
    wait_until_free(engine)

    async def cancelled() -> None:
        answers = engine.stream("To be", **long)
        await anext(answers)
        task = asyncio.ensure_future(answers)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answers.close()

    asyncio.run(cancelled())
    wait_until_free(engine)


def test_a_request_that_is_late_ends_with_an_error(engine: TextEngine) -> None:
    with pytest.raises(RequestTimeoutError, match="the request timed out"):
        engine.stream("To be", timeout_s=0.0, **SAMPLED).result()
    assert engine.stream("To be", timeout_s=60.0, **SAMPLED).result().text
    wait_until_free(engine)


def test_a_reader_who_must_keep_up_and_does_not_is_ended(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.generation.text_engine.MAX_BUFFERED", 5)
    assert MAX_BUFFERED > 1000
    slow = engine.stream("To be", must_keep_up=True, max_new_tokens=100, temperature=0.0)
    wait_until(lambda: slow._inbox.qsize() > 5)
    wait_until_free(engine)
    with pytest.raises(SlowReaderError, match="read it too slowly"):
        slow.result()
    patient = engine.stream("To be", max_new_tokens=100, temperature=0.0)
    wait_until_free(engine)
    assert len(patient.result().completions[0].token_ids) == 100


def test_an_answer_that_gives_way_ends_with_an_error_of_its_own(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt was fine when it was asked: `MemoryBudgetError` would say that it was not."""
    sampler = engine._thread.engine._sampler
    sample, calls = sampler.sample, iter(range(1000))

    def without_memory(rows: Any, logits: Any) -> Any:
        if next(calls) == 3:
            raise MemoryBudgetError("no memory for candidates")
        return sample(rows, logits)

    monkeypatch.setattr(sampler, "sample", without_memory)
    with pytest.raises(OverloadedError, match="no memory for candidates; try again later"):
        engine.stream("To be", **SAMPLED).result()
    assert engine.stream("To be", **SAMPLED).result().text
    wait_until_free(engine)


def test_what_cannot_be_answered_is_refused_when_it_is_asked(engine: TextEngine) -> None:
    for prompt, options, error in (
        ("", {}, InputError),
        ("a" * 300, {}, ContextLengthError),
        ("a", {"temperature": -1}, SamplingError),
        ("a", {"logit_bias": {10**6: 1.0}}, SamplingError),
        ("a", {"tempreature": 1}, SamplingError),
    ):
        with pytest.raises(error):
            engine.stream(prompt, **options)  # type: ignore[arg-type]


def test_logits_that_are_nan_end_their_request_alone(llama: llamarium.Llama, engine: TextEngine) -> None:
    runner, number = engine._thread.engine.runner, llama.encode("q")[0]
    true = runner.run

    def run(batch: Any, cache: Any, taps: Any = None) -> Any:
        logits = true(batch, cache, taps)
        logits[batch.token_ids[batch.logit_rows] == number] = np.nan
        return logits

    runner.run = run  # type: ignore[method-assign]
    try:
        well, ill = engine.stream("To be", seed=1, **SAMPLED), engine.stream("q", **SAMPLED)  # the first says no q
        with pytest.raises(AnswerError, match="NaN or infinite"):
            ill.result()
        assert well.result().completions[0].finish_reason == "length"
    finally:
        del runner.run  # type: ignore[method-assign]


@pytest.mark.usefixtures("slow")
def test_an_engine_that_breaks_tells_everybody(llama: llamarium.Llama) -> None:
    def broken(*_: object) -> None:
        raise ValueError("the disk is on fire")

    engine = llama.engine(kv_memory=2**24)
    running = engine.stream("To be", max_new_tokens=200, temperature=1.0)
    next(running)
    engine._thread.engine.runner.run = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(EngineStoppedError, match="the engine has failed: the disk is on fire"):
            running.result()
        with pytest.raises(EngineStoppedError, match="has failed"):
            engine.stream("To be").result()
        assert engine.state == "broken"
        assert not engine.close()
    finally:
        del engine._thread.engine.runner.run  # type: ignore[method-assign]


def test_an_engine_that_breaks_ends_all_though_a_loop_is_closed(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, gate, closed = engine._thread, threading.Event(), threading.Event()

    def broken(*_: object) -> list[Any]:
        if gate.is_set():
            raise RuntimeError("broken in mid-step")
        return []

    monkeypatch.setattr(thread.engine, "step", broken)
    monkeypatch.setattr(thread.engine, "abort", broken)
    monkeypatch.setattr(thread.engine, "close", closed.set)
    unread, waiting = engine.stream("To be"), engine.stream("ROMEO:")

    async def read_and_leave() -> None:
        task = asyncio.ensure_future(unread)
        await asyncio.sleep(0)
        assert not task.done()

    async def wait() -> None:
        await asyncio.wait_for(waiting, 20)

    asyncio.run(read_and_leave())
    wait_until(lambda: len(thread._deliver) == 2)
    gate.set()
    with pytest.raises(EngineStoppedError, match="broken in mid-step"):
        asyncio.run(wait())
    assert closed.wait(20) and engine.state == "broken"
    with pytest.raises(EngineStoppedError, match="broken in mid-step"):
        unread.result()


@pytest.mark.usefixtures("slow")
def test_it_closes_at_once_or_when_all_is_done(llama: llamarium.Llama) -> None:
    engine = llama.engine(kv_memory=2**24)
    assert engine.state == "ready"
    answers = engine.stream("To be", **SAMPLED)
    assert engine.close() and engine.state == "stopped"
    assert len(answers.result().completions[0].token_ids) == 40
    with pytest.raises(EngineStoppedError, match="accepts no more requests"):
        engine.stream("To be")
    hasty = llama.engine(kv_memory=2**24)
    cut = hasty.stream("To be", max_new_tokens=240, temperature=1.0)
    next(cut)
    assert not hasty.close(timeout_s=0)
    with pytest.raises(EngineStoppedError, match="before the answer was finished"):
        cut.result()
    assert hasty.state == "stopped"
    unbegun = llama.engine(kv_memory=2**24)
    answers = unbegun.stream("To be", max_new_tokens=240, temperature=1.0)
    unbegun.close(timeout_s=0)
    with pytest.raises(EngineStoppedError):
        answers.result()


def test_a_step_wakes_an_event_loop_once(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_of_them() -> tuple[int, int]:
        loop, calls = asyncio.get_running_loop(), list[object]()
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *work: calls.append(work) or call(*work))
        before = engine.snapshot.counts.steps
        options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 60, "stop_token_ids": []}
        await asyncio.gather(*(engine.stream(prompt, **options) for prompt in PROMPTS))
        steps = engine.snapshot.counts.steps - before
        return len(calls), steps

    calls, steps = asyncio.run(all_of_them())
    assert 0 < calls <= steps + 1 < 4 * 60  # the last step may not have been counted yet


def steps_and_pieces(engine: TextEngine, monkeypatch: pytest.MonkeyPatch, patience_s: float = 0.05) -> list[str]:
    """The order of an engine's steps, each taken as mixed, and of the pieces of a reader that waits for two steps."""
    step, seen = Engine.step, list[str]()

    def has_gone_ahead() -> bool:
        return ("step", "step") in itertools.pairwise(seen[2:])

    def noted(self: Engine) -> Any:
        seen.append("step")
        events, self.was_mixed = step(self), True
        return events

    async def read() -> None:
        async for _ in engine.stream("To be", temperature=0.0, max_new_tokens=12, stop_token_ids=[]):
            end = time.monotonic() + patience_s
            while not has_gone_ahead() and time.monotonic() < end:
                time.sleep(0.001)
            seen.append("piece")

    monkeypatch.setattr("llamarium.engine.thread.MOST_WAIT_S", 20.0)
    monkeypatch.setattr(Engine, "step", noted)
    asyncio.run(read())
    return seen


def use_threads(monkeypatch: pytest.MonkeyPatch, count: int, num_cpus: int) -> None:
    monkeypatch.setattr("llamarium.engine.thread.num_threads", lambda: count)
    monkeypatch.setattr("llamarium.engine.thread.allowed_cpus", lambda: num_cpus)


def test_where_no_cpu_is_free_a_mixed_step_waits_for_the_event_loop(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch, 2, 2)
    last = steps_and_pieces(engine, monkeypatch)[-16:]
    assert last == ["step", "piece"] * 8 or last == ["piece", "step"] * 8


def test_the_whole_is_waited_for_in_a_thread_or_in_an_event_loop(engine: TextEngine, llama: llamarium.Llama) -> None:
    """Text or ids; the result may be asked for again, after some pieces, and for a while only."""
    options: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 30}
    expected = llama.generate("To be", **options)
    answers = engine.submit(llama.encode("To be"), **options)
    assert next(answers).index == 0
    assert answers.result() == answers.result(timeout=0.0) == expected and list(answers) == []

    long = engine.submit("To be", llamarium.SamplingParams(max_tokens=150, seed=4, temperature=0.9))
    with pytest.raises(TimeoutError):
        long.result(timeout=0.0)
    assert len(long.result(timeout=60.0).completions[0].token_ids) == 150, "it has gone on"

    async def wait() -> list[llamarium.Generation]:
        first = engine.submit("To be", **options)
        async for _ in first:
            break
        return [await first, await first, *await asyncio.gather(*(engine.submit("To be", **options) for _ in range(3)))]

    assert asyncio.run(wait()) == [expected] * 5


@pytest.mark.parametrize(("method", "count"), [(None, 1), ("NF4", 2)], ids=["a CPU is free", "modules compute"])
def test_elsewhere_a_mixed_step_does_not_wait(
    method: Literal["NF4"] | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch, count, 2)
    llama = llamarium.load("shakespeare-char", device="cpu", quantize=method)
    with llama.engine(kv_memory=2**24) as engine:
        assert engine.runner.is_native == (method is None)
        seen = steps_and_pieces(engine, monkeypatch, patience_s=20.0)
    assert ("step", "step") in itertools.pairwise(seen[2:])


@pytest.mark.parametrize(("most_s", "sleep_s"), [(20.0, 0.05), (1.0, 10.0)], ids=["until both have read", "in all"])
def test_one_wait_is_for_all_loops(
    most_s: float, sleep_s: float, engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_threads(monkeypatch, 2, 2)
    monkeypatch.setattr("llamarium.engine.thread.MOST_WAIT_S", most_s)
    engine._thread.engine.was_mixed = True
    loops, read, stop = [asyncio.new_event_loop() for _ in range(2)], list[int](), threading.Event()
    threads = [threading.Thread(target=loop.run_forever) for loop in loops]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    engine._thread._wake(
        {i: Reader(loop, lambda i=i: stop.wait((1 + i) * sleep_s) or read.append(i)) for i, loop in enumerate(loops)}
    )
    seconds, in_time = time.monotonic() - begin, read.copy()
    stop.set()
    for thread, loop in zip(threads, loops, strict=True):
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert in_time == [0, 1] if sleep_s < most_s else (not in_time and most_s <= seconds < 1.8 * most_s)


def test_an_event_loop_that_is_gone_harms_nobody(llama: llamarium.Llama, engine: TextEngine) -> None:
    async def begin() -> object:
        answers = engine.stream("To be", max_new_tokens=240, temperature=1.0)
        await anext(answers)
        return answers

    answers = asyncio.run(begin())
    wait_until_free(engine)
    assert engine.stream("To be", **SAMPLED | {"seed": 1}).result() == llama.generate("To be", **SAMPLED | {"seed": 1})
    assert answers is not None


def test_an_edited_model_wants_another_engine() -> None:
    llama = llamarium.load("shakespeare-char", device="cpu")
    with llama.engine(kv_memory=2**24) as engine:
        hook = llama.model.model.layers[0].register_forward_hook(lambda *_: None)
        with (
            pytest.warns(UserWarning, match="edited") as caught,
            pytest.raises(OptionError, match="after the engine was created"),
        ):
            engine.stream("To be")
        hook.remove()
    assert [warning.filename for warning in caught] == [__file__], "it points to the caller, not into the library"


def test_options_are_checked(llama: llamarium.Llama) -> None:
    for options, message in (
        ({"kv_memory": 100}, "kv_memory is 100 bytes; expected at least"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; expected a whole number from 1"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is 'fp4'; expected auto, int8"),
    ):
        with pytest.raises(OptionError, match=message):
            llama.engine(**options)


def test_a_grammar_holds_in_company_as_alone(llama: llamarium.Llama, engine: TextEngine) -> None:
    forms: list[dict[str, Any]] = [{"regex": "[A-Z]{3,9}!"}, {"choice": ["yes", "no"]}, {"regex": "[a-z ]+\\."}]
    options = [SAMPLED | form | {"seed": seed} for seed, form in enumerate(forms)]
    expected = [llama.generate("To be", **option) for option in options]
    asked = [engine.stream("To be", **option) for option in options]
    free = engine.stream("To be", **SAMPLED | {"seed": 7})
    assert [answers.result() for answers in asked] == expected
    assert free.result() == llama.generate("To be", **SAMPLED | {"seed": 7})
    assert expected[1].text in ("yes", "no") and expected[1].completions[0].finish_reason == "stop"


def test_a_request_without_memory_for_its_step_ends_alone(llama: llamarium.Llama, engine: TextEngine) -> None:
    runner = engine._thread.engine.runner
    true = runner.run

    def run(batch: Any, cache: Any, taps: Any = None) -> Any:
        if len(batch.token_ids) > 14:
            raise MemoryBudgetError("no memory for so many tokens")
        return true(batch, cache, taps)

    runner.run = run  # type: ignore[method-assign]
    try:
        well = engine.stream("To be", **SAMPLED | {"seed": 1})
        with pytest.raises(OverloadedError, match="no memory for so many"):
            engine.stream("w" * 200, max_new_tokens=1).result()
        assert well.result() and engine.state == "ready"
    finally:
        del runner.run  # type: ignore[method-assign]
    assert engine.stream("To be", **SAMPLED | {"seed": 1}).result() == well.result()


@pytest.mark.usefixtures("slow")
def test_who_waits_is_woken_when_somebody_else_closes_the_answer(engine: TextEngine) -> None:
    answers = engine.stream("To be", max_new_tokens=240, temperature=1.0)
    seen: list[Any] = []
    reader = threading.Thread(target=lambda: seen.extend(answers))
    reader.start()
    wait_until(lambda: bool(seen))
    answers.close()
    reader.join(10)
    assert not reader.is_alive()
    with pytest.raises(InputError, match="there is no result"):
        answers.result()
    wait_until_free(engine)


def test_what_kills_the_thread_is_told(llama: llamarium.Llama) -> None:
    def panic(*_: object) -> None:
        raise BaseException("panic")  # as Rust's are

    engine = llama.engine(kv_memory=2**24)
    engine._thread.engine.step = panic  # type: ignore[method-assign]
    with pytest.raises(EngineStoppedError, match="panic"):
        engine.stream("To be").result()
    assert engine.state == "broken"


def test_an_engine_is_looked_at_between_two_steps_by_its_own_thread(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, step, num_steps = threading.Event(), Engine.step, 0

    def held(inner: Engine) -> Any:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 5 or gate.wait(10)
        return step(inner)

    monkeypatch.setattr(Engine, "step", held)
    answers = engine.stream(PROMPTS[0], temperature=0.0, max_new_tokens=40)
    next(answers)
    seen = engine.read(lambda inner: (threading.current_thread().name, len(inner.sequences[0].ids)))
    gate.set()
    name, num_tokens = seen.result(10)
    assert name == "llamarium-engine" and num_tokens > len(answers.prompt_ids)
    with pytest.raises(ZeroDivisionError):
        engine.read(lambda _: 1 / 0).result(10)
    assert len(answers.result().completions[0].token_ids) == 40, "a reader that fails leaves other answers whole"
    wait_until_free(engine)
    assert engine.read(lambda inner: inner.sequences).result(10) == [], "also where nothing else is to be done"
    engine.close()
    with pytest.raises(EngineStoppedError, match="is closing"):
        engine.read(lambda _: None)


def test_who_reads_an_engine_that_breaks_hears_of_it(engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    began, gate = threading.Event(), threading.Event()

    def broken(_: object) -> None:
        began.set()
        gate.wait(10)
        raise RuntimeError("broken")

    monkeypatch.setattr("llamarium.engine.engine.Engine.step", broken)
    answers = engine.stream(PROMPTS[0], **SAMPLED)
    began.wait(10)
    seen = engine.read(lambda inner: inner.num_blocks)
    gone = engine.read(lambda inner: inner.num_blocks)
    assert gone.cancel()
    gate.set()
    with pytest.raises(EngineStoppedError, match="broken"):
        seen.result(10)
    with pytest.raises(EngineStoppedError, match="broken"):
        next(answers)
    with pytest.raises(EngineStoppedError, match="broken"):
        engine.read(lambda _: None)
