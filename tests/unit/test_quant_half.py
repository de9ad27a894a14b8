"""linear_half against F.linear in float64: every path, every dtype, and when it steps aside."""

import pytest
import torch
import torch.nn.functional as F

from llamarium.kernels import cpu_half
from llamarium.kernels.cpu_half import cpu_has_native_bf16, cpu_has_native_fp16, linear_half

pytestmark = pytest.mark.torch

DTYPES = [torch.bfloat16, torch.float16]
ROWS = [0, 1, 2, 3, 5, 15, 16, 17, 40]


@pytest.fixture(params=[False, True], ids=["emulated", "native"])
def native(request, monkeypatch):
    """Pretend either kind of CPU: both must give the same."""
    monkeypatch.setattr(cpu_half, "cpu_has_native_bf16", lambda: request.param)
    monkeypatch.setattr(cpu_half, "cpu_has_native_fp16", lambda: request.param)
    return request.param


def case(rows, dtype, out_features=70, in_features=96):
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, in_features, generator=rng).to(dtype)
    return x, (torch.randn(out_features, in_features, generator=rng) / 8).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_one_rounding_at_the_end(rows, dtype, native):
    """The error against float64 is that of rounding the result, and what float32 sums add."""
    x, weight = case(rows, dtype)
    with torch.no_grad():
        out = linear_half(x, weight)
    exact = F.linear(x.double(), weight.double())
    assert out.dtype == dtype and out.shape == exact.shape
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    sums = 96 * 2**-24 * F.linear(x.double().abs(), weight.double().abs())
    assert ((out.double() - exact).abs() <= rounding * 1.01 + sums).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_long_rows_do_not_lose_small_terms(rows, dtype, native):
    """A sum that a half-precision accumulator could not make: 4096 ones."""
    x, weight = torch.ones(rows, 4096, dtype=dtype), torch.ones(5, 4096, dtype=dtype)
    with torch.no_grad():
        assert (linear_half(x, weight) == 4096).all()


@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (2, 3), (4, 1, 9), (0,), (2, 0)])
def test_any_leading_dimensions(lead, native):
    x, weight = torch.randn(*lead, 96).bfloat16(), case(1, torch.bfloat16)[1]
    with torch.no_grad():
        torch.testing.assert_close(linear_half(x, weight), F.linear(x, weight))


def test_weights_of_many_chunks(monkeypatch, native):
    x, weight = case(20, torch.bfloat16)
    with torch.no_grad():
        whole = linear_half(x, weight)
        monkeypatch.setattr(cpu_half, "_CHUNK_WEIGHTS", 16 * 96)
        assert torch.equal(linear_half(x, weight), whole)


def test_strided_inputs(native):
    x, weight = case(20, torch.bfloat16, out_features=96)
    with torch.no_grad():
        torch.testing.assert_close(linear_half(x[::3], weight.T), F.linear(x[::3], weight.T))
        torch.testing.assert_close(linear_half(x[3], weight.T), F.linear(x[3], weight.T))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_gradients_are_those_of_linear(rows, native):
    x, weight = case(rows, torch.bfloat16)
    x.requires_grad_(), weight.requires_grad_()
    ours = torch.autograd.grad(linear_half(x, weight).float().pow(2).sum(), (x, weight))
    theirs = torch.autograd.grad(F.linear(x, weight).float().pow(2).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_no_float32_copy_is_kept_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(cpu_half, "cpu_has_native_bf16", lambda: False)
    x, weight = case(40, torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        linear_half(x.requires_grad_(), weight)
    assert set(kept) == {torch.bfloat16}


def test_float32_and_meta_are_left_to_torch(native):
    x, weight = torch.randn(40, 96), torch.randn(70, 96)
    assert torch.equal(linear_half(x, weight), F.linear(x, weight))
    x, weight = (torch.empty(n, 96, dtype=torch.bfloat16, device="meta") for n in (3, 70))
    assert linear_half(x, weight).shape == (3, 70)


def test_probes_answer():
    assert isinstance(cpu_has_native_bf16(), bool) and isinstance(cpu_has_native_fp16(), bool)
    # The probes are torch's own; if one is renamed, the answer would quietly become no.
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"):
        assert callable(getattr(torch.cpu, probe))


def test_the_fast_paths_are_taken_where_they_should(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_half, "cpu_has_native_bf16", lambda: False)
    converted = cpu_half._linear_converted
    monkeypatch.setattr(cpu_half, "_linear_converted", lambda x, w: calls.append(len(x)) or converted(x, w))
    with torch.no_grad():
        for rows in ROWS:
            linear_half(*case(rows, torch.bfloat16))
    assert calls == [rows for rows in ROWS if rows >= cpu_half._MIN_ROWS_TO_CONVERT]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_row_of_a_large_weight_goes_through_mv(dtype, monkeypatch):
    monkeypatch.setattr(cpu_half, "cpu_has_native_bf16", lambda: False)
    monkeypatch.setattr(cpu_half, "cpu_has_native_fp16", lambda: False)
    calls = []
    true = torch.mv
    monkeypatch.setattr(torch, "mv", lambda w, x: calls.append(w.shape) or true(w, x))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2048, 512, generator=generator).to(dtype)
    x = torch.randn(1, 1, 512, generator=generator).to(dtype)
    with torch.no_grad():
        out = linear_half(x, weight)
        linear_half(x, weight[:2047])
    assert calls == [(2048, 512)]
    assert out.shape == (1, 1, 2048)
    exact = F.linear(x.double(), weight.double())
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-2)
