"""What one more token costs: counted from the shapes, and the same logits with the cache as without."""

from dataclasses import replace

import pytest

from llamarium.errors import ContextLengthError, InputError
from llamarium.inspect.probes.cost import token_cost
from llamarium.kv_codes import DTYPE_BYTES
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.module_runner import ModuleRunner

pytestmark = pytest.mark.torch

CONFIG = replace(preset("tiny"), vocab_size=200)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(CONFIG), seed=0).requires_grad_(False)


def test_a_step_is_one_token_over_the_kept_ones(model: LlamaForCausalLM) -> None:
    runner, config = ModuleRunner(model), CONFIG
    found = token_cost(runner, [1, 2, 3, 4])
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name)
    head, pair = 2 * config.vocab_size * config.hidden_size, 4 * config.num_attention_heads * config.head_dim
    assert found.flops == 2 * weights + head + 4 * pair * config.num_hidden_layers
    assert found.flops_without == 4 * 2 * weights + head + 10 * pair * config.num_hidden_layers
    assert found.num_tokens == 4
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert found.cache_bytes_per_token == kept * DTYPE_BYTES[runner.kv_dtype]
    assert 0 <= found.largest_difference < 1e-4


def test_ids_out_of_range_are_refused(model: LlamaForCausalLM) -> None:
    runner = ModuleRunner(model)
    with pytest.raises(InputError, match="200"):
        token_cost(runner, [model.config.vocab_size])
    with pytest.raises(ContextLengthError):
        token_cost(runner, [1] * (model.config.max_position_embeddings + 1))
