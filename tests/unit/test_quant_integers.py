"""int8 and 4-bit groups: documented error, the Linear contract, odd rows."""

import copy

import pytest
import torch
import torch.nn.functional as F

from llamarium.errors import OptionError
from llamarium.quant import base
from llamarium.quant.formats import group_size
from llamarium.quant.linears import Linear8bit, LinearInt4

KINDS = [Linear8bit, LinearInt4]


def random_weight(rows=48, columns=256, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_int8_error_is_at_most_half_a_step():
    weight = random_weight()
    linear = Linear8bit.from_weight(weight)
    groups = weight.view(48, 8, 32)
    assert torch.equal(linear.scale, (groups.abs().amax(-1) / 127).half())
    error = (linear.dequantize() - weight).abs().view(48, 8, 32)
    scale = linear.scale.float().unsqueeze(-1)  # rounded to 11 bits: of the largest code, 127/2048 are lost at most
    assert (error <= scale * (0.5 + 127 / 2048)).all() and (error > 0.48 * scale).any()


def test_int4_error_is_at_most_half_a_step():
    weight = random_weight()
    linear = LinearInt4.from_weight(weight)
    groups = weight.view(48, 8, 32)
    assert torch.equal(linear.minimum, groups.amin(-1).half())
    assert torch.equal(linear.scale, ((groups.amax(-1) - groups.amin(-1)) / 15).half())
    error = (linear.dequantize() - weight).abs().view(48, 8, 32)
    step, minimum = linear.scale.float().unsqueeze(-1), linear.minimum.float().abs().unsqueeze(-1)
    assert (error <= step * (0.5 + 15 / 2048) + minimum / 2048).all() and (error > 0.48 * step).any()


def test_int4_order_of_codes():
    """Weight 2i lies in the low half of byte i."""
    linear = LinearInt4.from_weight(torch.arange(16.0).view(1, 16))
    assert linear.weight.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(linear.dequantize(), torch.arange(16.0).view(1, 16))


@pytest.mark.parametrize(("columns", "size"), [(2048, 32), (8192, 32), (576, 32), (352, 32), (11008, 32), (48, 16)])
def test_groups_fit_the_row(columns, size):
    assert group_size(columns, "Q4_1") == size
    assert LinearInt4.from_weight(random_weight(2, columns)).dequantize().shape == (2, columns)


@pytest.mark.parametrize("columns", [1, 7, 8, 100])
def test_int4_refuses_rows_without_groups(columns):
    with pytest.raises(OptionError, match=rf"multiple of 16, found {columns}; use Q8_0 or NF4"):
        LinearInt4.from_weight(random_weight(2, columns))


@pytest.mark.parametrize("kind", KINDS)
def test_odd_rows(kind):
    weight = random_weight(6)
    weight[0], weight[1], weight[2] = 0, 0.3, -0.3
    weight[3] *= 1e-38
    weight[4, ::2] = 0
    back = kind.from_weight(weight).dequantize()
    torch.testing.assert_close(back[:3], weight[:3], rtol=2**-11, atol=0)
    assert back.isfinite().all() and (back[3].abs() < 1e-36).all()
    assert not kind.from_weight(weight[:1]).weight.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_stays_visible(kind, bad):
    weight = random_weight()
    weight[3, 5] = bad
    back = kind.from_weight(weight).dequantize()
    assert not back[3].isfinite().all() and back[[i for i in range(48) if i != 3]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 5), (0,)])
def test_linear_is_the_product_with_the_dequantized_weight(kind, lead):
    linear, x = kind.from_weight(random_weight()), torch.randn(*lead, 256)
    assert torch.equal(linear(x), F.linear(x, linear.dequantize()))
    half = x.bfloat16()
    torch.testing.assert_close(linear(half), F.linear(half, linear.dequantize(torch.bfloat16)))


@pytest.mark.parametrize("kind", KINDS)
def test_row_chunks_change_nothing(kind, monkeypatch):
    weight = random_weight()
    linear, x = kind.from_weight(weight), torch.randn(4, 256)
    monkeypatch.setattr(base, "_CHUNK_WEIGHTS", 7 * 256)
    chunked = kind.from_weight(weight)
    assert all(torch.equal(a, b) for a, b in zip(chunked.buffers(), linear.buffers(), strict=True))
    torch.testing.assert_close(chunked(x), F.linear(x, linear.dequantize()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_dequantized_weight(kind):
    linear, x = kind.from_weight(random_weight()), torch.randn(2, 3, 256, requires_grad=True)
    (ours,) = torch.autograd.grad(linear(x).pow(2).sum(), x)
    (theirs,) = torch.autograd.grad(F.linear(x, linear.dequantize()).pow(2).sum(), x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_state_copies_and_casts(kind):
    linear, other = kind.from_weight(random_weight()), kind(256, 48)
    other.load_state_dict(linear.state_dict(), strict=True)
    before = linear.dequantize()
    assert torch.equal(other.dequantize(), before)
    assert torch.equal(copy.deepcopy(linear).to(torch.bfloat16).dequantize(), before)
    assert list(linear.parameters()) == [] and linear.bias is None
    assert repr(linear) == f"{kind.__name__}(in_features=256, out_features=48, bias=False)"
    assert kind(256, 48, device="meta")(torch.empty(2, 256, device="meta")).shape == (2, 48)


def test_bits_per_weight():
    sizes = [sum(b.nbytes for b in kind.from_weight(random_weight(64, 2048)).buffers()) for kind in KINDS]
    assert [8 * size / (64 * 2048) for size in sizes] == [8.5, 5]
