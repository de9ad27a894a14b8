"""Change a model from outside, in ways that no Llama config describes."""

import torch
from torch import Tensor, nn

from llamarium.model import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm
from llamarium.model.rope import Rotary


class NoRotary(nn.Module):
    """Replaces `LlamaRotaryEmbedding` by a rotation by zero."""

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> Rotary:
        """Return cos 0 and sin 0, whatever the positions are."""
        one_1111 = torch.ones(1, 1, 1, 1, dtype=dtype, device=positions_BT.device)
        return Rotary(one_1111, torch.zeros_like(one_1111))


class NoNorm(nn.Module):
    """Replaces a `LlamaRMSNorm` by the identity.

    Its weight is a buffer that multiplies nothing: the model reads its device and dtype.
    """

    weight: Tensor

    def __init__(self, norm: LlamaRMSNorm) -> None:
        super().__init__()
        self.register_buffer("weight", norm.weight.detach().clone(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return x."""
        return x_BTD


def without_rope(model: LlamaForCausalLM) -> None:
    """Remove RoPE, in place."""
    model.model.set_submodule("rotary_emb", NoRotary())


def without_norms(model: LlamaForCausalLM) -> None:
    """Remove every norm, in place."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, LlamaRMSNorm)]
    for name, module in norms:
        model.set_submodule(name, NoNorm(module))


def with_layer_norms(model: LlamaForCausalLM) -> None:
    """Replace each RMSNorm by a LayerNorm, which also subtracts the mean and has a bias, in place."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, LlamaRMSNorm)]
    for name, module in norms:
        model.set_submodule(name, nn.LayerNorm(len(module.weight), module.eps).to(module.weight))


@torch.no_grad()
def set_embedding_std(model: LlamaForCausalLM, std: float, seed: int) -> None:
    """Redraw the embedding table, and so a tied head, from N(0, std)."""
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(seed)
    model.model.embed_tokens.weight.normal_(0.0, std, generator=generator)
