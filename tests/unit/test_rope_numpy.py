"""RoPE's frequencies and attention factor are those of transformers."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest

from llamarium.config import ModelConfig
from llamarium.model import LlamaRotaryEmbedding
from llamarium.presets import PRESETS
from llamarium.rope import attention_factor, rope_frequencies

pytestmark = pytest.mark.torch

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def expected(config: ModelConfig, scaling: dict[str, Any] | None = None) -> tuple[np.ndarray, float]:
    """Return what transformers computes from the same config, or from another scaling in its spelling."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Theirs

    raw = config.to_hf()
    if scaling is not None:
        raw |= {"rope_scaling": None, "rope_parameters": {**scaling, "rope_theta": config.rope_theta}}
    theirs = Theirs(LlamaConfig.from_dict(raw))
    return theirs.inv_freq.numpy(), theirs.attention_scaling


@pytest.mark.parametrize("name", PRESETS)
def test_published_models_have_the_same_bits(name: str) -> None:
    found = rope_frequencies(PRESETS[name])
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), expected(PRESETS[name])[0].view(np.uint32))


@pytest.mark.parametrize("head_dim", [16, 48, 96, 112, 256])
def test_others_are_off_by_the_last_bits_at_most(head_dim: int) -> None:
    config = dataclasses.replace(PRESETS["llama-3.2-1b"], head_dim=head_dim, rope_theta=12345.0)
    for scaling in (None, config.rope_scaling):
        config = dataclasses.replace(config, rope_scaling=scaling)
        np.testing.assert_allclose(rope_frequencies(config), expected(config)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 1},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7},
        {**YARN, "mscale": 0.8},
        {**YARN, "attention_factor": 0.5},
        {**YARN, "beta_fast": 16, "beta_slow": 2.5},
        {**YARN, "truncate": False},
        {**YARN, "beta_fast": 0, "beta_slow": None},
        {**YARN, "factor": None},
        {**YARN, "factor": 1.0},
        {**YARN, "original_max_position_embeddings": 2},
        {**YARN, "original_max_position_embeddings": 2**30},
        {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_every_type_of_scaling(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    plain = dataclasses.replace(PRESETS["tiny"], head_dim=head_dim, rope_theta=theta, max_position_embeddings=8192)
    raw = plain.to_hf() | {"rope_scaling": dict(scaling), "rope_parameters": None}
    config = ModelConfig.from_hf(raw)
    frequencies, factor = expected(plain, scaling)
    np.testing.assert_allclose(rope_frequencies(config), frequencies, rtol=1e-6, atol=0)
    assert attention_factor(config) == pytest.approx(factor, rel=1e-7)

    written = ModelConfig.from_hf(config.to_hf())
    assert written == config and not written.notes
    again = expected(config)
    np.testing.assert_allclose(again[0], frequencies, rtol=1e-6, atol=0)
    assert again[1] == pytest.approx(factor, rel=1e-7)


def test_modules_have_the_same_numbers() -> None:
    raw = PRESETS["tiny"].to_hf() | {"rope_scaling": YARN, "rope_parameters": None}
    config = ModelConfig.from_hf(raw)
    import torch

    embedding = LlamaRotaryEmbedding(config)
    assert np.array_equal(embedding.frequencies(torch.device("cpu")).numpy(), rope_frequencies(config))
    rotary = embedding(torch.tensor([[0]]), torch.float32)
    assert float(rotary.cos_BT1H[0, 0, 0, 0]) == pytest.approx(attention_factor(config), rel=1e-7)


def test_no_warning_is_made_of_extreme_numbers() -> None:
    plain = dataclasses.replace(PRESETS["tiny"], rope_theta=1e29)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("linear", "yarn"):
            raw = plain.to_hf() | {"rope_scaling": {"rope_type": kind, "factor": 1e6}, "rope_parameters": None}
            assert np.isfinite(rope_frequencies(ModelConfig.from_hf(raw))).all()
