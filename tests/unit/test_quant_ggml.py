"""Packed blocks as modules, and what malformed blocks get."""

import copy

import pytest
import torch
import torch.nn.functional as F

from llamarium.errors import CheckpointError, OptionError, UnsupportedFormatError
from llamarium.quant import base
from llamarium.quant.formats import GGML_TYPES
from llamarium.quant.ggml import decode as ggml_decode
from llamarium.quant.ggml.blocks import dequantize
from llamarium.quant.ggml.linear import EmbeddingGGML, LinearGGML
from reference_tiles import quantize

pytestmark = pytest.mark.torch

# Levels of a code, and the share of a step that a weight may be off before the scales are rounded.
STEPS = {"Q8_0": (127, 0.5), "Q4_0": (8, 1.0), "Q5_0": (16, 1.0), "Q4_1": (15, 0.5), "Q5_1": (31, 0.5)}


def random_weight(rows=48, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("name", STEPS)
def test_error_stays_within_the_step(name):
    """|w - w'| is at most the documented share of the block's step, and what half-precision scales add."""
    weight = random_weight(rows=400)
    blocks = weight.view(-1, 32)
    levels, share = STEPS[name]
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    size = (high - low) if name.endswith("1") else blocks.abs().amax(-1, keepdim=True)
    error = (dequantize(quantize(weight, name), name).view(-1, 32) - blocks).abs()
    rounding = 2**-10 * blocks.abs().amax(-1, keepdim=True)
    assert (error <= share * size / levels + rounding).all()
    assert (error > 0.3 * share * size / levels).any()  # the bound is no looser than it has to be


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_floats_survive(name):
    weight = random_weight().bfloat16().half()  # exact in all three
    assert torch.equal(dequantize(quantize(weight, name), name, torch.float16), weight)


def test_result_is_rounded_once():
    packed = quantize(random_weight(), "Q4_1")
    assert torch.equal(dequantize(packed, "Q4_1", torch.bfloat16), dequantize(packed, "Q4_1").bfloat16())


def test_out_is_written_in_its_own_dtype():
    packed, out = quantize(random_weight(), "Q8_0"), torch.empty(48, 64, dtype=torch.float16)
    assert dequantize(packed, "Q8_0", out=out) is out
    assert torch.equal(out, dequantize(packed, "Q8_0", torch.float16))


def test_unaligned_bytes():
    """A private map of a file hands out slices that start anywhere."""
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1"):
        packed = quantize(random_weight(), name)
        shifted = torch.zeros(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape).copy_(packed)
        assert torch.equal(dequantize(shifted, name), dequantize(packed, name))


def test_no_rows():
    for name, block in GGML_TYPES.items():
        assert dequantize(torch.empty(0, block.block_bytes, dtype=torch.uint8), name).shape == (0, block.block_size)


def test_refusals():
    with pytest.raises(UnsupportedFormatError, match=r"TQ2_0 is not read; supported are F32, F16"):
        dequantize(torch.zeros(1, 66, dtype=torch.uint8), "TQ2_0")
    with pytest.raises(UnsupportedFormatError, match=r"\\x1b"):
        quantize(torch.zeros(1, 32), "\x1b[2J")
    with pytest.raises(OptionError, match="Q2_K is read but not written; expected one of F32"):
        quantize(torch.zeros(1, 256), "Q2_K")
    with pytest.raises(CheckpointError, match=r"19 bytes cannot be Q4_0; expected a multiple of 18"):
        dequantize(torch.zeros(2, 19, dtype=torch.uint8), "Q4_0")
    with pytest.raises(CheckpointError, match=r"40 weights cannot be Q8_0; expected a multiple of 32"):
        quantize(torch.zeros(1, 40), "Q8_0")
    with pytest.raises(CheckpointError, match=r"torch.float32 \(2, 18\); expected rows of uint8"):
        dequantize(torch.zeros(2, 18), "Q4_0")
    with pytest.raises(CheckpointError, match=r"torch.uint8 \(18,\); expected uint8 \(rows, row_bytes\)"):
        LinearGGML(torch.zeros(18, dtype=torch.uint8), "Q4_0")


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 5), (0,)])
def test_linear_is_the_product_with_the_dequantized_weight(name, lead):
    linear = LinearGGML(quantize(random_weight(), name), name)
    x = torch.randn(*lead, 64)
    assert torch.equal(linear(x), F.linear(x, linear.dequantize()))
    assert linear(x).shape == (*lead, 48)


def test_row_chunks_change_nothing_and_bound_memory(monkeypatch):
    linear, x = LinearGGML(quantize(random_weight(), "Q4_1"), "Q4_1"), torch.randn(4, 64, requires_grad=True)
    whole = linear(x)
    (whole_grad,) = torch.autograd.grad(whole.square().sum(), x)
    monkeypatch.setattr(base, "_CHUNK_WEIGHTS", 5 * 64)
    seen = []
    monkeypatch.setattr(
        linear, "dequantize_rows", lambda a, b, d: seen.append(b - a) or LinearGGML.dequantize_rows(linear, a, b, d)
    )
    chunked = linear(x)
    torch.testing.assert_close(chunked, whole)
    (grad,) = torch.autograd.grad(chunked.square().sum(), x)
    torch.testing.assert_close(grad, whole_grad)
    assert seen == [5] * 9 + [3] + [5] * 9 + [3]


def test_gradient_is_that_of_the_dequantized_weight():
    linear = LinearGGML(quantize(random_weight(), "Q5_1"), "Q5_1")
    x = torch.randn(2, 3, 64, requires_grad=True)
    (ours,) = torch.autograd.grad(linear(x).pow(2).sum(), x)
    (theirs,) = torch.autograd.grad(F.linear(x, linear.dequantize()).pow(2).sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_nothing_dequantized_is_kept_for_the_backward_pass():
    linear = LinearGGML(quantize(random_weight(), "Q8_0"), "Q8_0")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(torch.randn(2, 64, requires_grad=True))
    assert kept == []


def test_embedding_looks_up_rows():
    table = EmbeddingGGML(quantize(random_weight(), "Q8_0"), "Q8_0", torch.bfloat16)
    ids = torch.tensor([[0, 47, 3], [3, 3, 1]])
    assert torch.equal(table(ids), F.embedding(ids, table.dequantize(torch.bfloat16)))


def test_embedding_dequantizes_only_what_is_looked_up(monkeypatch):
    table, seen = EmbeddingGGML(quantize(random_weight(), "Q8_0"), "Q8_0"), []
    decode = ggml_decode._DECODERS["Q8_0"]
    monkeypatch.setitem(
        ggml_decode._DECODERS, "Q8_0", lambda xp, blocks: seen.append(len(blocks)) or decode(xp, blocks)
    )
    table(torch.tensor([5, 6]))
    assert seen == [4]  # two rows of two blocks


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        packed = quantize(random_weight(), "Q8_0")
        self.embed_tokens = EmbeddingGGML(packed, "Q8_0")
        self.lm_head = LinearGGML(packed, "Q8_0")


def is_tied(model):
    return model.embed_tokens.weight is model.lm_head.weight


def test_a_tied_head_stays_tied():
    model = Tied()
    assert is_tied(model)
    assert is_tied(copy.deepcopy(model))
    assert copy.deepcopy(model).lm_head.weight is not model.lm_head.weight
    assert is_tied(model.to(torch.bfloat16))
    # A move between devices hands every buffer to a function that returns a new tensor.
    before = model.lm_head.weight.clone()
    assert is_tied(model._apply(lambda t: t.clone()))
    assert torch.equal(model.lm_head.weight, before)


def test_casting_the_model_leaves_the_bytes_and_casts_the_vectors():
    model, before = Tied(), Tied()
    model.to(torch.bfloat16)
    assert torch.equal(model.lm_head.weight, before.lm_head.weight)
    assert model.embed_tokens(torch.tensor([1])).dtype == torch.bfloat16


def test_state_dict_round_trips_and_has_no_parameters():
    model, other = Tied(), Tied()
    other.embed_tokens.weight.zero_()
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other.embed_tokens.weight, model.embed_tokens.weight)
    assert set(model.state_dict()) == {"embed_tokens.weight", "lm_head.weight"}
    assert list(model.parameters()) == []


def test_meta_device():
    linear = LinearGGML(torch.empty(48, 40, dtype=torch.uint8, device="meta"), "Q4_1")
    assert (linear.in_features, linear.out_features, linear.bias) == (64, 48, None)
    assert linear(torch.empty(2, 64, device="meta")).shape == (2, 48)
    assert linear.to("meta").weight.is_meta
    assert not linear.to_empty(device="cpu").weight.is_meta


def test_repr():
    model = Tied()
    assert repr(model.lm_head) == "LinearGGML(in_features=64, out_features=48, bias=False, type=Q8_0)"
    assert repr(model.embed_tokens) == "EmbeddingGGML(48, 64, type=Q8_0)"
