"""Adapters in C: the answers of the modules with the same adapter, alone and side by side."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from llamarium.errors import InputError
from llamarium.generation.kept import Memory, advance
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.loaded import LoadedModel
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native_runner import NativeRunner
from llamarium.runtime.runner import Runner
from llamarium.train.adapters.lora import LoRAConfig, apply_lora, lora_linears, low_rank_of
from native_models import CONFIG, build, native_runner, weights_of

UNTIED = replace(CONFIG, tie_word_embeddings=False)


def adapted(config: LoRAConfig, seed: int) -> LlamaForCausalLM:
    """A float32 model whose adapter matters."""
    model = build(None, torch.float32, config=UNTIED)
    apply_lora(model, config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, linear in lora_linears(model):
            linear.lora_B.weight.normal_(0, 0.05, generator=generator)
            if linear.lora_magnitude_vector is not None:
                linear.lora_magnitude_vector.mul_(1.1)
    return model.eval().requires_grad_(False)


def logits(runner: Runner, ids: list[int]) -> np.ndarray:
    memory = Memory(runner, len(ids))
    return advance(runner, memory.cache, [memory.begin(ids, len(ids))])


@pytest.mark.parametrize(
    "config",
    [
        LoRAConfig(r=4),
        LoRAConfig(r=7, use_rslora=True),
        LoRAConfig(r=3, use_dora=True),
        LoRAConfig(r=2, target_modules=("q_proj", "layers.1.mlp.down_proj", "lm_head")),
    ],
    ids=["lora", "rslora", "dora", "some"],
)
def test_an_adapter_in_c_equals_the_modules(kernels: str, config: LoRAConfig) -> None:
    model = adapted(config, seed=1)
    weights = weights_of(build(None, torch.float32, config=UNTIED))
    runner = NativeRunner(UNTIED, weights, [low_rank_of(model)], default_adapter=0)
    plain = NativeRunner(UNTIED, weights)
    for ids in ([5], list(range(1, 70))):
        expected, found = logits(ModuleRunner(model), ids), logits(runner, ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * float(expected.std()))
        assert not np.allclose(found, logits(plain, ids), atol=1e-2 * float(expected.std()))


def test_several_adapters_side_by_side_are_what_each_is_alone() -> None:
    adapters = [low_rank_of(adapted(LoRAConfig(r=rank, use_dora=rank == 3), seed=rank)) for rank in (2, 3)]
    model = build("Q8_0", torch.bfloat16)
    runner = NativeRunner(model.config, weights_of(model), adapters)
    plain = native_runner(model)
    ids = list(range(1, 40))
    cache = runner.new_cache(4)
    together = runner.run(pack([Span(ids, 0, [block], adapter=block - 1) for block in range(3)]), cache)
    for row, adapter in enumerate((-1, 0, 1)):
        alone = runner.run(pack([Span(ids, 0, [3], adapter=adapter)]), cache)
        assert (alone[0] == together[row]).all()
    assert (together[0] == logits(plain, ids)[0]).all(), "none is the base, to the bit"


def test_an_adapter_that_there_is_not_is_refused() -> None:
    model = build("Q8_0")
    runner = native_runner(model)
    with pytest.raises(InputError):
        runner.run(pack([Span([1], 0, [0], adapter=0)]), runner.new_cache(1))
    modules = ModuleRunner(model)
    with pytest.raises(InputError, match="the modules have the adapter"):
        modules.run(pack([Span([1], 0, [0], adapter=0)]), modules.new_cache(1))


def test_a_loaded_model_answers_in_c_with_its_adapter() -> None:
    model = build(None, torch.bfloat16, config=UNTIED)
    base = LoadedModel(native_runner(model), lambda: model)
    before = logits(base.runner(), [1, 2, 3])
    apply_lora(base.model, LoRAConfig(r=4), seed=3)
    for _, linear in lora_linears(base.model):
        torch.nn.init.constant_(linear.lora_B.weight, 0.05)
    base.model.requires_grad_(False)
    loaded = base.with_adapter(low_rank_of(base.model))
    runner = loaded.runner()
    assert isinstance(runner, NativeRunner)
    expected = logits(ModuleRunner(base.model.float()), [1, 2, 3])
    found = logits(runner, [1, 2, 3])
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-2 * float(expected.std()))
    assert not np.allclose(found, before, atol=4e-2 * float(expected.std()))
