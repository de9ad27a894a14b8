"""A pass with other weights, for a look: as a model that was quantized so computes it, and the model stays as it is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from llamarium.errors import InputError, OptionError
from llamarium.inspect.probes.four_bits import coded_weights
from llamarium.inspect.probes.quantized import input_bits_of, streams_as
from llamarium.inspect.trace import Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner
from native_models import build, native_runner
from reference_tiles import pack_ggml, product_reference, quantize
from swapping import quantize_linears, swap_linears

pytestmark = pytest.mark.torch

CONFIG = replace(preset("tiny"), vocab_size=200, num_hidden_layers=3, initializer_range=0.2, tie_word_embeddings=True)
IDS = [7, 3, 150, 3, 42, 199]


def model() -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)


def streams(of: LlamaForCausalLM, ids: list[int] = IDS) -> Trace:
    return trace(ModuleRunner(of), ids, names=["resid"])


def assert_close(found: Trace, expected: Trace, rtol: float = 1e-4) -> None:
    assert list(found) == list(expected) and found.token_ids == expected.token_ids
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=rtol, atol=rtol * float(expected[key].abs().max()))


def test_as_they_are_it_is_the_models_own_pass() -> None:
    assert_close(streams_as(ModuleRunner(model()), IDS), streams(model()), rtol=1e-5)


@pytest.mark.parametrize("method", ["NF4", "Q8_0", "Q4_1"])
def test_a_type_does_what_it_does_to_a_model_that_is_quantized_so(method: str) -> None:
    quantized, plain = model(), model()
    before = {name: p.clone() for name, p in plain.named_parameters()}
    quantize_linears(quantized, method)
    found = streams_as(ModuleRunner(plain), IDS, quantize=method.lower())
    assert_close(found, streams(quantized), rtol=1e-5)
    assert (found["layers.2.resid"] - streams(plain)["layers.2.resid"]).abs().max() > 1e-3
    assert all(torch.equal(p, before[name]) for name, p in plain.named_parameters())
    assert all(type(m) is nn.Linear for m in plain.modules() if hasattr(m, "in_features"))


@pytest.mark.parametrize("method", ["Q8_0", "Q4_1"])
def test_inputs_are_rounded_as_the_kernels_define_it(method: str) -> None:
    class Product(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.packed = pack_ggml(quantize(linear.weight.detach(), method), method)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return product_reference(x.flatten(0, -2), self.packed).view(*x.shape[:-1], -1)

    rounding = model()
    swap_linears(rounding, lambda _, linear: Product(linear))
    found = streams_as(ModuleRunner(model()), IDS, quantize=method, rounds_inputs=True)
    for key, expected in streams(rounding).items():  # an input between two codes may fall to either
        assert (found[key] - expected.float()).norm() < 0.02 * expected.float().norm()
    apart = (
        (found["layers.0.resid"] - streams_as(ModuleRunner(model()), IDS, quantize=method)["layers.0.resid"])
        .abs()
        .max()
    )
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
    assert_close(streams_as(ModuleRunner(packed), ids), streams(plain, ids), rtol=1e-5)
    assert packed.model.norm.weight.dtype == torch.bfloat16
    key = "model.layers.0.mlp.up_proj.weight"
    native, modules = native_runner(packed), ModuleRunner(packed)
    assert (
        input_bits_of(native, key) == input_bits_of(modules, key) == 8
        and input_bits_of(ModuleRunner(plain), key) is None
    )
    assert_close(streams_as(native, ids), streams_as(modules, ids), rtol=1e-6)
    for runner in (native, modules):
        anew, stored = coded_weights(runner, key, [2], quantize="NF4"), coded_weights(runner, key, [2])
        assert np.array_equal(anew.original_RC, stored.values_RC) and anew.type_name == "NF4"  # type: ignore[arg-type]
        assert abs(anew.errors_RC).max() > 0


def test_what_no_kernel_does_is_refused() -> None:
    with pytest.raises(InputError, match="do not multiply NF4"):
        streams_as(ModuleRunner(model()), IDS, quantize="NF4", rounds_inputs=True)
    with pytest.raises(OptionError, match="quantize is 'Q9'"):
        streams_as(ModuleRunner(model()), IDS, quantize="Q9")
    with pytest.raises(InputError, match="no tokens"):
        streams_as(ModuleRunner(model()), [])
