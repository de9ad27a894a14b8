"""Quantizing while a model is loaded: every type, with and without kernels and PyTorch, and widths that do not fit."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

import llamarium
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.forms import loading_plan
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.values import values
from llamarium.checkpoints.weights import native_weights
from llamarium.errors import CheckpointError, OptionError
from llamarium.kernels import native
from llamarium.options.loading import LoadOptions
from llamarium.quant.codes import codes_of_blocks
from llamarium.quant.formats import ENCODED, METHODS, PACKED_FORMATS, quantized_type
from llamarium.quant.ggml.encode import _ENCODERS, encode  # pyright: ignore[reportPrivateUsage]
from llamarium.quant.ggml.linear import LinearGGML
from llamarium.quant.packed import LinearPacked
from llamarium.quant.packing import dequantize
from llamarium.runtime.native.runner import NativeRunner
from llamarium.train.config import QuantizeName

pytestmark = pytest.mark.torch

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
IN_C = [name for name in METHODS if name in PACKED_FORMATS]
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def wide(model_files: Callable[..., Any]) -> Path:
    """A model in bfloat16 whose rows are whole blocks of every type."""
    return model_files(**WIDE).huggingface()


def test_the_types_are_those_that_are_made_and_multiplied() -> None:
    assert set(ENCODED) == set(_ENCODERS)
    assert ("none", *METHODS) == get_args(QuantizeName)


@pytest.mark.parametrize("method", IN_C)
def test_tiles_hold_what_the_encoder_makes(method: str, wide: Path) -> None:
    checkpoint = open_checkpoint(wide)
    weights = native_weights(checkpoint, LoadOptions(device="cpu", quantize=method))
    assert weights is not None
    for key, weight in weights.items():
        if "proj" not in key:
            assert weight.type_name == "BF16", key
            continue
        original = read(checkpoint, key).float().numpy()
        blocks = encode(original, method)
        expected = dequantize(method, weight.shape, blocks)
        assert weight.type_name == method and weight.data.ndim == 3
        assert np.array_equal(dequantize(method, weight.shape, weight.data), expected), key
        assert np.array_equal(codes_of_blocks(blocks, method).values_RC, expected), key
    llama = llamarium.load(wide, device="cpu", quantize=method.lower())
    assert isinstance(llama.runner, NativeRunner)
    linear = llama.model.model.layers[0].self_attn.q_proj
    assert isinstance(linear, LinearPacked) and linear.weight.data_ptr() == llama.runner.weights[Q].data.ctypes.data
    assert {source.dtype for source in llama.sources if "proj" in source.key} == {method}


@pytest.mark.parametrize("method", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_the_error_is_that_of_gguf_quants(method: str, wide: Path) -> None:
    checkpoint = open_checkpoint(wide)
    weights = native_weights(checkpoint, LoadOptions(device="cpu", quantize=method))
    assert weights is not None
    original = read(checkpoint, Q).float().numpy()
    kind = GGMLQuantizationType[method]
    expected = quants.dequantize(quants.quantize(original, kind), kind)
    assert np.array_equal(dequantize(method, original.shape, weights[Q].data), expected)


@pytest.mark.parametrize(
    ("method", "columns", "expected"),
    [
        ("Q4_K", 512, "Q4_K"), ("Q4_K", 576, "Q5_0"), ("Q5_K", 576, "Q8_0"), ("Q6_K", 96, "Q8_0"), ("Q4_K", 100, None),
        ("Q8_0", 96, "Q8_0"), ("Q8_0", 40, None), ("IQ4_NL", 48, None), ("NF4", 7, "NF4"),
    ],
)  # fmt: skip
def test_the_type_of_a_width(method: str, columns: int, expected: str | None) -> None:
    assert quantized_type(method, columns) == expected
    if expected is not None and expected != "NF4":
        assert PACKED_FORMATS[expected].bits_per_weight >= PACKED_FORMATS[method].bits_per_weight


def test_widths_that_do_not_fit_are_named_once(model_files: Callable[..., Any]) -> None:
    """128 columns are Q5_0, 208 stay in bfloat16; all of it in C."""
    folder = model_files(intermediate_size=208).huggingface()
    with pytest.warns(UserWarning, match=r"2 Linears are BF16 instead.*12 Linears are Q5_0 instead") as warned:
        llama = llamarium.load(folder, device="cpu", quantize="Q4_K")
    assert len(warned) == 1 and isinstance(llama.runner, NativeRunner)
    types = {source.key: source.dtype for source in llama.sources}
    assert types[Q] == "Q5_0" and types["model.layers.1.mlp.down_proj.weight"] == "BF16"


@pytest.mark.parametrize("method", ["Q4_0", "Q6_K"])
def test_one_set_of_numbers_with_and_without_the_kernels(
    method: str, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_tiles = load_model(open_checkpoint(wide), LoadOptions(device="cpu", quantize=method, join=False))[0]
    monkeypatch.setattr(native, "library", lambda: None)
    in_blocks = load_model(open_checkpoint(wide), LoadOptions(device="cpu", quantize=method))[0]
    one, other = (model.model.layers[1].mlp.down_proj for model in (in_tiles, in_blocks))
    assert isinstance(one, LinearPacked) and not one.uses_kernels and isinstance(other, LinearGGML)
    assert torch.equal(one.dequantize(), other.dequantize())
    x = torch.randn(3, 512, requires_grad=True)
    gradients = [torch.autograd.grad(linear(x).pow(2).sum(), x)[0] for linear in (one, other)]
    torch.testing.assert_close(*gradients)


def test_a_quantized_file_is_quantized_anew_from_its_values(model_files: Callable[..., Any]) -> None:
    path = model_files().gguf_file("Q8_0")
    with pytest.raises(OptionError, match="quantized already"):
        llamarium.load(path, device="cpu", quantize="Q4_0")
    checkpoint = open_checkpoint(path)
    weights = native_weights(checkpoint, LoadOptions(device="cpu", quantize="Q4_0", dequantize="load"))
    assert weights is not None and weights[Q].type_name == "Q4_0"
    expected = dequantize("Q4_0", (128, 128), encode(values(checkpoint.stored(Q)), "Q4_0"))
    assert np.array_equal(dequantize("Q4_0", (128, 128), weights[Q].data), expected)


def test_exact_products_are_not_left_to_the_kernels(wide: Path) -> None:
    checkpoint = open_checkpoint(wide)
    assert loading_plan(checkpoint, LoadOptions(device="cpu", quantize="Q8_0")).runs_in_c
    assert not loading_plan(checkpoint, LoadOptions(device="cpu", quantize="Q8_0", dtype="float32")).runs_in_c
    assert not loading_plan(checkpoint, LoadOptions(device="cpu", quantize="NF4")).runs_in_c
    model = load_model(checkpoint, LoadOptions(device="cpu", quantize="Q8_0", dtype="float32"))[0]
    linear, x = model.model.layers[0].mlp.up_proj, torch.randn(2, 256)
    torch.testing.assert_close(linear(x), x @ linear.dequantize().T)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("method", ["Q8_0", "Q4_K", "IQ4_NL", "NF4"])
def test_weights_that_are_not_finite_are_reported_before_they_are_rounded_away(
    method: str, model_files: Callable[..., Any]
) -> None:
    files = model_files(**WIDE)
    files.weights[Q][3, 5] = float("nan")
    folder = files.huggingface()
    with pytest.warns(UserWarning, match=r"q_proj\.weight has 1 weights that are NaN"):
        llamarium.load(folder, device="cpu", quantize=method)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has 1 weights that are NaN"):
        llamarium.load(folder, device="cpu", quantize=method, strict=True)


def test_no_torch_is_needed(wide: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; import llamarium\n"
        "for method in sys.argv[2:]: print(type(llamarium.load(sys.argv[1], quantize=method).runner).__name__)"
    )
    found = subprocess.run([sys.executable, "-c", script, str(wide), *IN_C], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["NativeRunner"] * len(IN_C)


@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_values_are_those_of_the_module(double_quant: bool, model_files: Callable[..., Any]) -> None:
    """Also of rows that begin within a block, piece by piece."""
    folder, _ = model_files(intermediate_size=96, hidden_size=96).nf4(double_quant=double_quant)
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, LoadOptions(device="cpu"))[0]
    for key in (Q, "model.layers.1.mlp.down_proj.weight"):
        expected = model.get_submodule(key.removesuffix(".weight")).dequantize().numpy()  # pyright: ignore
        assert np.array_equal(values(checkpoint.stored(key)), expected), key
        assert np.array_equal(values(checkpoint.stored(key), slice(5, 12)), expected[5:12]), key


def test_nf4_dequantized_once_runs_in_c(model_files: Callable[..., Any]) -> None:
    folder, _ = model_files().nf4()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llama = llamarium.load(folder, device="cpu", dequantize="load")
    assert isinstance(llama.runner, NativeRunner) and {source.dtype for source in llama.sources} == {"BF16"}
