"""Adapters that matter: fresh ones, whose B is 0, change nothing."""

from dataclasses import replace

import torch

from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import adapted_modules, apply_lora, lora_linears
from llamarium.adapters.lora_embedding import LoRAEmbedding
from llamarium.model import LlamaForCausalLM
from llamarium.runtime.adapter import Adapter, LowRank
from native_models import CONFIG, build

UNTIED = replace(CONFIG, tie_word_embeddings=False)


@torch.no_grad()
def strengthen(model: LlamaForCausalLM, spread: float, *, seed: int = 0, stretch: float = 1.0) -> None:
    """Draw what begins as zeros of each adapter with this deviation, and stretch DoRA's magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    for _, adapted in adapted_modules(model):
        zeros = adapted.lora_embedding_A if isinstance(adapted, LoRAEmbedding) else adapted.lora_B.weight
        zeros.normal_(0, spread, generator=generator)
        if adapted.lora_magnitude_vector is not None:
            adapted.lora_magnitude_vector.mul_(stretch)


@torch.no_grad()
def low_rank_of(model: LlamaForCausalLM) -> Adapter:
    """The adapter on some modules, for C."""
    found: dict[str, LowRank] = {}
    for name, linear in lora_linears(model):
        magnitude = linear.lora_magnitude_vector
        gain = None if magnitude is None else (magnitude / linear.row_norms()).numpy()
        a, b = linear.lora_A.weight.detach().numpy(), linear.lora_B.weight.detach().numpy()
        found[name] = LowRank(linear.scale, a, b, gain)
    return found


def adapted(config: LoRAConfig, seed: int) -> LlamaForCausalLM:
    """A float32 model whose adapter matters."""
    model = build(None, torch.float32, config=UNTIED)
    apply_lora(model, config, seed=seed)
    strengthen(model, 0.05, seed=seed, stretch=1.1)
    return model.eval().requires_grad_(False)
