"""The small model and its server that many modules share; one that wants another has fixtures of these names."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import llamarium


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Every client of httpx reads those of all authorities, which takes 16 ms; the servers here have none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


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


@pytest.fixture(scope="session")
def talker(smollm2_path: Path) -> Iterator[Any]:
    """A server with the built-in model in its own 4 bits, for clients that want answers with an end and some sense."""
    from serving import serving

    llama = llamarium.load(smollm2_path, device="cpu")
    with serving(llama, engine={"kv_memory": 2**27}) as found:
        yield found
