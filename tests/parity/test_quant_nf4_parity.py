"""NF4 against bitsandbytes on the CPU: byte for byte both ways."""

import bitsandbytes.functional as bnb
import pytest
import torch

from llamarium.quant.codes import dynamic_map
from llamarium.quant.nf4 import NF4_LEVELS, Linear4bit, quantize_nf4
from llamarium.quant.nf4_state import STATE_KEY
from nf4_components import components_of, dequantize_nf4

pytestmark = pytest.mark.torch

SHAPES = [(64, 64), (3, 64), (5, 7), (100, 100), (257, 192), (512, 512), (1, 1), (33, 130)]
KINDS = ["normal", "tiny", "subnormal", "zeros", "some zero blocks", "ties", "outliers"]


def make(shape, kind, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed + 31 * shape[0] + shape[1])
    weight = torch.randn(shape, generator=rng) * 0.02
    if kind == "tiny":
        weight *= 1e-5
    elif kind == "subnormal":
        weight *= 1e-37
    elif kind == "zeros":
        weight.zero_()
    elif kind == "some zero blocks":
        weight[: shape[0] // 2] = 0
    elif kind == "ties":
        weight = torch.randint(-8, 9, shape, generator=rng).float() / 8
    elif kind == "outliers":
        weight.flatten()[::97] *= 100
    return weight.to(dtype)


def test_the_maps_are_theirs():
    assert torch.equal(NF4_LEVELS, bnb.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(torch.from_numpy(dynamic_map()), bnb.create_dynamic_map())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_is_byte_exact(kind, dtype):
    for shape in SHAPES:
        weight = make(shape, kind, dtype)
        codes, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=False)
        ours = quantize_nf4(weight, double_quant=False)
        assert torch.equal(ours.codes, codes) and torch.equal(ours.absmax, state.absmax), shape
        assert ours.nested is None
        codes, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
        ours = quantize_nf4(weight)
        assert torch.equal(ours.codes, codes) and torch.equal(ours.absmax, state.absmax), shape
        assert torch.equal(ours.nested.absmax, state.state2.absmax), shape
        assert torch.equal(ours.nested.quant_map, state.state2.code)
        assert torch.equal(ours.nested.offset, state.offset), shape


def test_nested_codes_over_many_scales():
    """Their table of 65,536 entries decides differently from the nearest level once in some 10,000 scales."""
    for seed in range(3):
        weight = make((4096, 512), "normal", torch.float32, seed)
        _, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        assert torch.equal(quantize_nf4(weight).absmax, state.absmax)


def test_short_last_blocks():
    """They are divided by their absmax, whole blocks are multiplied by its inverse; now and then a code differs."""
    midpoints = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / 2
    for size in range(17, 64):
        weight = make((1, size), "normal", torch.float32)
        weight[0, :15] = midpoints * weight.abs().max()
        codes, _ = bnb.quantize_4bit(weight, quant_type="nf4")
        assert torch.equal(quantize_nf4(weight).codes, codes), size


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("kind", ["normal", "tiny", "zeros", "outliers"])
def test_dequantize_is_bit_exact(kind, double_quant):
    for shape in SHAPES:
        weight = make(shape, kind, torch.float32)
        codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=double_quant)
        theirs = bnb.dequantize_4bit(codes, state).view(shape)
        ours = dequantize_nf4(quantize_nf4(weight, double_quant=double_quant), shape)
        assert torch.equal(ours, theirs), shape


@pytest.mark.parametrize("block_size", [32, 128, 1024])
def test_other_block_sizes(block_size):
    # Rows are whole blocks: where they are not, their AVX-512 kernel scales with a neighbour's absmax.
    weight = make((6, 1024), "normal", torch.float32)
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=block_size, compress_statistics=True)
    ours = quantize_nf4(weight, block_size=block_size)
    assert torch.equal(ours.codes, codes) and torch.equal(ours.absmax, state.absmax)
    theirs = bnb.dequantize_4bit(codes, state)
    assert torch.equal(dequantize_nf4(ours, weight.shape, block_size=block_size), theirs)
    linear = Linear4bit.from_state(saved(codes, state), "file")
    assert torch.equal(linear.dequantize(), theirs)


def saved(codes, state):
    """The components as bitsandbytes puts them into a state dict."""
    return {"weight": codes, **{f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}}


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_saved_components_are_theirs_both_ways(dtype, double_quant):
    for shape in [(64, 64), (5, 7), (100, 100)]:
        weight = make(shape, "normal", dtype)
        theirs = saved(*bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=double_quant))
        for linear in (
            Linear4bit.from_weight(weight, double_quant=double_quant),
            Linear4bit.from_state(theirs, "file"),
        ):
            ours = components_of(linear)
            assert list(map(str, sorted(ours))) == sorted(theirs)
            for name, value in theirs.items():
                assert torch.equal(ours[name], value), name
                assert ours[name].dtype == value.dtype
            assert (linear.out_features, linear.in_features) == shape
            state = bnb.QuantState.from_dict(
                {k.removeprefix("weight."): v for k, v in ours.items() if k != "weight"}, "cpu"
            )
            expected = bnb.dequantize_4bit(ours["weight"], state).view(shape)
            assert torch.equal(linear.dequantize(dtype), expected)
    assert STATE_KEY in theirs


def test_product_is_theirs():
    """The Linear itself against bitsandbytes' on the CPU."""
    weight, x = make((96, 128), "normal", torch.float32), torch.randn(2, 5, 128)
    codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    theirs = x @ bnb.dequantize_4bit(codes, state).T
    torch.testing.assert_close(Linear4bit.from_weight(weight)(x), theirs)
