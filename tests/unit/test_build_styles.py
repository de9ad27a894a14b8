"""`llamarium build`: right functions pass, however they are written."""

from pathlib import Path

import pytest

from learners import STYLES, check_source
from llamarium.build.folder.course import step_named
from llamarium.build.folder.source import solution
from llamarium.build.steps import STEPS


@pytest.mark.parametrize(("name", "style"), [(name, style) for name in STYLES for style in STYLES[name]])
def test_a_right_function_passes(name: str, style: str, tmp_path: Path) -> None:
    result = check_source(tmp_path, name, STYLES[name][style])
    assert result.passed, result
    assert "slow" not in result.checked


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_solution_passes(step: str, tmp_path: Path) -> None:
    """On the model's numbers too: a step is called by a pass, or has arguments of its own."""
    result = check_source(tmp_path, step.name, solution(step_named(step.name)))
    assert result.passed, result
    assert ", 0 calls" not in result.checked
