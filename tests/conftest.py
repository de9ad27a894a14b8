"""Fixtures that every part of the suite shares: the built-in model's file and the built-in tokenizer's."""

from pathlib import Path

import pytest

from llamarium.weights.builtin import fetch


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF, fetched into the cache the first time."""
    return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def llama3_tokenizer_path() -> Path:
    """Llama 3's tokenizer.model, fetched into the cache the first time."""
    return fetch("llama3")
