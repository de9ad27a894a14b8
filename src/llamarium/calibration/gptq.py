"""GPTQ: the error of rounding one column is compensated in the columns after it.

GPTQ minimizes the error of a Linear's output. For inputs X (one row per token), the error of a quantized weight Q
instead of W is

    |X (W - Q)^T|^2 = sum over rows of (w - q) G (w - q)^T,        G = X^T X

so columns with correlated inputs can compensate each other's errors. Columns are rounded from first to last; after
each, the remaining columns are updated to minimize this sum given the rounded ones. The update is a row of U, the upper
Cholesky factor of G's inverse: with e = (w_j - q_j) / U_jj, e * U_j is subtracted from the remaining columns.

A group's scale is fitted when its first column is reached, to the updated weights, with costs 1 / U_jj^2: the cost of
an error in column j after the later columns have compensated it.

G is damped before it is inverted, because it is singular with fewer tokens than columns.

Source: Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", algorithm 1; groups and damping as in section 4 and the authors' code.
"""

import numpy as np

from llamarium.calibration.fit import (
    Bytes,
    Floats,
    Halves,
    check_format,
    check_values,
    dequantized,
    fit_groups,
    nearest_codes,
    nearest_groups,
)
from llamarium.errors import OptionError
from llamarium.quant.formats import GROUP, PackedFormat
from llamarium.quant.packing import pack_groups

DAMPING = 0.01
"""Value added to G's diagonal, as a share of its mean; 1 % as in the paper."""

_MOST_DAMPING = 1.0


def gptq(weight: Floats, gram: Floats, format: PackedFormat, *, damping: float = DAMPING) -> Bytes:
    """Quantize a weight for given inputs.

    Args:
        weight: float32 (out, in); `in` must be a multiple of 32.
        gram: X^T X of its inputs, (in, in), at any scale.
        format: One of `fit.FITTED_FORMATS`.
        damping: Share of the diagonal's mean that is added to it; increased tenfold, up to 1, until G is invertible.

    Returns:
        Tiles, uint8 (panels, in / 32, bytes per tile).

    Raises:
        OptionError: As `fit`, and for an invalid `gram`.
        CheckpointError: As `fit`.
    """
    check_format(format, weight.shape[1])
    check_values(weight)
    if gram.shape != (weight.shape[1], weight.shape[1]):
        raise OptionError(f"gram has shape {gram.shape}; expected ({weight.shape[1]}, {weight.shape[1]})")
    if not np.isfinite(gram).all():
        raise OptionError("gram has values that are NaN or infinite; expected X^T X of finite inputs")
    factor = inverse_factor(gram, damping)
    updated = np.array(weight.T, np.float32, order="C")  # (in, out): weights with the updates so far
    codes = np.empty(updated.shape, np.uint8)
    scales: list[Halves] = []
    minima: list[Halves] = []
    for start in range(0, len(updated), GROUP):
        stop = start + GROUP
        corner = factor[start:stop, start:stop]
        costs = np.broadcast_to(corner.diagonal() ** -2, (len(weight), GROUP))
        groups = np.ascontiguousarray(updated[start:stop].T)
        with np.errstate(all="ignore"):  # as in `fit`
            _, scale, minimum = fit_groups(groups, costs, format, nearest_groups(groups, format))
            errors = _round_columns(updated[start:stop], codes[start:stop], scale, minimum, format, corner)
        updated[stop:] -= factor[start:stop, stop:].T @ errors
        scales.append(scale)
        minima += [] if minimum is None else [minimum]
    minimum = np.concatenate(minima, axis=1) if minima else None
    return pack_groups((np.ascontiguousarray(codes.T), np.concatenate(scales, axis=1), minimum), format)


def inverse_factor(gram: Floats, damping: float) -> Floats:
    """Return the upper triangular U with U^T U = inverse of the damped gram, float32 (in, in).

    OptionError if it cannot be inverted.
    """
    gram = gram.astype(np.float32)
    diagonal = np.einsum("ii->i", gram)
    diagonal[diagonal == 0] = 1  # a column without input: any positive value decouples it
    mean = diagonal.mean()
    while True:
        damped = gram + np.float32(damping * mean) * np.eye(len(gram), dtype=np.float32)
        try:  # the reversed Cholesky factor is an upper triangular R with R R^T = G; U is its inverse
            return np.linalg.inv(np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1])
        except np.linalg.LinAlgError:
            if damping >= _MOST_DAMPING:
                raise OptionError(
                    f"the inputs' X^T X ({len(gram)} columns) cannot be inverted, even with its diagonal doubled; "
                    "use more text to calibrate, or the method importance"
                ) from None
        damping = min(10 * damping, _MOST_DAMPING)


def _round_columns(
    updated: Floats, codes: Bytes, scale: Halves, minimum: Halves | None, format: PackedFormat, corner: Floats
) -> Floats:
    """Round a group's columns one by one into `codes`; return the errors, (32, out), to compensate in later groups.

    `updated` and `codes` are (32, out) and changed in place; scale and minimum are (out, 1); `corner` is the group's
    part of U.
    """
    errors = np.empty_like(updated)
    scale, minimum = scale[:, 0], None if minimum is None else minimum[:, 0]
    for j in range(GROUP):
        codes[j] = nearest_codes(updated[j], scale, minimum, format)
        errors[j] = (updated[j] - dequantized(codes[j], scale, minimum, format)) / corner[j, j]
        updated[j + 1 :] -= corner[j, j + 1 :, None] * errors[j]
    return errors
