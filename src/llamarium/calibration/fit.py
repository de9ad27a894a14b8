"""Quantization to the packed types: rounding to nearest, or with scales fitted to minimize the error.

Rounding to nearest determines a group's scale by its largest weight, which is rarely optimal: a smaller scale clips
that weight, but may bring the other 31 closer to their levels. Therefore several scales are tried. For each, every
weight takes its nearest level; for these levels the optimal scale (and minimum) solves a small least-squares problem.
Alternating the two never increases the error.

    error = sum over the group of importance_c * (w_c - scale * level_c - minimum)^2

`importance` is the cost of a squared error in a column. With the mean square of that column's inputs, the error of the
product x W^T is minimized, if inputs are independent. The error includes rounding of the scale to float16. The result
is never worse than rounding to nearest, which is one of the candidates.

Source: the search over scales of llama.cpp's `ggml-quants.c` (`make_qx_quants`, `make_qkx3_quants`), vectorized over
groups; the weighting is that of its importance matrix.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import CheckpointError, OptionError
from llamarium.kernels.threads import num_threads
from llamarium.quant.formats import GROUP, TILE_ROWS, PackedFormat
from llamarium.quant.ggml.encode import inverse_of, largest_of, step_above_minimum, step_around_zero, step_both_sides
from llamarium.quant.packing import pack_groups

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]

FITTED_FORMATS = ("Q4_0", "IQ4_NL", "Q4_1", "Q8_0")
"""The types that can be fitted, by name."""

# Weights processed at a time; their float32 copies stay in a core's cache.
_PIECE_WEIGHTS = 2**16
# Candidates of the scale, as the ratio of the weights' range to that of the levels: above 1 the largest weight is
# clipped. More candidates gain less than 1 % on normally distributed weights.
_REACHES = {16: tuple(0.75 + 0.05 * i for i in range(9)), 256: (0.98, 0.99, 1.0, 1.01)}
_ROUNDS = 3  # alternations of nearest levels and least squares, from the best candidate
_FLOAT16_MAX = 65504.0


class GroupFit(NamedTuple):
    """The codes, scales and minima of n groups.

    Attributes:
        codes: uint8, (n, 32).
        scale: float16, (n, 1).
        minimum: float16, (n, 1); None if the type has no minimum.
    """

    codes: Bytes
    scale: Halves
    minimum: Halves | None


def fit(weight: Floats, format: PackedFormat, *, importance: Floats | None = None, search: bool = True) -> Bytes:
    """Quantize a weight.

    Args:
        weight: float32 (out, in); `in` must be a multiple of 32.
        format: One of `FITTED_FORMATS`.
        importance: Cost of a squared error in each column, (in,); None means 1 for all.
        search: Fit the scales; False rounds to nearest, byte-identical to llama.cpp's Q4_0, Q4_1 and Q8_0.

    Returns:
        Tiles, uint8 (panels, in / 32, bytes per tile).

    Raises:
        OptionError: For another type, rows that are not a multiple of 32, or an invalid importance.
        CheckpointError: If weights are NaN, infinite, or too large for float16 scales.
    """
    check_format(format, weight.shape[1])
    columns = check_importance(importance, weight.shape[1]).reshape(-1, GROUP)
    check_values(weight)

    def piece(rows: slice) -> Bytes:
        groups = weight[rows].reshape(-1, GROUP)
        with np.errstate(all="ignore"):  # a candidate that overflows has an error of NaN and is not chosen
            groups_fit = nearest_groups(groups, format)
            if search:
                groups_fit = fit_groups(groups, np.tile(columns, (len(groups) // len(columns), 1)), format, groups_fit)
        by_row = (None if part is None else part.reshape(len(weight[rows]), -1) for part in groups_fit)
        return pack_groups(GroupFit(*by_row), format)  # pyright: ignore[reportArgumentType]

    step = max(1, _PIECE_WEIGHTS // (weight.shape[1] * TILE_ROWS)) * TILE_ROWS  # whole panels of tiles
    with ThreadPoolExecutor(num_threads()) as pool:
        pieces = (slice(start, start + step) for start in range(0, len(weight), step))
        return np.concatenate([*pool.map(piece, pieces)])


def nearest_groups(groups: Floats, format: PackedFormat) -> GroupFit:
    """Quantize groups, float32 (n, 32), by rounding to nearest, with scales from the largest weights."""
    if format.levels is not None:
        scale = (largest_of(groups) / np.float32(format.levels[0])).astype(np.float16)
        return GroupFit(nearest_codes(groups, scale, None, format), scale, None)
    minimum = None
    if format.has_minimum:
        step, minimum, codes = step_above_minimum(groups, 16)
    elif format.zero == 128:
        step, codes = step_both_sides(groups)
        codes = (codes + 128).astype(np.uint8)
    else:
        step, codes = step_around_zero(groups, 16)
    return GroupFit(codes, step.astype(np.float16), None if minimum is None else minimum.astype(np.float16))


def fit_groups(groups: Floats, costs: Floats, format: PackedFormat, best: GroupFit) -> GroupFit:
    """Fit codes, scales and minima to minimize the weighted squared error, which is at most that of `best`.

    Args:
        groups: Weights, float32 (n, 32).
        costs: Cost of a squared error of each weight, (n, 32).
        format: The type.
        best: The first candidate.
    """
    smallest = _error(groups, costs, best, format)
    scale, minimum = _best_start(groups, costs, format)
    for _ in range(_ROUNDS):
        halves = scale.astype(np.float16), minimum.astype(np.float16) if format.has_minimum else None
        trial = GroupFit(nearest_codes(groups, *halves, format), *halves)
        error = _error(groups, costs, trial, format)
        better = error < smallest  # False if the scale overflowed, because the error is NaN
        pairs: Any = zip(trial, best, strict=True)
        chosen: Any = [None if old is None else np.where(better, new, old) for new, old in pairs]
        best = GroupFit(*chosen)
        smallest = np.where(better, error, smallest)
        scale, minimum = _solve(groups, _values(trial.codes, format), costs, format)
    return best


def nearest_codes(values: Floats, scale: Halves, minimum: Halves | None, format: PackedFormat) -> Bytes:
    """Return the code of each weight's nearest level, uint8; scale and minimum are float16 and broadcast."""
    shifted = values if minimum is None else values - minimum.astype(np.float32)
    return _codes(shifted * inverse_of(scale.astype(np.float32)), format)


def check_format(format: PackedFormat, num_columns: int) -> None:
    """Check that a type can be fitted and its blocks fit the number of columns; OptionError if not."""
    if format.name not in FITTED_FORMATS:
        raise OptionError(f"{format.name} is read but not made; expected one of {', '.join(FITTED_FORMATS)}")
    if num_columns % GROUP:
        raise OptionError(f"rows of {num_columns} weights cannot be quantized; expected a multiple of {GROUP}")


def check_values(weight: Floats) -> None:
    """Check that all weights are finite and within the range of float16; CheckpointError if not."""
    smallest, largest = float(weight.min()), float(weight.max())  # NaN if one weight is
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        num_bad = int(np.count_nonzero(~np.isfinite(weight)))
        raise CheckpointError(f"{num_bad} weights are NaN or infinite, and no code stands for them; mend the model")
    if max(-smallest, largest) > _FLOAT16_MAX:
        raise CheckpointError(
            f"weights reach from {smallest:.3g} to {largest:.3g}; expected no more than {_FLOAT16_MAX:,.0f}, "
            "where float16 scales end"
        )


def check_importance(importance: Floats | None, num_columns: int) -> Floats:
    """Return the cost of an error in each column, float32 (in,), normalized to mean 1; OptionError if invalid."""
    even = np.ones(num_columns, np.float32)
    if importance is None:
        return even
    if importance.shape != (num_columns,):
        raise OptionError(f"importance has shape {importance.shape}; expected ({num_columns},), one per column")
    if not np.isfinite(importance).all() or (importance < 0).any():
        raise OptionError("importance has values that are negative, NaN or infinite; expected mean squares of inputs")
    mean = importance.mean(dtype=np.float64)
    return even if mean == 0 else (importance / mean).astype(np.float32)


def _best_start(groups: Floats, costs: Floats, format: PackedFormat) -> tuple[Floats, Floats]:
    """Return the best scale and minimum after one least-squares step from each candidate, float32 (n, 1) each."""
    scale = minimum = np.zeros((len(groups), 1), np.float32)
    smallest = np.full((len(groups), 1), np.inf, np.float32)
    for start_scale, start_minimum in _starts(groups, format):
        levels = _values(_codes((groups - start_minimum) * inverse_of(start_scale), format), format)
        trial_scale, trial_minimum = _solve(groups, levels, costs, format)
        error = _squares(groups - trial_scale * levels - trial_minimum, costs)
        better = error < smallest
        scale = np.where(better, trial_scale, scale)
        minimum = np.where(better, trial_minimum, minimum)
        smallest = np.where(better, error, smallest)
    return scale, minimum


def _starts(groups: Floats, format: PackedFormat) -> Iterator[tuple[Floats, Floats]]:
    """Yield candidates of scale and minimum, (n, 1) each, with which the levels span about the weights' range."""
    reaches = _REACHES[format.num_levels]
    if format.has_minimum:
        low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
        for reach in reaches:
            width = (high - low) / np.float32(reach)
            yield width / np.float32(15), (low + high - width) / np.float32(2)
        return
    largest: Floats = largest_of(groups)
    zero = np.zeros((1, 1), np.float32)
    # The lowest level has the largest magnitude. Uneven levels are not symmetric, so both ends are tried.
    ends = (-format.zero,) if format.levels is None else (format.levels[0], format.levels[-1])
    for end in ends:
        for reach in reaches:
            yield largest / np.float32(end * reach), zero


def _solve(groups: Floats, levels: Floats, costs: Floats, format: PackedFormat) -> tuple[Floats, Floats]:
    """Return the least-squares scale and minimum for given levels, (n, 1) each, 0 where undetermined."""
    if not format.has_minimum:
        weighted = levels * costs
        scale = _ratio(_sum(weighted * groups), _sum(weighted * levels))
        return scale, np.zeros_like(scale)
    total = _sum(costs)
    mean, middle = _ratio(_sum(costs * groups), total), _ratio(_sum(costs * levels), total)
    off_middle = levels - middle
    weighted = off_middle * costs
    scale = _ratio(_sum(weighted * (groups - mean)), _sum(weighted * off_middle))
    return scale, np.subtract(mean, scale * middle)


def _error(groups: Floats, costs: Floats, group_fit: GroupFit, format: PackedFormat) -> Floats:
    return _squares(groups - dequantized(group_fit.codes, group_fit.scale, group_fit.minimum, format), costs)


def dequantized(codes: Bytes, scale: Halves, minimum: Halves | None, format: PackedFormat) -> Floats:
    """Dequantize codes to float32; scale and minimum broadcast."""
    values = _values(codes, format) * scale.astype(np.float32)
    return values if minimum is None else values + minimum.astype(np.float32)


def _codes(scaled: Floats, format: PackedFormat) -> Bytes:
    if format.levels is None:
        codes = np.rint(scaled) + np.float32(format.zero)
        return np.fmin(np.fmax(codes, 0), format.num_levels - 1).astype(np.uint8)
    steps = np.fmin(np.fmax(np.ceil(2 * scaled), -255), 256).astype(np.int16)  # steps of half a level
    return _nearest(format)[steps + 255]


@cache
def _nearest(format: PackedFormat) -> Bytes:
    """Return the codes of values in ((k - 1) / 2, k / 2], for k from -255 to 256; borders are multiples of 1 / 2."""
    levels = np.array(format.levels, np.float32)
    borders = (levels[1:] + levels[:-1]) / 2
    return np.searchsorted(borders, np.arange(-256, 256) / 2, side="right").astype(np.uint8)


def _values(codes: Bytes, format: PackedFormat) -> Floats:
    if format.levels is None:
        return codes.astype(np.float32) - np.float32(format.zero)
    return np.array(format.levels, np.float32)[codes]


def _sum(values: NDArray[Any]) -> Floats:
    return values.sum(axis=-1, keepdims=True)


def _squares(difference: NDArray[Any], costs: Floats) -> Floats:
    return _sum(difference * difference * costs)


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.where(below > 0, above / below, np.float32(0))
