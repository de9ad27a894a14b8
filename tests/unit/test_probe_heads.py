"""What each head adds, and who wrote a logit: sums that hold on plain, quantized and adapted models, and in C."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llamarium
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import apply_lora, without_adapters
from llamarium.errors import InputError
from llamarium.inspect.probes import attribution
from llamarium.inspect.probes.attribution import attribute
from llamarium.inspect.probes.heads import heads_joined
from llamarium.inspect.trace import Trace, trace
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.module_runner import ModuleRunner
from swapping import quantize_linears

pytestmark = pytest.mark.torch

CONFIG = replace(preset("tiny"), num_hidden_layers=3, vocab_size=200, initializer_range=0.2, rms_norm_eps=1.0)
IDS = [7, 3, 150, 3, 42, 199]
TEXT = "The capital of France is"


def plain() -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)


def quantized() -> LlamaForCausalLM:
    model = plain()
    quantize_linears(model, "NF4")
    return model


def adapted() -> LlamaForCausalLM:
    model = plain()
    apply_lora(model, LoRAConfig(target_modules=("o_proj", "down_proj"), use_dora=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    return model.requires_grad_(False).eval()


@pytest.fixture(params=[plain, quantized, adapted], ids=["plain", "NF4", "DoRA"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return request.param()


def traced(model: LlamaForCausalLM, **options: Any) -> Trace:
    return trace(ModuleRunner(model), IDS, **options)


def test_heads_sum_to_attention(model: LlamaForCausalLM) -> None:
    seen = traced(model, names=["head_out", "attn_out"])
    for layer in range(3):
        found = heads_joined(ModuleRunner(model), seen, layer)
        assert found.added_TND.shape == (6, 4, CONFIG.hidden_size)
        np.testing.assert_allclose(found.added_TND.sum(1), seen.arrays["attn_out", layer], rtol=1e-5, atol=1e-5)
        assert abs(found.rounding_TD).max() < 1e-5
        np.testing.assert_allclose(found.shares_TN.sum(-1), np.ones(6), rtol=1e-5)


def test_a_heads_part_is_what_is_missing_without_it() -> None:
    model = plain()
    seen = traced(model, names=["head_out", "attn_out"], positions=[4, 2])
    found = heads_joined(ModuleRunner(model), seen, -1)
    assert (found.layer, found.positions) == (2, (4, 2))
    without = seen["layers.2.head_out"].clone()
    without[:, 1] = 0
    rest = model.model.layers[2].self_attn.o_proj(without.flatten(1))
    np.testing.assert_allclose(found.added_TND[:, 1], seen["layers.2.attn_out"] - rest, rtol=1e-4, atol=1e-5)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["norms"][0] == pytest.approx(np.linalg.norm(found.added_TND[0], axis=-1).tolist())


def test_an_adapter_that_is_off_is_not_counted() -> None:
    model = adapted()
    with without_adapters(model):
        off = heads_joined(ModuleRunner(model), traced(model, names=["head_out", "attn_out"]), 0)
    on = heads_joined(ModuleRunner(model), traced(model, names=["head_out", "attn_out"]), 0)
    assert abs(off.rounding_TD).max() < 1e-5 and abs(off.added_TND - on.added_TND).max() > 0.01


@pytest.mark.parametrize("position", [-1, 2])
def test_additions_sum_to_the_logit_and_heads_to_their_attention(model: LlamaForCausalLM, position: int) -> None:
    seen = traced(model)
    found = attribute(ModuleRunner(model), seen, 17, position=position)
    assert found.logit == float(seen["logits"][position, 17]) and found.position == range(6)[position]
    assert [(a.part, a.layer) for a in found.additions[:3]] == [("embed", None), ("attention", 0), ("mlp", 0)]
    assert len(found.additions) == 1 + 2 * 3 and len(found.heads) == 3 * 4
    assert sum(a.logit for a in found.additions) == pytest.approx(found.logit, abs=1e-4)
    assert found.rounding == pytest.approx(0, abs=1e-4)
    for one in found.additions:
        if one.part == "attention":
            assert one.logit == pytest.approx(sum(h.logit for h in found.heads if h.layer == one.layer), abs=1e-4)
    assert found.additions[1].norm == pytest.approx(float(seen["layers.0.attn_out"][position].norm()))
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_difference_of_logits_is_the_difference_of_their_parts() -> None:
    model = plain()
    seen = traced(model)
    one, other = attribute(ModuleRunner(model), seen, 17), attribute(ModuleRunner(model), seen, 90)
    between = attribute(ModuleRunner(model), seen, 17, against_id=90)
    assert between.logit == pytest.approx(one.logit - other.logit)
    for a, b, c in zip(one.additions, other.additions, between.additions, strict=True):
        assert c.logit == pytest.approx(a.logit - b.logit, abs=1e-9)


def test_on_the_built_in_model(smollm2: llamarium.Llama) -> None:
    """In float32 the sum is the logit of 17 to 1e-4."""
    norm = np.linalg.norm
    seen = smollm2.trace(TEXT, names=attribution.NAMES, positions=[-1])
    paris = smollm2.encode(" Paris")[0]
    found = attribute(smollm2.runner, seen, paris)
    assert found.logit > 10 and abs(found.rounding) < 1e-4
    joined = heads_joined(smollm2.runner, seen, 20)
    assert norm(joined.rounding_TD) < 1e-5 * norm(joined.added_TND.sum(1))


def test_what_the_kernels_round_is_told(model_files: Callable[..., Any]) -> None:
    llama = llamarium.load(model_files().gguf_file("Q8_0"))
    assert llama.runner.is_row_exact
    seen = llama.trace([5, 9, 7], names=attribution.NAMES)
    found = attribute(llama.runner, seen, 11)
    assert found.rounding == pytest.approx(found.logit - sum(a.logit for a in found.additions))
    assert 0 < abs(found.rounding) < 0.02
    attention = [a.logit for a in found.additions if a.part == "attention" and a.layer == 1]
    heads = [a.logit for a in found.heads if a.layer == 1]
    assert sum(heads) == pytest.approx(attention[0], abs=0.02)


def test_refusals() -> None:
    model = plain()
    seen = traced(model, names=["resid", "attn_out"], positions=[2])
    with pytest.raises(InputError, match=r"layer is 3; expected one within -3\.\.2"):
        heads_joined(ModuleRunner(model), seen, 3)
    with pytest.raises(InputError, match=r"lacks layers\.1\.head_out; trace with names=\['head_out', 'attn_out'\]"):
        heads_joined(ModuleRunner(model), seen, 1)
    with pytest.raises(InputError, match=r"position is -1; this trace holds \[2\]"):
        attribute(ModuleRunner(model), seen, 17)
    with pytest.raises(InputError, match=r"lacks 8 activations, embed among them"):
        attribute(ModuleRunner(model), seen, 17, position=2)
    with pytest.raises(InputError, match=r"the token is 200; expected an id within 0\.\.199"):
        attribute(ModuleRunner(model), traced(model), 200)
    model.model.layers[1].self_attn.o_proj = torch.nn.Sequential(model.model.layers[1].self_attn.o_proj)
    with pytest.raises(InputError, match=r"o_proj is another module, whose matrix is not known"):
        heads_joined(ModuleRunner(model), traced(model), 1)


def test_heads_of_packed_weights_sum_to_what_the_kernels_computed(smollm2_path: Path) -> None:
    """Each is the kernels' own product of that head alone, so nothing is left but the order of a sum."""
    llama = llamarium.load(smollm2_path, device="cpu")
    found = llama.inspect.heads("The capital of France is", 23)
    o_proj = llama.model.model.layers[23].self_attn.o_proj
    if not isinstance(o_proj, LinearPacked) or not o_proj.uses_kernels:
        pytest.skip("the C kernels do not run here")
    out_TD = found.added_TND.sum(1)
    norm = np.linalg.norm
    assert norm(found.rounding_TD) < 1e-6 * norm(out_TD)
    seen = llama.trace("The capital of France is", names=["head_out"], layers=[23])["layers.23.head_out"]
    weight_DNH = o_proj.dequantize().unflatten(1, seen.shape[1:])
    plain_TND = torch.einsum("tnh,dnh->tnd", seen.float(), weight_DNH)
    assert norm(found.added_TND - plain_TND.numpy(), axis=-1).max() < 0.01 * norm(plain_TND, axis=-1).max()
