"""Attention in C over whole rows, forward and backward, held to float64 and to PyTorch's."""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import reference_of, roundings
from llamarium.attention import CausalAttend, TrainingAttend
from llamarium.attention.base import visible_in_row
from llamarium.attention.training import attend_rows, can_attend_rows
from llamarium.kernels import native
from llamarium.kernels.cpu_training import Replaced

pytestmark = pytest.mark.torch

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no kernels")
SHAPES = [(2, 5, 2, 1, 16), (4, 37, 4, 2, 32), (1, 160, 3, 3, 48), (1, 261, 4, 1, 64)]  # B, T, N, K, H
Grads = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Grads:
    """Queries, keys, values, and the gradient of the output."""
    rows, tokens, heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(rows, tokens, count, head_dim, generator=generator) for count in (heads, kv_heads, kv_heads, heads)
    )
    return (2 * q).to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype)


def with_gradients(attend: CausalAttend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Grads:
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(0, *leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)  # pyright: ignore[reportReturnType]


class Exact(CausalAttend):
    """The definition, in the inputs' own dtype: float64."""

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        groups = q_BTNH.shape[2] // k_BTKH.shape[2]
        visible = visible_in_row(q_BTNH.shape[1], self.segments_BT, self.bidirectional, q_BTNH.device, self.window)
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k_BTKH, v_BTKH))
        scores = torch.einsum("btnh,bsnh->bnts", q_BTNH, k) * q_BTNH.shape[-1] ** -0.5
        pattern = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
        return torch.einsum("bnts,bsnh->btnh", pattern, v)


def nth_of_exact(i: int, how: dict[str, Any], *given: Tensor) -> Tensor:
    q, k, v, grad = given
    return with_gradients(Exact(**how), q, k, v, grad)[i]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("segmented", "bidirectional", "as_pass"), list(product([False, True], repeat=3)))
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_float64s(
    shape: Sequence[int], segmented: bool, bidirectional: bool, as_pass: bool, dtype: torch.dtype
) -> None:
    """Within three roundings, with documents of any lengths, and numbers of segments in no order.

    In the order of a pass, too, where there is one: a pass has no segments, is causal, and computes in float32.
    """
    given = inputs(shape, dtype)
    assert can_attend_rows(*given[:3])
    segments = None
    if segmented:
        segments = torch.randint(-2, 3, shape[:2], generator=torch.Generator().manual_seed(1)) * 2**20
        segments[0] = segments[0].sort().values
    how: dict[str, Any] = {"segments_BT": segments, "bidirectional": bidirectional}
    plain = with_gradients(TrainingAttend(**how), *given)
    with Replaced({attend_rows: partial(attend_rows, as_pass=as_pass)}):
        found = with_gradients(TrainingAttend(**how), *given)
    has_order = as_pass and not segmented and not bidirectional and dtype == torch.float32
    assert torch.equal(plain[0], found[0]) != has_order
    for i in range(4):
        reference = reference_of(partial(nth_of_exact, i, how), *given, dtype=dtype)
        assert found[i].dtype == dtype and roundings(found[i], reference) < 3


@needs_kernels
@pytest.mark.parametrize(("dtype", "as_pass"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize("window", [1, 2, 7, 32, 33, 100, 256, 299, 300])
def test_output_and_gradients_within_a_window_are_float64s(
    window: int, segmented: bool, as_pass: bool, dtype: torch.dtype
) -> None:
    """With windows that are shorter than a tile, that begin in another block of keys, and that hide a single pair."""
    given = inputs((1, 300, 2, 1, 32), dtype)
    segments = torch.tensor([[0] * 90 + [1] * 200 + [2] * 10]) if segmented else None
    how: dict[str, Any] = {"segments_BT": segments, "window": window}
    with Replaced({attend_rows: partial(attend_rows, as_pass=as_pass)}):
        found = with_gradients(TrainingAttend(**how), *given)
    for i in range(4):
        reference = reference_of(partial(nth_of_exact, i, how), *given, dtype=dtype)
        assert found[i].dtype == dtype and roundings(found[i], reference) < 3
    if window == 300:
        plain = with_gradients(TrainingAttend(segments_BT=segments), *given)
        assert as_pass or all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@needs_kernels
@pytest.mark.parametrize("as_pass", [False, True])
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("tokens", [33, 300])
def test_every_number_of_threads_and_every_run_gives_the_same_bits(
    tokens: int, window: int | None, rows: int, as_pass: bool
) -> None:
    """Also where a thread has one head of a group, as there are few groups."""
    given = inputs((rows, tokens, 4, 2, 32))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            with Replaced({attend_rows: partial(attend_rows, as_pass=as_pass)}):
                found.append(with_gradients(TrainingAttend(window=window), *given))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


SHARED = """
import os, torch
from llamarium.attention import TrainingAttend
torch.set_num_threads(3)
torch.randn(10**6).exp()
before, q = len(os.listdir("/proc/self/task")), torch.randn(1, 300, 4, 32)
TrainingAttend()(0, q.requires_grad_(), q, q).sum().backward()
print(before, len(os.listdir("/proc/self/task")))
"""


@needs_kernels
@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux", reason="other threads")
def test_pytorchs_own_threads_attend() -> None:
    """The pool's would find the cores taken by those, which spin for milliseconds."""
    said = subprocess.run([sys.executable, "-c", SHARED], check=True, capture_output=True, text=True, timeout=100)
    before, after = map(int, said.stdout.split())
    assert before == after >= 3


@needs_kernels
def test_a_gradient_that_is_copied_first_lives_while_it_is_read() -> None:
    q, k, v, _ = inputs((1, 1024, 8, 8, 64))
    ones = torch.ones(()).expand(q.shape)
    found, expected = (with_gradients(TrainingAttend(), q, k, v, grad) for grad in (ones, ones.contiguous()))
    assert all(map(torch.equal, found, expected))


@needs_kernels
def test_other_segments_have_no_gradient_at_all() -> None:
    q, k, v, grad = inputs((1, 200, 4, 2, 32))
    segments = torch.tensor([[0] * 90 + [1] * 70 + [0] * 40])
    grad[:, segments[0] == 0] = 0
    for found in with_gradients(TrainingAttend(segments_BT=segments), q, k, v, grad)[1:]:
        assert not found[:, segments[0] == 0].any() and found[:, segments[0] == 1].any()


@needs_kernels
def test_what_is_not_a_number_is_seen() -> None:
    q, k, v, _ = inputs((1, 40, 2, 2, 16))
    q[0, 20, 1, 3] = torch.nan
    out = TrainingAttend()(0, q, k, v)
    assert out[0, 20, 1].isnan().all() and out.isnan().sum() == 16


@needs_kernels
def test_no_matrix_of_tokens_by_tokens_is_kept() -> None:
    q, k, v, _ = inputs((1, 300, 2, 1, 16))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        TrainingAttend()(0, q.requires_grad_(), k, v)
    assert sum(kept) == 2 * q.numel() + k.numel() + v.numel() + 300 * 2


@needs_kernels
def test_under_autocast_it_computes_in_bfloat16_as_pytorchs_does() -> None:
    q, k, v, _ = inputs((1, 40, 2, 2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert TrainingAttend()(0, q, k, v.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("change", ["kernels", "head_dim", "dtype", "device"])
def test_what_the_kernels_do_not_take_is_pytorchs(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head_dim, dtype = 24 if change == "head_dim" else 32, torch.float64 if change == "dtype" else torch.float32
    q, k, v, _ = inputs((1, 20, 2, 1, head_dim), dtype)
    if change == "kernels":
        monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "attend_rows", pytest.fail)
    if change == "device":
        q, k, v = (x.to("meta") for x in (q, k, v))
    out = TrainingAttend()(0, q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype
    if change != "device":
        torch.testing.assert_close(out, Exact()(0, q, k, v), rtol=1.3e-6, atol=1e-5)


@needs_kernels
def test_segments_of_one_row_are_those_of_all_and_others_that_do_not_fit_are_refused() -> None:
    """C would read beyond them."""
    given, one = inputs((3, 37, 4, 2, 32)), torch.tensor([[0] * 20 + [1] * 17])
    found = with_gradients(TrainingAttend(segments_BT=one), *given)
    expected = with_gradients(TrainingAttend(segments_BT=one.repeat(3, 1)), *given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for wrong in (one[:, :36], one.repeat(2, 1)):
        with pytest.raises(RuntimeError, match="expand"):
            TrainingAttend(segments_BT=wrong)(0, *given[:3])
