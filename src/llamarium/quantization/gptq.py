"""GPTQ: the error of rounding one column is compensated in the columns after it.

What counts in a Linear is its output. With inputs X (one row a token), a quantized weight Q in place of W costs

    |X (W - Q)^T|^2 = sum over rows of (w - q) G (w - q)^T,        G = X^T X

so columns with correlated inputs can balance each other's errors. Columns are rounded from first to last; after each,
the remaining columns move to where this sum is least given the rounded ones. That move is a row of U, the upper
Cholesky factor of G's inverse: with e = (w_j - q_j) / U_jj, the remaining columns lose e * U_j.

A group's scale is fitted when its first column is reached, on the weights as moved so far, with costs 1 / U_jj^2: the
cost of an error in column j after the later columns have compensated it.

G is damped before it is inverted, as with fewer tokens than columns it is singular.

Source: Frantar, Ashkboos, Hoefler, Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", algorithm 1; groups and damping as in section 4 and the authors' code.
"""

import torch
from torch import Tensor

from llamarium.errors import OptionError
from llamarium.quant.formats import GROUP, PackedFormat
from llamarium.quant.packed import LinearPacked
from llamarium.quant.tiles import values_of
from llamarium.quantization.fit import check_format, check_values, fit_groups, nearest_codes

DAMPING = 0.01
"""What is added to G's diagonal, as a share of its mean; the paper's 1 %."""

_MOST_DAMPING = 1.0


def gptq(weight: Tensor, gram: Tensor, format: PackedFormat, *, damping: float = DAMPING) -> LinearPacked:
    """Quantize a weight for given inputs.

    Args:
        weight: Floating point, (out, in); `in` a multiple of 32.
        gram: X^T X of its inputs, (in, in), of any scale.
        format: One of `fit.FITTED_FORMATS`.
        damping: Share of the diagonal's mean that is added to it; increased tenfold, up to 1, until it inverts.

    Raises:
        OptionError: For another format, rows that are no multiple of 32, or an invalid gram.
        CheckpointError: If weights are NaN, infinite, or too large for float16 scales.
    """
    check_format(format, weight.shape[1])
    check_values(weight)
    factor = inverse_factor(_check_gram(gram, weight.shape[1]).to(weight.device), damping)
    left = weight.detach().to(torch.float32, copy=True)  # what the columns still have to stand for
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales: list[Tensor] = []
    minima: list[Tensor] = []
    for start in range(0, weight.shape[1], GROUP):
        stop = start + GROUP
        corner = factor[start:stop, start:stop]
        costs = corner.diagonal().pow(-2).expand(len(left), GROUP)
        _, scale, minimum = fit_groups(left[:, start:stop].contiguous(), costs, format)
        errors = _round_columns(left[:, start:stop], codes[:, start:stop], scale, minimum, format, corner)
        left[:, stop:] -= errors @ factor[start:stop, stop:]
        scales.append(scale)
        minima += [] if minimum is None else [minimum]
    minimum = torch.cat(minima, dim=1) if minima else None
    return LinearPacked.from_codes(codes, torch.cat(scales, dim=1), format, minimum)


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """Return U, upper triangular, with U^T U the inverse of the damped gram: (in, in) float32; OptionError if none."""
    gram = gram.float().clone()
    diagonal = gram.diagonal()
    diagonal[diagonal == 0] = 1  # a column without input: any positive number leaves it to itself
    mean = float(diagonal.mean())  # sync: once a weight
    while True:
        damped = gram + damping * mean * torch.eye(len(gram), device=gram.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        if damping >= _MOST_DAMPING:
            raise OptionError(
                f"the inputs' X^T X ({len(gram)} columns) cannot be inverted, even with its diagonal doubled; "
                "use more text to calibrate, or the method importance"
            )
        damping = min(10 * damping, _MOST_DAMPING)


def _round_columns(
    left: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor | None, format: PackedFormat, corner: Tensor
) -> Tensor:
    """Round a group's columns one by one into `codes`; return the errors, (out, 32), for later groups to compensate.

    Args:
        left: (out, 32), changed in place: each column's weights as moved so far.
        codes: (out, 32), filled.
        scale: float16, (out, 1), as `minimum`.
        minimum: None where the format has none.
        format: Of the codes.
        corner: (32, 32), the group's part of U.
    """
    errors = torch.empty_like(left)
    for j in range(GROUP):
        column = left[:, j : j + 1]
        codes[:, j : j + 1] = nearest_codes(column, scale, minimum, format)
        rounded = values_of(codes[:, j : j + 1], format) * scale.float()
        rounded = rounded if minimum is None else rounded + minimum.float()
        errors[:, j : j + 1] = (column - rounded) / corner[j, j]
        left[:, j + 1 :] -= errors[:, j : j + 1] * corner[j, j + 1 :]
    return errors


def _check_gram(gram: Tensor, num_columns: int) -> Tensor:
    if gram.shape != (num_columns, num_columns):
        raise OptionError(f"gram has shape {tuple(gram.shape)}; expected ({num_columns}, {num_columns})")
    if not bool(gram.isfinite().all()):
        raise OptionError("gram has values that are NaN or infinite; expected X^T X of finite inputs")
    return gram
