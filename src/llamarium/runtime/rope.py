"""RoPE's frequencies without torch; `model/rope.py` has what is done with them, and tests hold the two equal."""

import math

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig, RopeScaling

Frequencies = NDArray[np.float32]


def rope_frequencies(config: ModelConfig) -> Frequencies:
    """Return theta^(-2i/H) for i < H/2, with the config's scaling: (H/2,) float32, radians per position.

    The power is rounded to float32 correctly; torch's own may be off by one in the last bit for a few widths of heads.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = np.power(np.float64(np.float32(config.rope_theta)), exponents.astype(np.float64))
    frequencies = _ONE / powers.astype(np.float32)
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


_ONE = np.float32(1)


def _scale(frequencies: Frequencies, scaling: RopeScaling) -> Frequencies:
    """Llama 3.1's scaling: long waves divided by the factor, short ones kept, a linear blend between."""
    # In this order of operations the last bit is the publishers' own, and at position 131,071 it is seen: torch divides
    # a number by a tensor by way of the reciprocal.
    wavelengths = _ONE / frequencies * np.float32(2 * math.pi)
    low = np.float32(scaling.low_freq_factor)
    span = np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    kept = (_ONE / wavelengths * np.float32(scaling.original_max_position_embeddings) - low) / span
    kept = np.clip(kept, np.float32(0), _ONE).astype(np.float32, copy=False)
    blend = (_ONE - kept) * frequencies / np.float32(scaling.factor) + kept * frequencies
    return blend.astype(np.float32, copy=False)
