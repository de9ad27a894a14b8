"""`llamarium build`: what is often done wrong gets its own message, however it is written, and never passes."""

from pathlib import Path

import pytest

from learners import STYLES, check_source
from llamarium.course.steps import STEPS
from planted_mistakes import planted_in


@pytest.mark.parametrize("step", [step.name for step in STEPS])
def test_planted_mistakes_are_named(step: str, tmp_path: Path) -> None:
    """Over five seeds, by the results alone."""
    unnamed: list[tuple[str, ...]] = []
    for mistake in planted_in(step, STYLES):
        for seed in range(5):
            result = check_source(tmp_path, step, mistake.source, seed)
            if result.passed or not mistake.is_named(result.cause):
                unnamed.append((mistake.label, str(seed), result.status, result.cause, result.message))
    assert unnamed == []
