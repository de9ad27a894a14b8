"""The small model and its server that many modules share; one that wants another has fixtures of these names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def llama(smollm2_path: Path) -> Any:
    """A small random `Llama` with SmolLM2's vocabulary and dialogs; tests must not change it."""
    from serving import small_llama  # and PyTorch, which the light half has not

    return small_llama(smollm2_path)


@pytest.fixture(scope="module")
def running(llama: Any) -> Iterator[Any]:
    """A server with that model, one for each module."""
    from serving import serving

    with serving(llama) as found:
        yield found
