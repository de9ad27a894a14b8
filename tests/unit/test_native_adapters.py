"""Adapters in C: the answers of the modules with the same adapter, alone and side by side."""

import numpy as np
import pytest
import torch

from llamarium.adapters.config import LoRAConfig
from llamarium.errors import InputError
from llamarium.inspect.forward import Memory, advance
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Runner
from native_models import build, native_runner, weights_of
from strong_adapters import UNTIED, adapted, low_rank_of

pytestmark = pytest.mark.torch


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
    with pytest.raises(InputError, match="the same adapter"):
        modules.run(pack([Span([1], 0, [0], adapter=0)]), modules.new_cache(1))
