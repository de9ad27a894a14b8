"""A caller's function of the logits: what it sees, what it may return, and that it concerns its own request alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import llamarium
from hash_runner import SLOTS, Cheap, HashRunner, alone, answers
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request
from llamarium.errors import AnswerError, LogitsProcessorError, SamplingError
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.quick

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "seed": 1}


@pytest.fixture(scope="module")
def shakespeare() -> llamarium.Llama:
    return llamarium.load("shakespeare-char", device="cpu")


def without(shakespeare: llamarium.Llama, letters: str) -> Callable[[Any, Any], Any]:
    excluded = [shakespeare.encode(letter)[-1] for letter in letters]

    def processor(token_ids: Any, logits: Any) -> Any:
        logits[excluded] = -np.inf
        return logits

    return processor


def same(token_ids: Any, logits: Any) -> Any:
    return logits


def test_it_sees_the_ids_so_far_and_a_copy_of_the_models_own_logits(shakespeare: llamarium.Llama) -> None:
    seen: list[tuple[list[int], Any]] = []

    def processor(token_ids: Any, logits: Any) -> Any:
        assert (token_ids.dtype, logits.dtype) == (np.int64, np.float32)
        assert logits.shape == (shakespeare.config.vocab_size,) and logits.flags.writeable
        seen.append((token_ids.tolist(), logits.copy()))
        token_ids[:] = 0
        logits[:] = 0.0  # a copy: what counts is what is returned
        return seen[-1][1]

    plain = shakespeare.generate("ROMEO:", logprobs=3, repetition_penalty=1.5, **GREEDY)
    hooked = shakespeare.generate("ROMEO:", logprobs=3, repetition_penalty=1.5, logits_processor=processor, **GREEDY)
    assert hooked == plain
    ids = [*plain.prompt_ids, *plain.completions[0].token_ids]
    assert [ids_so_far for ids_so_far, _ in seen] == [ids[: len(plain.prompt_ids) + i] for i in range(12)]
    for (_, logits), entry in zip(seen, plain.completions[0].logprobs or (), strict=True):
        shifted = logits.astype(np.float64) - logits.max()
        assert entry.logprob == pytest.approx(shifted[entry.token_id] - np.log(np.exp(shifted).sum()), abs=1e-6)


def test_it_decides_and_reported_logprobs_stay_the_models(shakespeare: llamarium.Llama) -> None:
    text = "To be, or not to be."
    ids = shakespeare.encode(text)

    def say(token_ids: Any, logits: Any) -> Any:
        forced = np.full_like(logits, -np.inf)
        forced[ids[len(token_ids) - 1]] = 0.0
        return forced

    for temperature in (0.0, 1.0):
        said = shakespeare.generate(
            [ids[0]], logits_processor=say, temperature=temperature, max_tokens=len(ids), logprobs=0
        )
        assert said.completions[0].token_ids == tuple(ids)
        scores = [entry.logprob for entry in said.completions[0].logprobs or ()]
        assert all(-20 < score < 0 for score in scores)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}, {"top_k": 3, "seed": 1}])
def test_minus_infinity_is_a_bias_of_minus_a_hundred(shakespeare: llamarium.Llama, options: dict[str, Any]) -> None:
    biased = {shakespeare.encode(letter)[-1]: -100.0 for letter in "eE"}
    plain = shakespeare.generate("ROMEO:", max_tokens=60, logit_bias=biased, **options)
    hooked = shakespeare.generate("ROMEO:", max_tokens=60, logits_processor=without(shakespeare, "eE"), **options)
    assert hooked.text == plain.text and "e" not in hooked.text


@pytest.mark.parametrize("guesses", [{}, {"prompt_lookup": True}])
def test_beside_other_requests_nobody_elses_tokens_change(
    shakespeare: llamarium.Llama, guesses: dict[str, Any]
) -> None:
    prompts = ["ROMEO:", "To be", "Enter the the the the the"]
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 40, "logprobs": 2}
    alone_plain = [shakespeare.generate(prompt, **options) for prompt in prompts]
    processor = without(shakespeare, "e")
    alone_hooked = shakespeare.generate(prompts[0], logits_processor=processor, **options)

    def fails(token_ids: Any, logits: Any) -> Any:
        if len(token_ids) > 12:
            raise ZeroDivisionError("on purpose")
        return logits

    with shakespeare.engine(**guesses) as engine:
        plain = [engine.stream(prompt, **options) for prompt in prompts]
        hooked = engine.stream(prompts[0], logits_processor=processor, **options)
        failing = engine.stream(prompts[0], logits_processor=fails, **options)
        assert [one.result() for one in plain] == alone_plain
        assert hooked.result() == alone_hooked
        with pytest.raises(LogitsProcessorError, match="on purpose") as raised:
            failing.result()
        assert isinstance(raised.value.__cause__, ZeroDivisionError) and isinstance(raised.value, AnswerError)
        assert engine.state == "ready" and engine.stream("To be", **options).result() == alone_plain[1]


def test_preempted_and_guessed_ahead_it_gives_what_it_gives_alone() -> None:
    def processor(token_ids: Any, logits: Any) -> Any:
        logits[(token_ids.sum() + np.arange(3)) % len(logits)] = -np.inf
        return logits

    params = SamplingParams(temperature=0.5, seed=2, max_tokens=30, logits_processor=processor)
    plain = SamplingParams(temperature=0.5, seed=2, max_tokens=30)
    requests = [Request([i, 5, 6, 5, 6, i], params if i % 2 else plain) for i in range(8)]
    expected: list[Any] = []
    for request in requests:
        engine = Engine(HashRunner(circle=4.0), 400, block_size=SLOTS)
        number = engine.add(request)
        expected += answers(list(engine.run()), [number])
    assert expected[0] == alone(requests[0], circle=4.0)
    lookup = Cheap()
    engine = Engine(HashRunner(circle=4.0), 24, block_size=SLOTS, proposer=lookup)
    numbers = [engine.add(request) for request in requests]
    assert answers(list(engine.run()), numbers) == expected
    assert engine.counts.preempted > 0 and lookup.accepted > 0


def test_several_answers_have_their_own_ids(shakespeare: llamarium.Llama) -> None:
    seen: list[tuple[int, ...]] = []

    def processor(token_ids: Any, logits: Any) -> Any:
        seen.append(tuple(token_ids.tolist()))
        return logits

    found = shakespeare.generate("ROMEO:", n=3, seed=1, max_tokens=4, temperature=1.5, logits_processor=processor)
    lasts = {(*found.prompt_ids, *completion.token_ids[:-1]) for completion in found.completions}
    assert lasts <= set(seen) and len(seen) == 12


def test_a_grammar_holds_whatever_it_returns(shakespeare: llamarium.Llama) -> None:
    found = shakespeare.generate(
        "ROMEO:", choice=["yes", "no"], logits_processor=without(shakespeare, "y"), temperature=0.0
    )
    assert found.text == "no"
    with pytest.raises(AnswerError, match="excluded every token"):
        shakespeare.generate(
            "ROMEO:", choice=["yes", "no"], logits_processor=without(shakespeare, "yn"), temperature=0.0
        )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: None, "None"),
        (lambda x: x.tolist(), "list"),
        (lambda x: x[:-1], "shape"),
        (lambda x: x[None], "shape"),
        (lambda x: x.astype(np.int64), "int64"),
        (lambda x: x > 0, "bool"),
        (lambda x: x.astype(np.complex64), "complex64"),
        (lambda x: np.where(np.arange(len(x)) == 3, np.nan, x), "NaN"),
        (lambda x: np.where(np.arange(len(x)) == 3, np.inf, x), "inf"),
        (lambda x: np.where(np.arange(len(x)) == 3, 1e300, x.astype(np.float64)), "inf"),
        (lambda x: np.full_like(x, -np.inf), "every token"),
        (lambda x: x[10**9], "IndexError"),
    ],
)
def test_what_is_no_logits_ends_the_request(
    shakespeare: llamarium.Llama, result: Callable[[Any], Any], message: str
) -> None:
    options: dict[str, Any] = {**GREEDY, "logits_processor": lambda token_ids, logits: result(logits)}
    with pytest.raises(LogitsProcessorError, match=message):
        shakespeare.generate("ROMEO:", **options)
    with pytest.raises(LogitsProcessorError, match=message):
        list(shakespeare.stream("ROMEO:", **options))
    several = shakespeare.generate(["ROMEO:", "To be"], **options)
    assert [one.completions[0].finish_reason for one in several] == ["error", "error"]
    assert message in (several[0].completions[0].error or "")


def test_other_floats_are_rounded_to_float32(shakespeare: llamarium.Llama) -> None:
    plain = shakespeare.generate("ROMEO:", **GREEDY)
    wide = shakespeare.generate(
        "ROMEO:", logits_processor=lambda ids, logits: logits.astype(np.float64)[::-1][::-1], **GREEDY
    )
    assert wide == plain


def test_it_is_a_function() -> None:
    with pytest.raises(SamplingError, match="logits_processor is 'greedy'"):
        SamplingParams(logits_processor="greedy")  # pyright: ignore[reportArgumentType]


def test_in_a_dialog_and_in_an_event_loop(shakespeare: llamarium.Llama) -> None:
    smollm2 = llamarium.load("smollm2-135m", device="cpu")
    plain = smollm2.chat([{"role": "user", "content": "Hi"}], **GREEDY)
    hooked = smollm2.chat([{"role": "user", "content": "Hi"}], logits_processor=same, **GREEDY)
    assert hooked == plain

    async def answer() -> str:
        with shakespeare.engine() as engine:
            return (await engine.stream("ROMEO:", logits_processor=without(shakespeare, "e"), **GREEDY)).text

    assert "e" not in asyncio.run(answer())


def test_the_sampler_shows_it_as_a_step(shakespeare: llamarium.Llama) -> None:
    shown = shakespeare.inspect.sampler_steps("ROMEO:", temperature=0.0, logits_processor=without(shakespeare, "e"))
    assert [step.name for step in shown.steps][:3] == ["logits", "logits_processor", "logit_bias"]
    assert shown.steps[1].num_left == shakespeare.config.vocab_size - 1
    with pytest.raises(LogitsProcessorError):
        shakespeare.inspect.sampler_steps("ROMEO:", logits_processor=lambda ids, logits: None)
