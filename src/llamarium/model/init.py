"""Fresh weights for a model that is to be trained, or measured."""

import torch
from torch import nn

from llamarium.model.llama import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm


@torch.no_grad()
def init_weights(model: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """Draw every matrix from N(0, initializer_range) and set every norm's weight to one, in place.

    Args:
        model: On a real device.
        seed: Of a generator of its own; the process's random state is not touched.

    Source: transformers' `LlamaPreTrainedModel._init_weights`.
    """
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.normal_(0.0, model.config.initializer_range, generator=generator)
    return model
