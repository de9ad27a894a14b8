"""`llamarium build`: what is often done wrong gets its own message, however it is written, and never passes."""

from pathlib import Path

import pytest

from learners import STYLES, check_source
from planted_mistakes import PLANTED


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("index", range(len(PLANTED)), ids=lambda index: f"{PLANTED[index][0]}-{index}")
def test_a_planted_mistake_is_named(index: int, seed: int, tmp_path: Path) -> None:
    name, style, old, new, cause = PLANTED[index]
    right = STYLES[name][style]
    assert old in right
    result = check_source(tmp_path, name, right.replace(old, new), seed)
    assert not result.passed
    assert (result.cause[: len(cause)] if cause else result.cause) == cause, (result.cause, result.message)
