"""Linear4bit as a module, the promised error, and what malformed components get."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llamarium.errors import CheckpointError, LlamariumError, UnsupportedFormatError
from llamarium.kernels import cpu_half
from llamarium.quant import base
from llamarium.quant.nf4 import NF4_LEVELS, Linear4bit, quantize_nf4
from llamarium.quant.nf4_state import STATE_KEY, NF4Layout
from nf4_components import components_of, dequantize_nf4

pytestmark = pytest.mark.torch


def random_weight(rows=48, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def both(weight=None):
    weight = random_weight() if weight is None else weight
    return [Linear4bit.from_weight(weight, double_quant=double_quant) for double_quant in (False, True)]


def test_error_stays_within_half_a_gap():
    weight = random_weight(400)
    absmax = weight.view(-1, 64).abs().amax(-1, keepdim=True)
    error = (dequantize_nf4(quantize_nf4(weight, double_quant=False), weight.shape) - weight).abs().view(-1, 64)
    bound = NF4_LEVELS.diff().max() / 2
    assert 0.151 < bound < 0.152
    assert (error <= bound * absmax * (1 + 1e-6)).all()
    assert (error > 0.9 * bound * absmax).any()


def test_double_quantization_adds_little():
    weight = random_weight(400)
    flat, nested = (quantize_nf4(weight, double_quant=double_quant) for double_quant in (False, True))
    scales = flat.absmax
    added = dequantize_nf4(nested, weight.shape) - dequantize_nf4(flat, weight.shape)
    deviation = (scales - scales.mean()).abs().max()
    assert (added.abs() <= 0.008 * deviation).all()
    assert (added.abs() > 0.004 * deviation).any()


def test_a_block_with_nan_or_infinity_is_nan_and_no_other():
    for bad in (float("nan"), float("inf")):
        weight = random_weight()
        weight[3, 5] = bad
        back = dequantize_nf4(quantize_nf4(weight, double_quant=False), weight.shape)
        assert back[3].isnan().any() and back[[i for i in range(48) if i != 3]].isfinite().all()


@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 5), (0,)])
def test_linear_is_the_product_with_the_dequantized_weight(lead):
    for linear in both():
        x = torch.randn(*lead, 64)
        assert torch.equal(linear(x), F.linear(x, linear.dequantize()))


@pytest.mark.parametrize("shape", [(48, 64), (37, 52), (9, 7), (3, 200)])
def test_row_chunks_may_begin_within_a_block(monkeypatch, shape):
    for linear in both(random_weight(*shape)):
        whole, x = linear.dequantize(), torch.randn(4, shape[1])
        product = linear(x)
        monkeypatch.setattr(base, "_CHUNK_WEIGHTS", 2 * shape[1])
        assert torch.equal(linear.dequantize(), whole)
        torch.testing.assert_close(linear(x), product)
        monkeypatch.undo()


def test_rows_far_behind_use_their_own_nested_scale():
    weight = random_weight(600, 64) * torch.linspace(0.1, 10, 600).unsqueeze(-1)  # 600 scales: three nested blocks
    linear = Linear4bit.from_weight(weight)
    assert torch.equal(linear.dequantize_rows(520, 530, torch.float32), linear.dequantize()[520:530])


def test_gradient_is_that_of_the_dequantized_weight():
    for linear in both():
        x = torch.randn(2, 3, 64, requires_grad=True)
        (ours,) = torch.autograd.grad(linear(x).pow(2).sum(), x)
        (theirs,) = torch.autograd.grad(F.linear(x, linear.dequantize()).pow(2).sum(), x)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_native", [False, True])
def test_a_gradient_in_bfloat16_is_rounded_once(is_native, monkeypatch):
    """Whether or not the processor multiplies bfloat16: it differs from float64's by what bfloat16 cannot write."""
    monkeypatch.setattr(cpu_half, "cpu_has_native_bf16", lambda: is_native)
    linear = Linear4bit.from_weight(random_weight(600, 64))
    x = torch.randn(20, 64, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(20, 600, dtype=torch.bfloat16)
    products = {}
    matmul = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: products.setdefault(a.dtype, 0) or matmul(a, b))
    (ours,) = torch.autograd.grad(linear(x), x, grad)
    exact = matmul(grad.double(), linear.dequantize(torch.bfloat16).double())
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=2**-8 if is_native else 2**-12)
    assert ours.dtype == torch.bfloat16 and set(products) == {torch.bfloat16 if is_native else torch.float32}


def test_gradient_reaches_an_adapter_below():
    """What QLoRA needs: the frozen 4-bit Linear passes gradients on, and gets none itself."""
    linear, adapter = Linear4bit.from_weight(random_weight()), torch.nn.Linear(16, 64)
    linear(adapter(torch.randn(5, 16))).sum().backward()
    assert adapter.weight.grad is not None and adapter.weight.grad.abs().sum() > 0
    assert list(linear.parameters()) == []


def test_casting_the_model_leaves_the_scales():
    for linear in both():
        before = linear.dequantize()
        assert torch.equal(linear.to(torch.bfloat16).dequantize(), before)
        assert torch.equal(linear.half().dequantize(), before)


def test_state_dict_round_trips():
    for linear in both():
        double_quant = linear.nested_absmax is not None
        other = Linear4bit(64, 48, double_quant=double_quant)
        other.load_state_dict(linear.state_dict(), strict=True)
        assert torch.equal(other.dequantize(), linear.dequantize())
        assert torch.equal(copy.deepcopy(linear).dequantize(), linear.dequantize())
        meta = Linear4bit(64, 48, double_quant=double_quant, device="meta")
        meta.load_state_dict(linear.state_dict(), strict=True, assign=True)
        assert torch.equal(meta.dequantize(), linear.dequantize())


def test_meta_device():
    linear = Linear4bit(2048, 512, device="meta")
    assert repr(linear) == "Linear4bit(in_features=2048, out_features=512, bias=False)"
    assert linear(torch.empty(2, 2048, device="meta")).shape == (2, 512)
    assert {name: (b.dtype, b.shape) for name, b in linear.named_buffers()} == {
        "weight": (torch.uint8, (2**19, 1)),
        "absmax": (torch.uint8, (2**14,)),
        "nested_absmax": (torch.float32, (64,)),
        "nested_quant_map": (torch.float32, (256,)),
        "nested_offset": (torch.float32, ()),
    }
    assert all(buffer.is_meta for buffer in linear.buffers())


def components(double_quant=True):
    return components_of(Linear4bit.from_weight(random_weight(64, 65), double_quant=double_quant))


def with_fields(state, **changes):
    """The components with other fields in the JSON object; None removes one."""
    fields = {**json.loads(bytes(state[STATE_KEY].tolist())), **changes}
    fields = {name: value for name, value in fields.items() if value is not None}
    return {**state, STATE_KEY: torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)}


REFUSED_FIELDS = {
    "quant_type": ["int4", None, 4],
    "blocksize": [0, -64, 63, 64.0, True, "64", 2**70, None],
    "dtype": ["float64", "\x1b[2J", None, ["bfloat16"]],
    "shape": [[64], [64, 65, 1], [64, 0], [64, -65], [2**40, 65], [64, 65.0], [True, 65], "64x65", None,
              [64, 66], [63, 65]],
    "nested_blocksize": [0, 256.0, 128, 2**63, None],
    "nested_dtype": ["float16", None],
    "nested_offset": [float("nan"), float("inf"), "0", None, 1e300, True],
    "something_else": [1],
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_fields_that_are_refused(field):
    for value in REFUSED_FIELDS[field]:
        with pytest.raises(CheckpointError, match=r"^model.safetensors: q_proj: ") as caught:
            Linear4bit.from_state(with_fields(components(), **{field: value}), "model.safetensors: q_proj")
        assert "expected" in str(caught.value) and "\x1b" not in str(caught.value)


def test_codes_in_another_dtype_are_the_same_bytes():
    good = components()
    for dtype in (torch.bfloat16, torch.float16):
        held = Linear4bit.from_state({**good, "weight": good["weight"].view(-1).view(dtype)[:, None]}, "f")
        assert torch.equal(held.dequantize(), Linear4bit.from_state(good, "f").dequantize())


def test_fp4_is_named():
    with pytest.raises(UnsupportedFormatError, match="fp4; supported is nf4"):
        Linear4bit.from_state(with_fields(components(), quant_type="fp4"), "f")
    renamed = components()
    renamed["weight.quant_state.bitsandbytes__fp4"] = renamed.pop(STATE_KEY)
    with pytest.raises(UnsupportedFormatError, match="fp4; supported is nf4"):
        Linear4bit.from_state(renamed, "f")
    with pytest.raises(CheckpointError, match=r"4160 bytes of BF16; expected 2080 of U8"):
        Linear4bit.from_state({**components(), "weight": torch.zeros(2080, 1, dtype=torch.bfloat16)}, "f")


@pytest.mark.parametrize("double_quant", [False, True])
def test_components_that_are_missing_left_over_or_of_another_size(double_quant):
    good = components(double_quant)
    assert Linear4bit.from_state(good, "f").in_features == 65
    for name in good:
        with pytest.raises(CheckpointError, match=r"missing|list of components"):
            Linear4bit.from_state({k: v for k, v in good.items() if k != name}, "f")
    with pytest.raises(CheckpointError, match="list of components"):
        Linear4bit.from_state({**good, "weight.extra": torch.zeros(1)}, "f")
    for name in set(good) - {STATE_KEY}:
        for wrong in (good[name].flatten()[:-1], torch.cat([good[name].flatten()] * 2), good[name].to(torch.int32)):
            with pytest.raises(CheckpointError, match=f"f: {name} is .*; expected [0-9]+ of [FU]"):
                Linear4bit.from_state({**good, name: wrong}, "f")


def test_another_map_is_refused():
    for levels in (NF4_LEVELS.flip(0), NF4_LEVELS * 1.001, torch.full((16,), float("nan"))):
        with pytest.raises(CheckpointError, match="expected NF4's sixteen levels"):
            Linear4bit.from_state({**components(), "weight.quant_map": levels}, "f")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null", b'{"quant_type": "nf4"}'])
def test_json_that_is_none(raw):
    with pytest.raises(CheckpointError):
        NF4Layout.from_json(raw, "f")
    with pytest.raises(CheckpointError):
        Linear4bit.from_state({**components(), STATE_KEY: torch.tensor(list(raw), dtype=torch.uint8)}, "f")


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 10**6), byte=st.integers(0, 255), cut=st.booleans())
def test_mutated_json_is_refused_or_harmless(position, byte, cut):
    good = components()
    raw = bytearray(good[STATE_KEY].tolist())
    place = position % len(raw)
    raw[place:] = raw[place + 1 :] if cut else bytes([byte]) + raw[place + 1 :]
    try:
        linear = Linear4bit.from_state({**good, STATE_KEY: torch.tensor(list(raw), dtype=torch.uint8)}, "f")
    except LlamariumError as error:
        assert str(error).isprintable()
    else:
        assert linear.dequantize().shape == (linear.out_features, linear.in_features)
