"""Float32 products by oneDNN, where PyTorch's are slow: their values and gradients, and what is left alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeness import assert_close_to_reference, reference_of
from llamarium.kernels import cpu_float32, native
from llamarium.kernels.cpu_float32 import linear
from llamarium.kernels.cpu_training import Replaced

pytestmark = pytest.mark.torch

needs_onednn = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="no oneDNN")


def with_gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    out = F.linear(x, weight)
    return out.detach(), *torch.autograd.grad(out, (x, weight), grad)  # pyright: ignore[reportReturnType]


@needs_onednn
@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("shape", [(2, 7), (40,)])
def test_products_and_gradients_are_close_to_float64s(
    shape: tuple[int, ...], in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(*shape, width, generator=generator) for width in (24, 56))
    weight = torch.randn(56, 24, generator=generator)
    plain = with_gradients(x, weight, grad)
    called: list[int] = []
    multiply: Callable[[Tensor, Tensor], Tensor] = cpu_float32.multiply
    monkeypatch.setattr(cpu_float32, "multiply", lambda *given: called.append(1) or multiply(*given))
    with Replaced({F.linear: partial(linear, in_c=in_c)}):
        ours = with_gradients(x, weight, grad)
    assert len(called) == 3 - (in_c and native.library() is not None)
    for i in range(3):
        reference = reference_of(lambda *given, i=i: with_gradients(*given)[i], x, weight, grad)
        assert_close_to_reference(ours[i], plain[i], reference)


@needs_onednn
def test_other_dtypes_biases_and_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x, frozen = torch.randn(3, 8, requires_grad=True), nn.Linear(8, 8, bias=False).requires_grad_(False)
    with Replaced({F.linear: linear}):
        frozen(x).sum().backward()
        assert frozen.weight.grad is None and x.grad is not None
        monkeypatch.setattr(cpu_float32, "multiply", pytest.fail)
        assert F.linear(x.double(), frozen.weight.double()).dtype == torch.float64
        assert nn.Linear(8, 8)(x).shape == (3, 8)
