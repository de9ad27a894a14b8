"""Quantize weights to the packed formats: to the nearest level, or with scales fitted to the error.

Rounding to nearest takes a group's scale from its largest weight, which is rarely best: with a smaller scale that
weight is clipped, while 31 others come closer to their levels. So several scales are tried. For each, every weight
takes its nearest level; for these levels the best scale (and minimum) solves a small least-squares problem. Alternating
the two never raises the error.

    error = sum over the group of importance_c * (w_c - scale * level_c - minimum)^2

`importance` is the cost of a squared error in a column, the mean square of that column's inputs: then the error of the
product x W^T is minimized, as far as inputs are independent. The error includes float16's rounding of the scale, and
the result is never worse than rounding to nearest, which is among the candidates.

Source: the search over scales of llama.cpp's `ggml-quants.c` (`make_qx_quants`, `make_qkx3_quants`), solved by groups
at once; the weighting is that of its importance matrix.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from llamarium.errors import CheckpointError, OptionError
from llamarium.quant.formats import GROUP, TILE_ROWS, PackedFormat
from llamarium.quant.ggml.encode import step_above_minimum, step_around_zero, step_both_sides
from llamarium.quant.packed import LinearPacked
from llamarium.quant.tiles import values_of

FITTED_FORMATS = ("Q4_0", "IQ4_NL", "Q4_1", "Q8_0")
"""The formats that are made here, by name."""

# Weights that are worked on at a time: their float32 copies stay in a core's cache.
_PIECE_WEIGHTS = 2**16
# Scales that are tried, as multiples of the range that the levels span: below 1 the range reaches beyond the largest
# weight, above 1 it cuts it off. More of them gain less than a hundredth on normally distributed weights.
_REACHES = {16: tuple(0.75 + 0.05 * i for i in range(9)), 256: (0.98, 0.99, 1.0, 1.01)}
_ROUNDS = 3  # of nearest levels and least squares, from the best of those
_FLOAT16_MAX = 65504.0


class GroupFit(NamedTuple):
    """n groups as a format stores them.

    Attributes:
        codes: uint8, (n, 32).
        scale: float16, (n, 1).
        minimum: float16, (n, 1); None where the format has none.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None


def fit(weight: Tensor, format: PackedFormat, *, importance: Tensor | None = None, search: bool = True) -> LinearPacked:
    """Quantize a weight.

    Args:
        weight: Floating point, (out, in), on the CPU or a GPU; `in` a multiple of 32.
        format: One of `FITTED_FORMATS`.
        importance: (in,), the cost of a squared error in each column; None is 1 for all.
        search: Fit the scales; False rounds to nearest, byte for byte like GGUF's Q4_0, Q4_1 and Q8_0.

    Raises:
        OptionError: For another format, rows that are no multiple of 32, or an invalid importance.
        CheckpointError: If weights are NaN, infinite, or too large for float16 scales.
    """
    check_format(format, weight.shape[1])
    column_weights = check_importance(importance, weight.shape[1]).to(weight.device)
    check_values(weight)
    num_rows, num_groups = weight.shape[0], weight.shape[1] // GROUP
    panels = -(-num_rows // TILE_ROWS)
    tiles = torch.empty(panels, num_groups, format.tile_bytes, dtype=torch.uint8, device=weight.device)
    for start, stop in _pieces(num_rows, weight.shape[1]):
        groups = weight[start:stop].detach().float().reshape(-1, GROUP)
        costs = column_weights.view(num_groups, GROUP).repeat(stop - start, 1)
        found = fit_groups(groups, costs, format) if search else nearest_groups(groups, format)
        codes, scale, minimum = (None if part is None else part.view(stop - start, -1) for part in found)
        packed = LinearPacked.from_codes(cast(Tensor, codes), cast(Tensor, scale), format, minimum)
        tiles[start // TILE_ROWS : -(-stop // TILE_ROWS)] = packed.weight
    return LinearPacked(tiles, num_rows, format)


def nearest_groups(groups: Tensor, format: PackedFormat) -> GroupFit:
    """Round groups (n, 32), float32, to nearest, with the scale of the largest weight."""
    if format.levels is not None:
        scale = (_largest(groups) / format.levels[0]).half()
        return GroupFit(nearest_codes(groups, scale, None, format), scale, None)
    values, minimum = groups.numpy(force=True), None
    with np.errstate(all="ignore"):
        if format.has_minimum:
            step, minimum, codes = step_above_minimum(values, 16)
        elif format.zero == 128:
            step, codes = step_both_sides(values)
            codes = (codes + 128).astype(np.uint8)
        else:
            step, codes = step_around_zero(values, 16)
    step, codes = torch.from_numpy(step).to(groups.device), torch.from_numpy(codes).to(groups.device)
    minimum = None if minimum is None else torch.from_numpy(minimum).to(groups.device).half()
    return GroupFit(codes, step.half(), minimum)


def fit_groups(groups: Tensor, costs: Tensor, format: PackedFormat) -> GroupFit:
    """Find codes, scales and minima of the least weighted squared error, for groups and costs (n, 32), float32."""
    best = nearest_groups(groups, format)
    least = _error(groups, costs, best, format)
    scale, minimum = _best_start(groups, costs, format)
    for _ in range(_ROUNDS):
        halves = scale.half(), minimum.half() if format.has_minimum else None
        trial = GroupFit(nearest_codes(groups, *halves, format), *halves)
        error = _error(groups, costs, trial, format)
        better = error < least  # False where the trial's scale overflowed and its error is NaN
        best = _choose(better, trial, best)
        least = torch.where(better, error, least)
        scale, minimum = _solve(groups, values_of(trial.codes, format), costs, format)
    return best


def nearest_codes(values: Tensor, scale: Tensor, minimum: Tensor | None, format: PackedFormat) -> Tensor:
    """Return the code of the level nearest to each weight, uint8; scale and minimum are float16 and broadcast."""
    scaled = (values if minimum is None else values - minimum.float()) * _inverse(scale.float())
    if format.levels is None:
        return (scaled.round() + format.zero).clamp_(0, format.num_levels - 1).to(torch.uint8)
    return torch.bucketize(scaled, _middles(format).to(values.device)).to(torch.uint8)


def check_format(format: PackedFormat, num_columns: int) -> None:
    """Check that a format is made here and fits the columns; OptionError if not."""
    if format.name not in FITTED_FORMATS:
        raise OptionError(f"{format.name} is read but not made; expected one of {', '.join(FITTED_FORMATS)}")
    if num_columns % GROUP:
        raise OptionError(f"rows of {num_columns} weights cannot be quantized; expected a multiple of {GROUP}")


def check_values(weight: Tensor) -> None:
    """Check that every weight fits float16 scales; CheckpointError for NaN, infinite or larger ones."""
    smallest, largest = (float(bound) for bound in torch.aminmax(weight))  # NaN if one weight is
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        num_bad = int((~weight.isfinite()).sum())
        raise CheckpointError(f"{num_bad} weights are NaN or infinite, and no code stands for them; mend the model")
    if max(-smallest, largest) > _FLOAT16_MAX:
        raise CheckpointError(
            f"weights reach from {smallest:.3g} to {largest:.3g}; expected no more than {_FLOAT16_MAX:,.0f}, "
            "where float16 scales end"
        )


def check_importance(importance: Tensor | None, num_columns: int) -> Tensor:
    """Return the cost of an error in each column, float32 (in,), 1 on average; OptionError if it is invalid."""
    if importance is None:
        return torch.ones(num_columns)
    if importance.shape != (num_columns,):
        raise OptionError(f"importance has shape {tuple(importance.shape)}; expected ({num_columns},), one per column")
    if not bool(importance.isfinite().all()) or bool((importance < 0).any()):
        raise OptionError("importance has values that are negative, NaN or infinite; expected mean squares of inputs")
    mean = importance.double().mean()
    return torch.ones(num_columns) if mean == 0 else (importance.double() / mean).float()


# --- candidates -------------------------------------------------------------------------------------------------------


def _best_start(groups: Tensor, costs: Tensor, format: PackedFormat) -> tuple[Tensor, Tensor]:
    """Try scales, each after one least-squares solution: the best scale and minimum, float32 (n, 1) each."""
    scale = minimum = groups.new_zeros(len(groups), 1)
    least = groups.new_full((len(groups), 1), torch.inf)
    for start_scale, start_minimum in _starts(groups, format):
        levels = _nearest_levels((groups - start_minimum) * _inverse(start_scale), format)
        trial_scale, trial_minimum = _solve(groups, levels, costs, format)
        error = _squares(groups - trial_scale * levels - trial_minimum, costs)
        better = error < least
        scale = torch.where(better, trial_scale, scale)
        minimum = torch.where(better, trial_minimum, minimum)
        least = torch.where(better, error, least)
    return scale, minimum


def _starts(groups: Tensor, format: PackedFormat) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scales and minima, (n, 1) each, with which the levels span about the weights' range."""
    reaches = _REACHES[format.num_levels]
    if format.has_minimum:
        low, high = groups.aminmax(dim=-1, keepdim=True)
        for reach in reaches:
            width = (high - low) / reach
            yield width / 15, (low + high - width) / 2
        return
    largest, zero = _largest(groups), torch.zeros(())
    # The end with the lowest level is the longer one. Uneven levels lie differently at each end: both are tried.
    ends = (-format.zero,) if format.levels is None else (format.levels[0], format.levels[-1])
    for end in ends:
        for reach in reaches:
            yield largest / (end * reach), zero


def _solve(groups: Tensor, levels: Tensor, costs: Tensor, format: PackedFormat) -> tuple[Tensor, Tensor]:
    """Return the scale and minimum of the least error for given levels: (n, 1) each, 0 where they are undetermined."""
    if not format.has_minimum:
        weighted = levels * costs
        scale = _ratio((weighted * groups).sum(-1, keepdim=True), (weighted * levels).sum(-1, keepdim=True))
        return scale, torch.zeros_like(scale)
    total = costs.sum(-1, keepdim=True)
    mean = _ratio((costs * groups).sum(-1, keepdim=True), total)
    middle = _ratio((costs * levels).sum(-1, keepdim=True), total)
    off_middle = levels - middle
    weighted = off_middle * costs
    scale = _ratio((weighted * (groups - mean)).sum(-1, keepdim=True), (weighted * off_middle).sum(-1, keepdim=True))
    return scale, mean - scale * middle


def _nearest_levels(scaled: Tensor, format: PackedFormat) -> Tensor:
    """Return the level nearest to each value, float32."""
    if format.levels is None:
        return scaled.round_().clamp_(-format.zero, format.num_levels - 1 - format.zero)
    nearest = torch.full_like(scaled, format.levels[0])
    above = torch.empty_like(scaled)  # 0 or 1 in float: adding up steps is several times faster than bucketize
    for i, middle in enumerate(_middles(format).tolist()):
        nearest.add_(torch.gt(scaled, middle, out=above), alpha=format.levels[i + 1] - format.levels[i])
    return nearest


# --- small parts ------------------------------------------------------------------------------------------------------


def _pieces(num_rows: int, num_columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of about `_PIECE_WEIGHTS` weights, whole panels of tiles."""
    step = max(1, _PIECE_WEIGHTS // (num_columns * TILE_ROWS)) * TILE_ROWS
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _choose(better: Tensor, trial: GroupFit, other: GroupFit) -> GroupFit:
    minimum = None
    if trial.minimum is not None and other.minimum is not None:
        minimum = torch.where(better, trial.minimum, other.minimum)
    codes, scale = torch.where(better, trial.codes, other.codes), torch.where(better, trial.scale, other.scale)
    return GroupFit(codes, scale, minimum)


def _error(groups: Tensor, costs: Tensor, found: GroupFit, format: PackedFormat) -> Tensor:
    """Return the weighted squared error of each group, (n, 1)."""
    values = values_of(found.codes, format) * found.scale.float()
    return _squares(groups - (values if found.minimum is None else values + found.minimum.float()), costs)


def _squares(difference: Tensor, costs: Tensor) -> Tensor:
    return (difference * difference * costs).sum(-1, keepdim=True)


def _largest(groups: Tensor) -> Tensor:
    """Return the first weight of largest size in each group, with its sign: (n, 1)."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True))


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below, 0.0)


@cache
def _middles(format: PackedFormat) -> Tensor:
    """Return the borders between uneven levels: (15,)."""
    assert format.levels is not None
    levels = torch.tensor(format.levels, dtype=torch.float32)
    return (levels[1:] + levels[:-1]) / 2
