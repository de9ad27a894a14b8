"""RoPE frequencies: the rotation of each pair of features per position, with a model's scaling.

They are computed once per model, in float32, with the same order of operations as in transformers, because a difference
in the last bit is visible at position 131,071. Both `model/rope.py` and the C kernels use them.

Source: Su et al. 2021, "RoFormer"; llama-models, `llama3/model.py`, for Llama 3.1's scaling; Peng et al. 2023, "YaRN";
transformers, `modeling_rope_utils.py`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig, RopeScaling

Frequencies = NDArray[np.float32]

_ONE = np.float32(1)


def rope_frequencies(config: ModelConfig) -> Frequencies:
    """Return theta^(-2i/H) for i < H/2, with the config's scaling: (H/2,) float32, radians per position.

    The power is correctly rounded to float32; torch's is off by one bit for a few head dimensions.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(np.float32(config.rope_theta)), exponents.astype(np.float64))
    waves = powers.astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type == "dynamic":  # "dynamic" changes nothing within the context
        return _ONE / waves
    if scaling.rope_type == "linear":
        return _ONE / waves / np.float32(scaling.factor)
    return _llama3(_ONE / waves, scaling) if scaling.rope_type == "llama3" else _yarn(waves, config, scaling)


def attention_factor(config: ModelConfig) -> float:
    """Return the factor of cosines and sines, rounded to float32: 1 except for YaRN."""
    scaling = config.rope_scaling
    return float(np.float32(1.0 if scaling is None else scaling.attention_factor or 1.0))


def _llama3(frequencies: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Apply Llama 3.1's scaling: low frequencies divided by the factor, high ones kept, a linear blend in between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    assert low is not None and high is not None and original is not None

    # torch divides a scalar by a tensor as scalar * reciprocal, so do the same for equal bits.
    wavelengths = _ONE / frequencies * np.float32(2 * math.pi)
    kept = (_ONE / wavelengths * np.float32(original) - np.float32(low)) / np.float32(high - low)
    kept = np.clip(kept, np.float32(0), _ONE).astype(np.float32, copy=False)
    blend = (_ONE - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies
    return blend.astype(np.float32, copy=False)


def _yarn(waves: Frequencies, config: ModelConfig, scaling: RopeScaling) -> Frequencies:
    """Apply YaRN: pairs with many turns over the original context kept, those with few divided, a blend in between.

    `waves` is theta^(2i/H).
    """
    low, high = _blended_pairs(config, scaling)
    numbers = np.arange(len(waves), dtype=np.float32)
    divided = np.clip((numbers - np.float32(low)) / np.float32(high - low), np.float32(0), _ONE)

    kept = _ONE - divided
    blend = _ONE / (np.float32(scaling.factor) * waves) * (_ONE - kept) + _ONE / waves * kept
    return blend.astype(np.float32, copy=False)


def _blended_pairs(config: ModelConfig, scaling: RopeScaling) -> tuple[float, float]:
    """Return the first and the last pair of the blend."""
    original, fast, slow = scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow
    assert original is not None and fast is not None and slow is not None
    dim, base = config.head_dim, config.rope_theta

    def pair(turns: float) -> float:
        """Return the pair that makes `turns` turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(fast), pair(slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high + 0.001 if low == high else high
