"""The sampler's steps as data: the same tokens as answers, and what each step leaves."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import llamarium
from llamarium.errors import AnswerError, InputError, SamplingError
from llamarium.inspect.probes.sampling import SamplerSteps, explain_choice, sampler_steps
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the"
EVERYTHING = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "frequency_penalty": 0.2, "logit_bias": {253: 1.0}, "seed": 7,
}  # fmt: skip


def explain(logits: list[float], prompt: tuple[int, ...] = (0,), k: int = 4, **options: Any) -> SamplerSteps:
    row = SamplingRow(SamplingParams(**options), prompt, len(logits))
    return explain_choice(row, np.array(logits, np.float32), k)


@pytest.mark.parametrize("options", [EVERYTHING, {"temperature": 1.5, "seed": 3}, {"temperature": 0.0}])
def test_each_token_of_an_answer_is_the_one_that_its_steps_choose(
    smollm2: llamarium.Llama, options: dict[str, Any]
) -> None:
    answer = smollm2.generate(TEXT, max_tokens=6, **options).completions[0].token_ids
    prompt, params = smollm2.encode(TEXT), smollm2.sampling_params(**options)
    for i, token_id in enumerate(answer):
        found = sampler_steps(smollm2.runner, prompt, params, answer_ids=answer[:i], tokenizer=smollm2.tokenizer)
        assert (found.token_id, found.place) == (token_id, i)
        assert found.text == smollm2.tokenizer.token_text(token_id)
        if found.draw is None:
            assert found.steps[-1].candidates[0].token_id == token_id
        else:
            assert found.seed == options["seed"]
            assert max(found.draw, key=lambda drawn: drawn.total).token_id == token_id


def test_steps_of_the_modules_are_those_of_their_answers(smollm2: llamarium.Llama) -> None:
    """PyTorch rounds single tokens otherwise than several, so the answer is run as it was made."""
    model = init_weights(LlamaForCausalLM(replace(preset("tiny"), vocab_size=200, initializer_range=0.2)), seed=1)
    llama = llamarium.Llama("tiny", model.requires_grad_(False), smollm2.tokenizer)
    options: dict[str, Any] = {"temperature": 2.0, "seed": 5}
    answer = llama.generate([3, 1, 4], max_tokens=8, **options).completions[0].token_ids
    params = SamplingParams(**options)
    runs: list[int] = []
    handle = model.model.embed_tokens.register_forward_hook(lambda _, args, out: runs.append(args[0].shape[1]))
    try:
        found = [
            sampler_steps(llama.runner, [3, 1, 4], params, answer_ids=answer[:i]).token_id for i in range(len(answer))
        ]
    finally:
        handle.remove()
    assert isinstance(llama.runner, ModuleRunner) and found == list(answer)
    assert runs[:6] == [3, 3, 1, 3, 1, 1]


@pytest.mark.parametrize("way", ["C", "PyTorch"])
def test_what_each_step_leaves(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "PyTorch":
        monkeypatch.setattr(native, "library", lambda: None)
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.06, 0.04)]
    found = explain(logits, k=5, temperature=1.0, top_k=4, top_p=0.7, min_p=0.8, seed=1)
    steps = {step.name: step for step in found.steps}
    assert list(steps) == ["logits", "logit_bias", "penalties", "grammar", "temperature", "top_k", "top_p", "min_p"]
    assert [step.num_left for step in found.steps] == [5, 5, 5, 5, 5, 4, 2, 1]
    assert [step.is_on for step in found.steps] == [True, False, False, False, False, True, True, True]
    assert [c.probability for c in steps["logits"].candidates] == pytest.approx([0.4, 0.3, 0.2, 0.06, 0.04], rel=1e-5)
    assert [c.probability for c in steps["top_k"].candidates] == pytest.approx(
        [x / 0.96 for x in (0.4, 0.3, 0.2, 0.06)]
    )
    assert [c.probability for c in steps["top_p"].candidates] == pytest.approx([4 / 7, 3 / 7])
    assert found.token_id == 0 and [drawn.token_id for drawn in found.draw or ()] == [0]
    assert [step.num_left for step in explain(logits, top_p=0.7, seed=1).steps][-2:] == [2, 2]


def test_bias_penalties_and_temperature_are_told_as_logits() -> None:
    options: dict[str, Any] = {"logit_bias": {2: 4.0}, "repetition_penalty": 2.0, "temperature": 0.5, "seed": 0}
    found = explain([3.0, 2.0, -1.0], prompt=(0,), **options)
    by_name = {step.name: {c.token_id: c.logit for c in step.candidates} for step in found.steps}
    assert by_name["logits"] == {0: 3.0, 1: 2.0, 2: -1.0}
    assert by_name["logit_bias"] == {0: 3.0, 1: 2.0, 2: 3.0}
    assert by_name["penalties"] == {0: 1.5, 1: 2.0, 2: 3.0}
    assert by_name["temperature"] == {2: 0.0, 1: -2.0, 0: -3.0}


def test_greedy_ends_before_the_temperature_and_the_chosen_one_is_always_shown() -> None:
    found = explain([1.0, 3.0, 2.0], temperature=0.0)
    assert (found.token_id, found.draw, found.steps[-1].name) == (1, None, "grammar")
    drawn = {explain([0.0] * 50, k=1, seed=seed).token_id for seed in range(20)}
    assert len(drawn) > 5
    unlikely = explain([0.0] * 50, k=1, seed=1)
    assert unlikely.token_id in [c.token_id for c in unlikely.steps[-1].candidates]
    assert json.loads(json.dumps(unlikely.to_dict(), allow_nan=False))["token_id"] == unlikely.token_id


def test_the_form_of_an_answer_is_a_step(smollm2: llamarium.Llama) -> None:
    params = smollm2.sampling_params(choice=["yes", "no"], temperature=1.0, seed=3)
    constraint = smollm2.grammars.compile(params.grammar).begin(smollm2.stop_ids)
    found = sampler_steps(smollm2.runner, smollm2.encode("Yes or no?"), params, constraint=constraint, k=3)
    form = found.steps[3]
    assert (form.name, form.is_on) == ("grammar", True) and 0 < form.num_left < 20
    assert found.token_id == smollm2.generate(
        "Yes or no?", choice=["yes", "no"], temperature=1.0, seed=3
    ).completions[0].token_ids[0]  # fmt: skip


def test_what_cannot_be_chosen_is_refused(smollm2: llamarium.Llama) -> None:
    with pytest.raises(AnswerError, match="NaN or infinite"):
        explain([math.nan, 1.0])
    with pytest.raises(SamplingError, match="n is 2"):
        sampler_steps(smollm2.runner, [1], SamplingParams(n=2))
    with pytest.raises(InputError, match="k is 0"):
        sampler_steps(smollm2.runner, [1], SamplingParams(), k=0)
    with pytest.raises(InputError, match="at least one"):
        sampler_steps(smollm2.runner, [], SamplingParams())
    assert torch.is_grad_enabled()
