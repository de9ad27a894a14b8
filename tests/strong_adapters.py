"""Adapters that matter: fresh ones, whose B is 0, change nothing."""

import torch

from llamarium.adapters.lora import lora_linears
from llamarium.model import LlamaForCausalLM


@torch.no_grad()
def strengthen(model: LlamaForCausalLM, spread: float, *, seed: int = 0, stretch: float = 1.0) -> None:
    """Draw each adapter's B with this deviation, and stretch DoRA's magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    for _, linear in lora_linears(model):
        linear.lora_B.weight.normal_(0, spread, generator=generator)
        if linear.lora_magnitude_vector is not None:
            linear.lora_magnitude_vector.mul_(stretch)
