"""RoPE in plain numbers: each pair's angle, its rotation of a query and a key, and scores by distance.

The frequencies are the model's own (`runtime/rope.py`), the rotation is that of `model/rope.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamarium.config import ModelConfig
from llamarium.errors import InputError, show_value
from llamarium.inspect.json_values import JsonView
from llamarium.inspect.numbers import Floats
from llamarium.inspect.probes.heads import layer_in
from llamarium.inspect.probes.neurons import row_of_position
from llamarium.inspect.trace import Trace
from llamarium.runtime.rope import rope_frequencies


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


@dataclass(frozen=True, slots=True, eq=False)
class Turned(JsonView):
    """A head's query or key, as pairs, before and after its rotation.

    Attributes:
        head: Of the query heads, or of the key-value heads.
        before_P2: float32; pair i is (feature i, feature i + H/2).
        after_P2: float32; the rotated pairs.
    """

    side: Literal["q", "k"]
    layer: int
    head: int
    position: int
    before_P2: Floats
    after_P2: Floats
    pairs: tuple[RopePair, ...]


def rope_pairs(config: ModelConfig, position: int = 0) -> tuple[RopePair, ...]:
    """Return every pair's frequency and its angle at a position.

    For another scaling give the config another one: `dataclasses.replace(config, rope_scaling=...)`.

    Raises:
        InputError: For a position outside the context.
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


def turned(
    config: ModelConfig, trace: Trace, side: Literal["q", "k"], layer: int, head: int, position: int = -1
) -> Turned:
    """Return a query or a key of the pass before and after its rotation.

    `trace` holds "q" and "q_rot", or "k" and "k_rot", of the layer. A negative layer or position counts from the last.
    The head is one of the query heads, or of the key-value heads.

    Raises:
        InputError: If the trace does not hold them, or there is no such head.
    """
    if side not in ("q", "k"):
        raise InputError(f"side is {side!r}; expected q or k")
    layer = layer_in(trace, layer, config.num_hidden_layers, (side, f"{side}_rot"))
    num_heads = config.num_attention_heads if side == "q" else config.num_key_value_heads
    if not isinstance(head, int) or not 0 <= head < num_heads:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"head is {show_value(head)}; expected one within 0..{num_heads - 1} of {side}")
    row = row_of_position(trace, position)
    at = trace.positions[row]
    row = at if side == "k" else row  # keys are there of all tokens
    before_P2, after_P2 = (trace.arrays[name, layer][row, head].reshape(2, -1).T for name in (side, f"{side}_rot"))
    return Turned(side, layer, head, at, before_P2, after_P2, rope_pairs(config, at))


def score_by_distance(config: ModelConfig, q_H: Floats, k_H: Floats, distances: Sequence[int]) -> list[float]:
    """Return q·k / sqrt(H) for a query that many positions after the key, of a query and a key before rotation, (H,).

    Raises:
        InputError: For vectors of another length, or a distance outside the context.
    """
    _check_positions(config, distances)
    q_H, k_H = np.asarray(q_H, np.float32), np.asarray(k_H, np.float32)
    if q_H.shape != (config.head_dim,) or k_H.shape != (config.head_dim,):
        raise InputError(f"q and k are {q_H.shape} and {k_H.shape}; expected ({config.head_dim},) each")
    q_T1H = rotate(config, np.broadcast_to(q_H, (len(distances), 1, config.head_dim)), np.array(distances))
    return (q_T1H[:, 0] @ k_H * config.head_dim**-0.5).tolist()


def rotate(config: ModelConfig, x_TNH: Floats, positions: NDArray[np.int64]) -> Floats:
    """Turn each pair of features of queries or keys by its angle at a position, as `model.rope.Rotary` does."""
    angles_T1P = positions.astype(np.float32)[:, None, None] * rope_frequencies(config)
    cos_T1P, sin_T1P = np.cos(angles_T1P), np.sin(angles_T1P)
    first, second = np.split(x_TNH, 2, axis=-1)
    return np.concatenate((first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P), axis=-1)


def _check_positions(config: ModelConfig, positions: Sequence[int]) -> None:
    limit = config.max_position_embeddings
    wrong = [p for p in positions if not 0 <= p < limit]
    if wrong or not positions:
        raise InputError(f"positions are {list(positions)[:5]}; expected some within 0..{limit - 1}")
