"""The products in C against their definitions in PyTorch; which kernels are chosen, and their threads."""

import copy
import math
import platform
import threading
import time
from typing import Any

import pytest
import torch

from llamarium.errors import OptionError
from llamarium.kernels import native, structs, threads
from llamarium.kernels.native import InputBits
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.ggml.blocks import dequantize
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.quant.packing import count_nonfinite_tiles
from native_models import product
from reference_tiles import pack_ggml, packed_codes, parts, product_reference, quantize, quantize_inputs

pytestmark = [pytest.mark.torch, pytest.mark.alone]  # with as many threads as there are cores

GROUPED = [
    name for name, format in PACKED_FORMATS.items() if not format.is_super
]  # the K formats have tests of their own
SHAPES = [(16, 32, 1), (1, 32, 2), (65, 96, 3), (33, 64, 13), (160, 576, 9), (48, 2048, 17)]


def random_linear(name: str, rows: int, columns: int, seed: int = 0, extreme: bool = False) -> LinearPacked:
    generator = torch.Generator().manual_seed(seed)
    high = PACKED_FORMATS[name].num_levels
    codes = torch.randint(high, (rows, columns), generator=generator, dtype=torch.uint8)
    if extreme:
        codes = (codes % 2) * (high - 1)
    scale = torch.randn(rows, columns // 32, generator=generator).half()
    minimum = torch.randn(rows, columns // 32, generator=generator).half() if PACKED_FORMATS[name].has_minimum else None
    return packed_codes(codes, scale, PACKED_FORMATS[name], minimum)


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", GROUPED)
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_packing_loses_nothing(type_name: str, rows: int) -> None:
    source = "Q4_0" if type_name == "IQ4_NL" else type_name  # the same blocks; only the codes mean something else
    blocks = quantize(torch.randn(rows, 96), source)
    linear = pack_ggml(blocks, type_name)
    expected = dequantize(blocks, type_name)
    assert torch.equal(linear.dequantize(), expected)
    assert torch.equal(linear.dequantize_rows(rows // 2, rows, torch.float32), expected[rows // 2 :])
    assert linear.weight.numel() == -(-rows // 16) * 3 * PACKED_FORMATS[type_name].tile_bytes


# --- one product ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("bits", [8, 16])
def test_product_equals_its_definition(kernels: str, name: str, extreme: bool, bits: InputBits) -> None:
    for rows, columns, num_inputs in SHAPES:
        linear = random_linear(name, rows, columns, extreme=extreme)
        linear.input_bits = bits
        x = torch.randn(num_inputs, columns)
        if extreme:
            x = x.sign() * 3e4
        expected = product_reference(x, linear)
        # The integer parts are exact; what is left is the order in which the groups are added.
        largest = float(expected.abs().max())
        found = product(linear.matrix, x, bits)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("name", GROUPED)
def test_inputs_of_16_bits_are_a_hundred_times_nearer(kernels: str, name: str) -> None:
    linear, x = random_linear(name, 64, 512), torch.randn(9, 512)
    exact = x.double() @ linear.dequantize(torch.float64).T
    eight, sixteen = (
        float((product(linear.matrix, x, bits).double() - exact).norm() / exact.norm()) for bits in (8, 16)
    )
    assert 1e-3 < eight < 1e-2 and sixteen < eight / 100


@pytest.mark.parametrize("rows", [1, 3, 48, 65])
def test_a_product_of_bfloat16_equals_torchs(kernels: str, rows: int) -> None:
    weight, x = torch.randn(rows, 96).bfloat16(), torch.randn(70, 96)
    if kernels == "avx512_bf16":
        x = x.bfloat16().float()  # as it rounds them itself
    matrix = structs.CMatrix(structs.Kind.BF16, rows, 96, weight.data_ptr(), None)
    for count in (1, 3, 70):
        torch.testing.assert_close(product(matrix, x[:count]), x[:count] @ weight.float().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("bits", [8, 16])
def test_a_row_is_the_same_alone_among_others_and_on_any_number_of_threads(
    kernels: str, name: str, bits: InputBits, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = random_linear(name, 200, 608), torch.randn(70, 608)  # 19 groups, which no kernel takes in equal parts
    monkeypatch.setattr(native, "num_threads", lambda: 1)
    together = product(linear.matrix, x, bits)
    for count in (5, 11, 20, 55, 56):  # where kernels take another way, and where they share rows out unevenly
        assert torch.equal(product(linear.matrix, x[:count], bits), together[:count])
    for count in (2, 3, 7):
        monkeypatch.setattr(native, "num_threads", lambda count=count: count)
        assert torch.equal(product(linear.matrix, x, bits), together)
    alone = torch.cat([product(linear.matrix, row.unsqueeze(0), bits) for row in x])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("panels", [1, 2, 3, 5, 7, 36, 37])
def test_threads_share_any_number_of_panels(panels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = random_linear("Q4_0", 16 * panels - 3, 64), torch.randn(3, 64)
    expected, largest = product_reference(x, linear), float(linear.dequantize().abs().max())
    found = list[torch.Tensor]()
    for count in (1, 2, 3, 4):
        monkeypatch.setattr(native, "num_threads", lambda count=count: count)
        found.append(product(linear.matrix, x))
        assert torch.equal(found[-1], found[0])
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-4 * largest)


@pytest.mark.parametrize("bits", [8, 16])
def test_inputs_that_are_zero_or_not_finite(kernels: str, bits: InputBits) -> None:
    linear = random_linear("Q4_0", 16, 64)
    x = torch.randn(4, 64)
    x[0], x[1, 3], x[2, 40] = 0, float("nan"), float("inf")
    y = product(linear.matrix, x, bits)
    assert (y[0] == 0).all() and y[1:3].isnan().all() and y[3].isfinite().all()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("num_inputs", [20, 56])
def test_inputs_and_scales_of_any_size_have_the_same_product_alone_and_among_others(
    kernels: str, name: str, num_inputs: int
) -> None:
    """Many rows' scales are multiplied by adding exponents, which knows neither 0 nor NaN."""
    linear = random_linear(name, 32, 320)
    codes, _, minimum = parts(linear, torch.arange(32))
    scale = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-14), 65504.0]).repeat(64).view(32, 10).half()
    minimum = None if minimum is None else minimum.half()
    linear = packed_codes(codes.view(32, 320), scale, linear.format, minimum)
    x = torch.randn(num_inputs, 320)
    for row, exponent in enumerate((-149, -127, -107, -94, -50, 90)):
        x[row] *= 2.0**exponent
    x[6] = 2.0**120  # too large
    x[7, 0], x[8, 100], x[9], x[10, 3] = float("nan"), float("inf"), 0, 2.0**120
    together, alone = product(linear.matrix, x), torch.cat([product(linear.matrix, row.unsqueeze(0)) for row in x])
    assert torch.equal(together.isnan(), alone.isnan()) and torch.equal(together.nan_to_num(), alone.nan_to_num())
    assert together[6:9].isnan().all() and (together[9] == 0).all() and together[10:].isfinite().all()
    expected = product_reference(x, linear)
    size = expected[10:].abs().amax(1, keepdim=True)
    assert ((together - expected)[10:].abs() <= 1e-5 * size).all()


def test_scales_that_are_subnormal_infinite_or_nan(kernels: str) -> None:
    codes = torch.full((16, 32), 9, dtype=torch.uint8)
    scale = torch.tensor([2.0**-24, -(2.0**-15), 65504.0, float("inf"), float("nan"), 0.0]).half()
    linear = packed_codes(codes[:6], scale.unsqueeze(1), PACKED_FORMATS["Q4_0"])
    for count in (1, 20):
        y = product(linear.matrix, torch.full((count, 32), 127.0))
        torch.testing.assert_close(y[:, :3], (scale[:3].float() * 32 * 127).expand(count, 3))
        # With 16 bits the residual's 0 is multiplied with infinity too.
        assert not y[:, 3].isfinite().any() and y[:, 4].isnan().all() and (y[:, 5] == 0).all()
    finite = random_linear("Q4_1", 20, 32)
    assert count_nonfinite_tiles(linear.weight.numpy(), linear.format) > 0
    assert count_nonfinite_tiles(finite.weight.numpy(), finite.format) == 0


def test_rounding_of_inputs_is_the_definitions() -> None:
    x = torch.tensor([[*[0.0] * 20, 127.0, 0.5, 1.5, -2.5, 1000.4, 0.5, -384.0, -2.5, *[0.0] * 4]])
    codes, scale = quantize_inputs(x)
    assert scale.item() == 1.0, "the second largest four decide"
    assert codes[0, 0, 20:24].tolist() == [127, 0, 2, -2]  # ties to even
    assert codes[0, 0, 24:28].tolist() == [1000, 0, -383, -2], "-384 would have -128 for its low byte"
    assert (codes[0, 0, :20] == 0).all()


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(127.1, 1.125), (1.875 * 127, 1.875), (1.88 * 127, 2.0), (0.0, 2.0**-100), (2.0**118, math.nan)],
)
def test_scales_of_inputs_are_eighths_between_limits(largest: float, expected: float) -> None:
    codes, scale = quantize_inputs(torch.full((1, 32), largest))
    torch.testing.assert_close(scale, torch.full((1, 1), expected), rtol=0, atol=0, equal_nan=True)
    assert codes.max() <= 127


def test_an_outlier_leaves_the_others_as_they_are(kernels: str) -> None:
    linear, x = random_linear("Q4_1", 16, 64), torch.randn(1, 64)
    exact = linear.dequantize().double()
    errors = []
    for x[0, 5] in (1.0, 100.0):
        y = product(linear.matrix, x, 8).double()
        errors.append((y - x.double() @ exact.T).abs().max().item())
    assert errors[1] < 2 * errors[0]


def test_a_linear_serves_every_dtype_shape_and_gradient() -> None:
    linear = random_linear("Q4_1", 33, 64)
    x = torch.randn(2, 3, 64)
    assert linear(x).shape == (2, 3, 33) and linear(x.bfloat16()).dtype is torch.bfloat16
    assert torch.equal(linear(x), product(linear.matrix, x.view(6, 64)).view(2, 3, 33))
    wanted = x.clone().requires_grad_()
    linear(wanted).sum().backward()
    torch.testing.assert_close(wanted.grad, linear.dequantize().sum(0).expand_as(x))
    copied = copy.deepcopy(linear)
    linear.weight.zero_()
    assert not torch.equal(copied(x), linear(x)), "a copy multiplies with its own weight"


def test_an_embedding_looks_up_rows() -> None:
    linear = random_linear("Q8_0", 100, 64)
    table = EmbeddingPacked(linear, torch.float32)
    ids = torch.tensor([[0, 99, 17], [16, 15, 99]])
    assert torch.equal(table(ids), linear.dequantize()[ids])
    assert torch.equal(table(ids.int()), table(ids)) and table.linear is linear
    assert table.to(torch.bfloat16)(ids).dtype is torch.bfloat16
    for bad in (-1, 100):
        with pytest.raises(IndexError, match=r"expected 0\.\.99"):
            table(torch.tensor([bad]))


# --- choosing and threads ---------------------------------------------------------------------------------------------


FOREIGN = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon_i8mm"
CHOICES = [
    ("torch", None),
    ("avx9", "is 'avx9'; expected amx, avx512_bf16, avx512_vnni, avx_vnni"),
    (FOREIGN, f"is {FOREIGN}, which this machine cannot run"),
]


@pytest.mark.parametrize(("value", "said"), CHOICES)
def test_the_environment_chooses(value: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, value)
    choose = native.library.__wrapped__
    if said is None:
        assert choose() is None
    else:
        with pytest.raises(OptionError, match=said):
            choose()


def test_a_missing_or_foreign_library_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    choose = native.library.__wrapped__
    monkeypatch.setattr(native, "_FILE", tmp_path / "none.so")
    assert choose() is None
    (tmp_path / "junk.so").write_bytes(b"junk")
    monkeypatch.setattr(native, "_FILE", tmp_path / "junk.so")
    with pytest.warns(UserWarning, match=r"cannot be loaded: .*; install a C compiler"):
        assert choose() is None
    monkeypatch.undo()
    monkeypatch.setattr(native, "INTERFACE", 99)
    with pytest.warns(UserWarning, match="expected 99"):
        assert choose() is None


def test_the_kernels_have_torchs_threads_and_torch_one_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "allowed_cpus", lambda: 2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with threads.one_torch_thread():
            assert (torch.get_num_threads(), threads.num_threads()) == (1, 2)
            with threads.one_torch_thread():
                assert threads.num_threads() == 2
            assert (torch.get_num_threads(), threads.num_threads()) == (1, 2)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_sleep_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = random_linear("Q4_0", 64, 96), torch.randn(1, 96)
    monkeypatch.setattr(native, "num_threads", lambda: 3)
    product(linear.matrix, x)
    time.sleep(0.05)  # they wait for the next call for 3 ms
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


def test_callers_take_turns() -> None:
    """A product waits for those that were asked before it, and not for all that others ask for meanwhile."""
    num_others, num_waits = 6, 100
    x = torch.randn(64, 512).numpy()
    linear = pack_ggml(quantize(torch.randn(2048, 512), "Q4_1"), "Q4_1")
    counts, end = [0] * num_others, threading.Event()

    def multiply(place: int) -> None:
        while not end.is_set():
            native.product(linear.matrix, x)
            counts[place] += 1

    others = [threading.Thread(target=multiply, args=(place,)) for place in range(num_others)]
    for other in others:
        other.start()
    passed = []
    for _ in range(num_waits):
        before = sum(counts)
        native.product(linear.matrix, x[:1])
        passed.append(sum(counts) - before)
        time.sleep(0.001)
    end.set()
    for other in others:
        other.join()
    usual = sorted(passed)[num_waits * 9 // 10]  # of the rest the system had stopped the thread before it asked
    assert usual <= 2 * num_others, passed
