"""What is traced is what answers: the same pass and the same bits, in C and with modules, a prompt and every step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llamarium
from llamarium.cli.main import main
from llamarium.generation.loop import generate_tokens
from llamarium.inspect.trace import ACTIVATIONS, Trace, trace_steps
from llamarium.runtime.batch import Batch
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Cache, Logits, Runner
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.torch

PROMPT = "The cat sat on the mat, and the dog"
NUM_NEW = 6


@pytest.fixture(scope="module")
def built_in(smollm2_path: Path) -> llamarium.Llama:
    """The built-in model as everybody gets it: packed, in C."""
    return llamarium.load(smollm2_path, device="cpu")


@pytest.fixture(params=["built-in", "built-in in float32", "bfloat16", "float16", "float32", "NF4", "NF4 in float32"])
def llama(request: pytest.FixtureRequest) -> llamarium.Llama:
    """A model, and in a `Runner` of which class it runs."""
    characters: dict[str, tuple[dict[str, Any], type]] = {
        "bfloat16": ({}, NativeRunner),
        "float16": ({"dtype": "float16"}, NativeRunner),
        "float32": ({"dtype": "float32"}, NativeRunner),
        "NF4": ({"quantize": "NF4"}, ModuleRunner),
        "NF4 in float32": ({"quantize": "NF4", "dtype": "float32"}, ModuleRunner),
    }
    if request.param == "built-in":
        made, runs_in = request.getfixturevalue("built_in"), NativeRunner
    elif request.param == "built-in in float32":
        made, runs_in = request.getfixturevalue("smollm2"), NativeRunner
    else:
        options, runs_in = characters[request.param]
        made = llamarium.load("shakespeare-char", device="cpu", **options)
    assert isinstance(made.runner, runs_in)
    return made


class Watched:
    """A runner that keeps the logits which generation chooses from."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.seen = runner, list[np.ndarray]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        logits = self._runner.run(batch, cache, taps)
        self.seen.append(logits.copy())  # a sampler may write into them
        return logits


def answer(runner: Runner, ids: list[int]) -> tuple[list[int], torch.Tensor]:
    """A greedy answer's tokens, and the logits from which each was chosen, (tokens, V)."""
    watched = Watched(runner)
    events = list(generate_tokens(watched, [ids], [SamplingParams(temperature=0.0, max_tokens=NUM_NEW)]))
    return [event.token_id for event in events], torch.from_numpy(np.concatenate(watched.seen))


def same(a: Trace, b: Trace) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def test_the_last_logits_are_those_that_generation_chooses_from(llama: llamarium.Llama) -> None:
    ids = llama.encode(PROMPT)
    tokens, logits_WV = answer(llama.runner, ids)
    full = llama.trace(PROMPT)
    assert torch.equal(full["logits"][-1].float(), logits_WV[0])
    assert int(full["logits"][-1].argmax()) == tokens[0]
    assert torch.equal(llama.trace(PROMPT, names="logits", positions=[-1])["logits"][0].float(), logits_WV[0])
    assert list(llama.generate(PROMPT, temperature=0.0, max_tokens=NUM_NEW).completions[0].token_ids) == tokens


def test_each_step_has_the_logits_that_generation_chooses_from(llama: llamarium.Llama) -> None:
    ids = llama.encode(PROMPT)
    tokens, logits_WV = answer(llama.runner, ids)
    config, steps = llama.config, list(trace_steps(llama.runner, ids, NUM_NEW - 1))
    assert len(steps) == NUM_NEW - 1
    for i, step in enumerate(steps):
        length = len(ids) + i + 1
        assert step.token_ids == (*ids, *tokens[: i + 1]) and step.positions == (length - 1,)
        assert torch.equal(step["logits"][0].float(), logits_WV[i + 1])
        assert step["layers.0.k_rot"].shape == (length, config.num_key_value_heads, config.head_dim)
        pattern_NTS = step["layers.0.pattern"]
        assert pattern_NTS.shape == (config.num_attention_heads, 1, length)
        torch.testing.assert_close(pattern_NTS.sum(-1), torch.ones(config.num_attention_heads, 1))
        assert step["layers.0.v"].shape == (1, config.num_key_value_heads, config.head_dim)
        assert step["layers.0.resid"].shape == (1, config.hidden_size)
    few = list(trace_steps(llama.runner, ids, 2, names=["gate", "scores"], layers=[-1]))
    names = {"gate", "scores"}
    assert all(
        same(a, b.select(names=names, layers=[-1 + config.num_hidden_layers])) for a, b in zip(few, steps, strict=False)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_activation_alone_is_what_it_is_in_company(dtype: str) -> None:
    llama = llamarium.load("shakespeare-char", dtype=dtype, device="cpu")
    full = llama.trace("KING")
    assert {key.rpartition(".")[2] for key in full} == set(ACTIVATIONS)
    for name in ACTIVATIONS:
        for layers, positions in ((None, None), ([-1], [-1]), ([2, 0], [3, 1])):
            alone = llama.trace("KING", names=name, layers=layers, positions=positions)
            expected = full.select(
                names=name, layers=_from_the_start(layers, 6), positions=_from_the_start(positions, 4)
            )
            if name in ("scores", "pattern") and positions is not None:  # recomputed, by a product of fewer rows
                assert list(alone) == list(expected)
                assert all(torch.allclose(alone[key], expected[key], rtol=1e-5, atol=1e-5) for key in expected)
            else:
                assert same(alone, expected)


def _from_the_start(wanted: list[int] | None, size: int) -> list[int] | None:
    return None if wanted is None else [i % size for i in wanted]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_command_shows_any_activation_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "KING", "-m", "shakespeare-char", "--names", name]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    keys = [f"layers.{layer}.{name}" for layer in range(6)] if ACTIVATIONS[name].in_layer else [name]
    assert [line.split()[0] for line in out.splitlines()[4:]] == keys


def test_the_command_shows_one_vector_of_the_built_in_model(
    built_in: llamarium.Llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.api.load", lambda path, **_: built_in)
    words = ["trace", "The cat sat", "--layers=-1", "--positions=-1", "--names", "resid", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    resid_TD = built_in.trace("The cat sat", names="resid")["layers.29.resid"]
    assert list(found["activations"]) == ["layers.29.resid"] and found["positions"] == [2]
    assert found["activations"]["layers.29.resid"]["shape"] == [1, built_in.config.hidden_size]
    assert found["activations"]["layers.29.resid"]["values"] == resid_TD[-1:].tolist()
