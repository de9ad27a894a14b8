"""Codes, scales and minimums of each type: what they mean is what the Linear multiplies with, to the bit."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import llamarium
from llamarium.errors import InputError, OptionError
from llamarium.inspect.measures.streams import stream_errors
from llamarium.inspect.probes.four_bits import coded_weights, rounded_inputs
from llamarium.model import LlamaForCausalLM
from llamarium.presets import preset
from llamarium.quant.formats import FORMATS, IQ4_NL_VALUES, METHODS, PACKED_FORMATS
from llamarium.quant.ggml.linear import LinearGGML
from llamarium.quant.linears import quantize_linear
from llamarium.quant.nf4 import NF4_LEVELS, Linear4bit
from llamarium.runtime.module_runner import ModuleRunner
from reference_tiles import pack_ggml, packed_codes, parts, quantize, quantize_inputs

pytestmark = pytest.mark.torch

ROWS = [3, -1, 17]


def weight(columns: int = 256) -> torch.Tensor:
    return torch.randn(40, columns, generator=torch.Generator().manual_seed(0)) * 0.1


UP = "model.layers.0.mlp.up_proj.weight"


def holding(linear: nn.Module) -> ModuleRunner:
    """The runner of a model one of whose Linears is this one."""
    model = LlamaForCausalLM(preset("tiny"))
    model.set_submodule("model.layers.0.mlp.up_proj", linear)
    return ModuleRunner(model)


def plain(columns: int = 256) -> nn.Linear:
    linear = nn.Linear(columns, 40, bias=False)
    linear.weight.data = weight(columns)
    return linear


@pytest.mark.parametrize(
    ("type_name", "columns"),
    [(name, columns) for name in METHODS for columns in (256, 96) if columns % FORMATS[name].block_size == 0]
    + [("NF4", 96)],
)
def test_codes_of_a_plain_linear_that_is_quantized_for_it(type_name: str, columns: int) -> None:
    """They are those of the Linear that quantizing would make; NF4's scales may differ in their last bit."""
    found = coded_weights(holding(plain(columns)), UP, ROWS, quantize=type_name)
    linear = quantize_linear(weight(columns), type_name)
    expected = coded_weights(holding(linear), UP, ROWS)
    assert found.rows == (3, 39, 17) and found.type_name == expected.type_name == type_name
    assert found.levels == expected.levels and np.array_equal(found.codes_RC, expected.codes_RC)
    np.testing.assert_allclose(found.values_RC, linear.dequantize()[[3, 39, 17]], rtol=1e-6)
    np.testing.assert_array_equal(found.errors_RC, found.values_RC - weight(columns)[[3, 39, 17]].numpy())
    assert abs(found.errors_RC).max() < 0.1 and (found.minimums_RC is not None) == (
        type_name in ("Q4_1", "Q4_K", "Q5_K")
    )
    assert len(json.loads(json.dumps(found.to_dict()))["codes"][0]) == columns
    assert all(array.dtype == np.float32 for array in (found.scales_RC, found.values_RC))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0"])
def test_codes_of_tiles(type_name: str) -> None:
    linear = pack_ggml(quantize(weight(), type_name), type_name)
    found = coded_weights(holding(linear), UP, ROWS, original=weight().numpy())
    codes, scales, minimums = parts(linear, torch.tensor([3, 39, 17]))
    assert np.array_equal(found.codes_RC, codes) and np.array_equal(
        found.scales_RC[:, :: 256 // scales.shape[1]], scales
    )
    assert (found.minimums_RC is None) == (minimums is None)
    np.testing.assert_allclose(found.values_RC, linear.dequantize()[[3, 39, 17]], rtol=1e-6, atol=1e-7)
    assert found.type_name == type_name and found.codes_RC.max() < len(found.levels) == linear.format.num_levels
    assert abs(found.errors_RC).max() < 0.06


def test_codes_that_a_codebook_gives_their_meaning() -> None:
    codes = torch.arange(16).repeat(16, 4).to(torch.uint8)
    linear = packed_codes(codes, torch.full((16, 2), 0.5).half(), PACKED_FORMATS["IQ4_NL"])
    found = coded_weights(holding(linear), UP, [4])
    assert np.array_equal(found.codes_RC[0], codes[4]) and found.levels == IQ4_NL_VALUES
    assert np.array_equal(found.values_RC[0, :16], np.array(IQ4_NL_VALUES) * 0.5)


def test_nf4_blocks_may_cross_rows() -> None:
    linear = Linear4bit.from_weight(weight(96), double_quant=True)
    found = coded_weights(holding(linear), UP, range(40))
    assert np.array_equal(found.values_RC, linear.dequantize())
    np.testing.assert_array_equal(np.array(found.levels, np.float32), NF4_LEVELS)
    assert found.scales_RC[0, 63] != found.scales_RC[0, 64] == found.scales_RC[1, 31]
    with pytest.raises(InputError, match="the unquantized weights are not there"):
        _ = found.errors_RC


def test_inputs_are_rounded_as_the_kernels_do() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    x[0, 5], x[1], x[2, 7], x[3, 9] = 40, 0, math.nan, math.inf
    codes, scales = quantize_inputs(x)
    found = rounded_inputs(x.numpy())
    assert np.array_equal(found.codes_MC, codes.flatten(1)) and found.codes_MC[0, 5] > 127
    np.testing.assert_array_equal(found.scales_MC[:, ::32], scales)
    np.testing.assert_array_equal(found.values_MC, found.codes_MC * found.scales_MC)
    finite = np.isfinite(found.errors_MC)
    assert (abs(found.errors_MC) <= found.scales_MC * 1.01 / 2 + 1e-9)[finite].mean() > 0.99
    with pytest.raises(InputError, match="a multiple of 32"):
        rounded_inputs(x[:, :33].numpy())


def test_where_along_the_layers_the_error_grows(model_files: Callable[..., Any]) -> None:
    path = model_files(num_hidden_layers=3).gguf_file("Q8_0")
    rough, fine = llamarium.load(path), llamarium.load(path, dtype="float32")
    pair = [llama.trace([5, 9, 7], names=["resid"]) for llama in (rough, fine)]
    found = stream_errors(*pair)
    assert [one.layer for one in found] == [0, 1, 2]
    here, there = pair[0]["layers.1.resid"][2], pair[1]["layers.1.resid"][2]
    assert found[1].relative[2] == pytest.approx(float((here - there).norm() / there.norm()), rel=1e-4)
    assert 0 < found[2].relative[2] < 0.1 and found[2].cosine[2] > 0.99
    with pytest.raises(InputError, match="same tokens and layers"):
        stream_errors(pair[0], fine.trace([5, 9, 8], names=["resid"]))


def test_what_has_no_codes_is_refused() -> None:
    runner = holding(plain())
    with pytest.raises(InputError, match="not quantized; give quantize: one of NF4, Q8_0, Q4_0, Q4_1"):
        coded_weights(runner, UP, [0])
    with pytest.raises(OptionError, match="quantize is 'Q3'"):
        coded_weights(runner, UP, [0], quantize="Q3")
    with pytest.raises(OptionError, match="multiple of 32"):
        coded_weights(holding(plain(40)), UP, [0], quantize="Q4_1")
    with pytest.raises(InputError, match="matrix is not known"):
        coded_weights(runner, "model.layers.9.mlp.up_proj.weight", [0])
    runner = holding(Linear4bit.from_weight(weight()))
    with pytest.raises(InputError, match=r"rows are \[40\]"):
        coded_weights(runner, UP, [40])
    with pytest.raises(InputError, match=r"original is \(2, 2\); expected \(40, 256\)"):
        coded_weights(runner, UP, [0], original=np.zeros((2, 2), np.float32))
    with pytest.raises(InputError, match="Q5_1 codes are not supported"):
        coded_weights(holding(LinearGGML(quantize(weight(), "Q5_1"), "Q5_1")), UP, [0])
