"""`llamarium build`: right functions pass, however they are written."""

from dataclasses import replace
from pathlib import Path

import pytest

from learners import CONFIG, STYLES, check_source, random_weights
from llamarium.course.folder.source import solution
from llamarium.course.outline import step_named
from llamarium.course.steps import STEPS


@pytest.mark.parametrize(("name", "style"), [(name, style) for name in STYLES for style in STYLES[name]])
def test_a_right_function_passes(name: str, style: str, tmp_path: Path) -> None:
    result = check_source(tmp_path, name, STYLES[name][style])
    assert result.passed, result
    assert "slow" not in result.checked


def test_a_loss_that_sums_in_float32_passes_over_a_large_vocabulary(tmp_path: Path) -> None:
    """Its 50,000 terms, added one by one, were wrong by a thousandth."""
    model = random_weights(replace(CONFIG, vocab_size=50_000))
    for seed in range(3):
        assert check_source(tmp_path, "loss", STYLES["loss"]["logaddexp"], seed, model=model).passed


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_solution_passes(step: str, tmp_path: Path) -> None:
    """On the model's numbers too: a step is called by a pass, or has arguments of its own."""
    result = check_source(tmp_path, step.name, solution(step_named(step.name)))
    assert result.passed, result
    assert ", 0 calls" not in result.checked
