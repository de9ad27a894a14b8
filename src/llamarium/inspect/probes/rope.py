"""RoPE in plain numbers: each pair's angle, its rotation of a query and a key, and scores by distance.

The frequencies are the model's own (`llamarium/rope.py`), the rotation is that of `model/rope.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.errors import InputError
from llamarium.inspect.numbers import Floats, JsonView
from llamarium.rope import attention_factor, rope_frequencies


@dataclass(frozen=True, slots=True)
class RopePair(JsonView):
    """One pair of features: i and i + H/2.

    Attributes:
        frequency: Radians per position, with the model's scaling.
        unscaled: Radians per position without it.
        wavelength: Positions of one whole turn.
        angle: At the requested position, in radians, not reduced to one turn.
        turns: Whole turns over the model's context.
    """

    index: int
    frequency: float
    unscaled: float
    wavelength: float
    angle: float
    turns: float


@dataclass(frozen=True, slots=True)
class RopeAngles(JsonView):
    """Every pair of a model whose context has so many positions, at one of them; `is_scaled` by the model's scaling."""

    position: int
    context: int
    is_scaled: bool
    pairs: tuple[RopePair, ...]


@dataclass(frozen=True, slots=True)
class ScoresByDistance(JsonView):
    """The score at each distance: q·k / √H of the same two vectors, turned by their positions."""

    distances: tuple[int, ...]
    scores: tuple[float, ...]


def rope_angles(config: ModelConfig, position: int = 0) -> RopeAngles:
    """Return every pair of a model at a position, and what they are turned for; errors are those of `rope_pairs`."""
    is_scaled = config.rope_scaling is not None
    return RopeAngles(position, config.max_position_embeddings, is_scaled, rope_pairs(config, position))


def rope_pairs(config: ModelConfig, position: int = 0) -> tuple[RopePair, ...]:
    """Return every pair's frequency and its angle at a position.

    For another scaling give the config another one: `dataclasses.replace(config, rope_scaling=...)`.
    InputError for a position outside the context.
    """
    _check_positions(config, [position])
    scaled = rope_frequencies(config)
    unscaled = rope_frequencies(replace(config, rope_scaling=None))
    angles = scaled * np.float32(position)
    limit = config.max_position_embeddings
    rows = zip(scaled.tolist(), unscaled.tolist(), angles.tolist(), strict=True)
    return tuple(
        RopePair(i, frequency, plain, math.tau / frequency, angle, limit * frequency / math.tau)
        for i, (frequency, plain, angle) in enumerate(rows)
    )


def score_by_distance(config: ModelConfig, q_H: Floats, k_H: Floats, distances: Sequence[int]) -> list[float]:
    """Return q·k / sqrt(H) for a query that many positions after the key, of a query and a key before rotation, (H,).

    InputError for vectors of another length, or a distance outside the context.
    """
    _check_positions(config, distances)
    q_H, k_H = np.asarray(q_H, np.float32), np.asarray(k_H, np.float32)
    if q_H.shape != (config.head_dim,) or k_H.shape != (config.head_dim,):
        raise InputError(f"q and k are {q_H.shape} and {k_H.shape}; expected ({config.head_dim},) each")
    q_T1H = rotate(config, np.broadcast_to(q_H, (len(distances), 1, config.head_dim)), np.array(distances))
    return (q_T1H[:, 0] @ k_H * config.head_dim**-0.5).tolist()


def rotate(config: ModelConfig, x_TNH: Floats, positions: NDArray[np.int64]) -> Floats:
    """Turn each pair of features of queries or keys by its angle at a position, as `model.rope.Rotary` does.

    With Yarn they are multiplied with its attention factor too.
    """
    angles_T1P = positions.astype(np.float32)[:, None, None] * rope_frequencies(config)
    factor = attention_factor(config)
    cos_T1P = np.multiply(np.cos(angles_T1P), factor, dtype=np.float32)
    sin_T1P = np.multiply(np.sin(angles_T1P), factor, dtype=np.float32)
    first, second = np.split(x_TNH, 2, axis=-1)
    return np.concatenate((first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P), axis=-1)


def _check_positions(config: ModelConfig, positions: Sequence[int]) -> None:
    limit = config.max_position_embeddings
    out_of_range = [p for p in positions if not 0 <= p < limit]
    if out_of_range or not positions:
        raise InputError(f"positions are {list(positions)[:5]}; expected some within 0..{limit - 1}")
