"""How close two results of floating-point arithmetic have to be: as close as rounding explains, on any processor.

A tolerance that is written down as a number is what one machine happened to meet: in which order a product is summed
changes with the processor, the number of threads and the shape of a batch. What does not change is the result that
arithmetic without rounding would have. So both sides are held against a reference in float64, and how far they may be
from it is measured: by how far the reference moves when its inputs are rounded.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llamarium.quant.packed import LinearPacked

_DRAWS = 4  # of the inputs' roundings; the largest movement counts


@dataclass(frozen=True)
class Reference:
    """A result in float64.

    Attributes:
        values: (..., D) float64.
        ulp: (..., 1) float64, how far one rounding of every input and of the result moves a row's values, at most.
    """

    values: Tensor
    ulp: Tensor

    def __getitem__(self, rows: Any) -> "Reference":
        """Return some rows, by an index that leaves the last dimension alone."""
        return Reference(self.values[rows], self.ulp[rows])


def reference_of(f: Callable[..., Tensor], *inputs: Tensor, dtype: torch.dtype = torch.float32) -> Reference:
    """Compute `f(*inputs)` in float64, and how far rounding the inputs and the result to `dtype` moves it.

    Args:
        f: Of the inputs in float64, to float64 (..., D).
        inputs: Floating-point tensors.
        dtype: What is computed in beside the reference.
    """
    exact = [x.double() for x in inputs]
    values = f(*exact)
    assert values.dtype == torch.float64, "the reference is to be computed in float64"
    random = torch.Generator().manual_seed(0)
    moved = [(f(*[_rounded(x, dtype, random) for x in exact]) - values).abs() for _ in range(_DRAWS)]
    own = values.abs() * torch.finfo(dtype).eps / 2
    return Reference(values, (torch.stack(moved).amax(dim=0) + own).amax(dim=-1, keepdim=True))


def model_reference(model: nn.Module, *args: Tensor, dtype: torch.dtype = torch.float32) -> Reference:
    """Run a model in float64, and with all its weights rounded: what `model(*args)` is without rounding."""
    exact = copy.deepcopy(model).double()
    weights = {name: weight.detach().clone() for name, weight in exact.named_parameters()}

    def run(*values: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.func.functional_call(exact, dict(zip(weights, values, strict=True)), args)

    return reference_of(run, *weights.values(), dtype=dtype)


def assert_close_to_reference(a: Tensor, b: Tensor, reference: Reference, *, ulps: float = 8) -> None:
    """Expect `a` and `b` to be no further from the reference than `ulps` roundings move it.

    One rounding of each input and of the result is not all: products, partial sums and what lies between two products
    are rounded too, about as often again for each step of the computation, which add up as their root. Results that are
    right are one to three of them off; a wrong or missing term is hundreds.

    Args:
        a: As the reference's values, any dtype.
        b: The same.
        reference: From `reference_of` or `model_reference`.
        ulps: How many roundings are allowed.
    """
    for name, found in (("the first", a), ("the second", b)):
        assert found.shape == reference.values.shape, f"{name} is of shape {tuple(found.shape)}"
        off = float(((found.double() - reference.values).abs() / reference.ulp).nan_to_num(torch.inf).max())
        assert off <= ulps, f"{name} is {off:.1f} roundings off, {ulps} are allowed"


def roundings(found: Tensor, reference: Reference) -> float:
    """How far a tensor is from the reference, on the whole: in roundings of the inputs and of the result."""
    error = (found.double() - reference.values).square().mean()
    return float((error / reference.ulp.square().mean()).nan_to_num(0.0).sqrt())


def _rounded(x: Tensor, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Move each number up or down by as much as rounding to `dtype` can."""
    signs = torch.randint(0, 2, x.shape, generator=random).double() * 2 - 1
    return x * (1 + signs * torch.finfo(dtype).eps / 2)


def output_error(weight: Tensor, quantized: LinearPacked, gram: Tensor) -> float:
    """Return |X (W - Q)^T|^2 / |X W^T|^2, where X^T X is `gram`."""
    off = weight.double() - quantized.dequantize().double()
    gram = gram.double()
    return float(((off @ gram) * off).sum() / ((weight.double() @ gram) * weight.double()).sum())
