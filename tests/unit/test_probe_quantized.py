"""A pass with other weights, for a look: as a model that was quantized so computes it, and the model stays as it is."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from llamarium.errors import InputError, OptionError
from llamarium.inspect.probes.four_bits import coded_weights
from llamarium.inspect.probes.quantized import coded_anew, is_rounded, streams_as
from llamarium.inspect.trace import Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.packed import pack_integers, product_reference
from llamarium.quant.swap import QUANTIZED_LINEARS, Method, quantize_linears, swap_linears
from llamarium.runtime.module_runner import ModuleRunner
from native_models import build

CONFIG = replace(preset("tiny"), vocab_size=200, num_hidden_layers=3, initializer_range=0.2, tie_word_embeddings=True)
IDS = [7, 3, 150, 3, 42, 199]


def model() -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)


def streams(of: LlamaForCausalLM, ids: list[int] = IDS) -> Trace:
    return trace(ModuleRunner(of), ids, names=["resid"])


def assert_close(found: Trace, expected: Trace, rtol: float = 1e-4) -> None:
    assert list(found) == list(expected) and found.token_ids == expected.token_ids
    for key in expected:
        torch.testing.assert_close(found[key], expected[key].float(), rtol=rtol, atol=rtol * 10)


def test_as_they_are_it_is_the_models_own_pass() -> None:
    assert_close(streams_as(model(), IDS), streams(model()), rtol=1e-5)


@pytest.mark.parametrize("method", ["NF4", "Q8_0", "Q4_1"])
def test_a_type_does_what_it_does_to_a_model_that_is_quantized_so(method: Method) -> None:
    quantized, plain = model(), model()
    before = {name: p.clone() for name, p in plain.named_parameters()}
    quantize_linears(quantized, method)
    found = streams_as(plain, IDS, quantize=method.lower())
    assert_close(found, streams(quantized), rtol=1e-5)
    assert (found["layers.2.resid"] - streams(plain)["layers.2.resid"]).abs().max() > 1e-3
    assert all(torch.equal(p, before[name]) for name, p in plain.named_parameters())
    assert all(type(m) is nn.Linear for m in plain.modules() if hasattr(m, "in_features"))


@pytest.mark.parametrize("method", ["Q8_0", "Q4_1"])
def test_inputs_are_rounded_as_the_kernels_define_it(method: Method) -> None:
    class Product(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            packed = pack_integers(QUANTIZED_LINEARS[method].from_weight(linear.weight))
            assert packed is not None
            self.packed = packed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product_reference(x.flatten(0, -2), self.packed).view(*x.shape[:-1], -1)

    rounding = model()
    swap_linears(rounding, lambda _, linear: Product(linear))
    found = streams_as(model(), IDS, quantize=method, rounds_inputs=True)
    for key, expected in streams(rounding).items():  # an input between two codes may fall to either
        assert (found[key] - expected.float()).norm() < 0.02 * expected.float().norm()
    apart = (found["layers.0.resid"] - streams_as(model(), IDS, quantize=method)["layers.0.resid"]).abs().max()
    assert apart > 1e-3


def test_packed_weights_are_taken_for_what_they_mean() -> None:
    """Whatever dtype the modules compute in, and without the rounding of their inputs."""
    packed, ids = build("Q4_1", torch.bfloat16), [5, 9, 7, 3]
    plain = build(None)
    for name, linear in packed.named_modules():
        if hasattr(linear, "dequantize"):
            plain.get_submodule(name).weight = nn.Parameter(linear.dequantize(), requires_grad=False)  # type: ignore[attr-defined]
        elif "norm" in name:
            plain.get_submodule(name).weight = nn.Parameter(linear.weight.float(), requires_grad=False)  # type: ignore[attr-defined]
    assert_close(streams_as(packed, ids), streams(plain, ids), rtol=1e-5)
    assert packed.model.norm.weight.dtype == torch.bfloat16
    linear = packed.model.layers[0].get_submodule("mlp.up_proj")
    assert is_rounded(linear) and not is_rounded(plain.model.layers[0].get_submodule("mlp.up_proj"))
    anew = coded_anew(linear, [2], "NF4")
    stored = coded_weights(linear, [2])
    assert torch.equal(anew.original_RC, stored.values_RC) and anew.type_name == "NF4"  # type: ignore[arg-type]
    assert anew.errors_RC.abs().max() > 0


def test_what_no_kernel_does_is_refused() -> None:
    with pytest.raises(InputError, match="do not multiply NF4"):
        streams_as(model(), IDS, quantize="NF4", rounds_inputs=True)
    with pytest.raises(OptionError, match="quantize is 'Q9'"):
        streams_as(model(), IDS, quantize="Q9")
    with pytest.raises(InputError, match="no tokens"):
        streams_as(model(), [])
