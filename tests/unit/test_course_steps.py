"""The steps of `llamarium build`: what is called right equals the library, and every mistake shows on its cases."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import llamarium
from llamarium.course.arguments import far_from_borders
from llamarium.course.compare import first_difference, same, shape_problem
from llamarium.course.folder.source import definition, template
from llamarium.course.passes import RIGHT, Pass, Weights
from llamarium.course.step import Function, Step
from llamarium.course.steps import STEPS
from llamarium.runtime.taps import Taps

TEXT = "The cat that the dog chased ran away."
NAMES = ("attn_norm", "q", "k", "v", "q_rot", "head_out", "attn_out", "resid_mid", "mlp_norm", "gate", "up", "act",
         "gated", "mlp_out", "resid")  # fmt: skip


def test_a_pass_of_right_functions_is_the_librarys(smollm2_path: Any) -> None:
    """Activation by activation, down all layers, against the trace of the C kernels in float32."""
    llama = llamarium.load(smollm2_path, dtype="float32")
    trace = llama.trace(TEXT)
    keys = [(name, layer) for layer in range(llama.config.num_hidden_layers) for name in NAMES]
    keys += [("embed", None), ("final_norm", None)]
    taps = Taps(keys)
    running = Pass(Weights(llama.config, llama.runner.dequantize), taps=taps)
    logits_TV, _ = running.logits(np.array(trace.token_ids), running.empty())
    for name, layer in keys:
        expected, found = trace.arrays[name, layer], np.asarray(taps.kept[name, layer][-1])
        assert relative_distance(found, expected.reshape(found.shape)) < 2e-4, (name, layer)
    assert relative_distance(logits_TV, trace.arrays["logits", None]) < 1e-4


def relative_distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def outcomes(step: Step, function: Function, cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...] | None]:
    """What a function returns in each case; None where it raises."""
    found: list[tuple[Any, ...] | None] = []
    for case in cases:
        try:
            with np.errstate(all="ignore"):
                result = function(*case)
        except Exception:  # noqa: BLE001 - a mistake may not fit a shape
            found.append(None)
        else:
            found.append(result if isinstance(result, tuple) else (result,))
    return found


def is_same(step: Step, one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    return one is other or (one is not None and other is not None and same(step.outputs, one, other))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_mistake_shows_and_is_told_from_the_others(step: Step, seed: int) -> None:
    cases = list(step.cases(np.random.default_rng([seed, STEPS.index(step)])))
    right = outcomes(step, step.right, cases)
    assert None not in right
    found = {mistake.cause: outcomes(step, mistake.wrong, cases) for mistake in step.mistakes}
    assert len(found) == len(step.mistakes)
    unseen = [cause for cause, results in found.items() if all(map(lambda a, b: is_same(step, a, b), right, results))]
    mixed = [
        (one, other)
        for (one, first), (other, second) in combinations(found.items(), 2)
        if all(map(lambda a, b: is_same(step, a, b), first, second))
    ]
    assert (unseen, mixed) == ([], [])


def test_a_mistake_is_further_from_right_than_rounding() -> None:
    """Right numbers that were computed in float16 are no longer right; those of another order of sums are."""
    rms_norm = STEPS[2]
    x_TD, gamma_D, eps = next(iter(rms_norm.cases(np.random.default_rng(0))))
    right = (rms_norm.right(x_TD, gamma_D, eps),)
    double = (rms_norm.right(x_TD.astype(np.float64), gamma_D.astype(np.float64), eps),)
    half = (rms_norm.right(x_TD.astype(np.float16), gamma_D.astype(np.float16), eps).astype(np.float32),)
    assert shape_problem(rms_norm.outputs, double, right) is None
    assert first_difference(rms_norm.outputs, double, right) is None
    assert first_difference(rms_norm.outputs, half, right) is not None


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_is_a_file_that_explains_itself(step: Step) -> None:
    """The file can be compiled, names the function, and every letter of a shape in it is explained."""
    text = template(step)
    compile(text, step.name, "exec")
    assert definition(step) in text
    assert max(map(len, text.splitlines())) <= 120
    legend = next((line for line in text.splitlines() if line.startswith("# ")), "")
    for letters in letters_of(step):
        for letter in letters:
            assert f"{letter}: " in legend, (letter, legend)
    if step.name in ("merge", "adamw_step"):
        assert legend == ""


def letters_of(step: Step) -> set[str]:
    """The shapes that a step names: in its outputs and behind its arguments' names."""
    code = step.right.__code__
    names = [name.rpartition("_")[2] for name in code.co_varnames[: code.co_argcount] if "_" in name]
    shapes = [output.split()[1] for output in step.outputs if output]
    return {shape for shape in (*names, *shapes) if shape.isupper() and shape.isalpha()}


def test_a_choice_inside_the_model_is_far_from_what_float32_rounds() -> None:
    """A right function that sums in float32 was refused where u fell on a border among 50,000 tokens."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits_V = rng.normal(scale=3, size=50_000).astype(np.float32)
        top_p, u = far_from_borders(logits_V, 1.3, 0.99, rng)
        p_V = np.exp(logits_V / np.float32(1.3) - (logits_V / np.float32(1.3)).max())
        order = np.argsort(-p_V)
        ends = (p_V / p_V.sum())[order].cumsum(dtype=np.float32)
        kept = ends[: int(np.searchsorted(ends, top_p)) + 1]
        chosen = order[np.searchsorted(kept / kept[-1], u, side="right")]
        assert chosen == RIGHT["choose"](logits_V, 1.3, top_p, u)
