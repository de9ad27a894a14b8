"""Joining small projections: q, k and v are one product for one new token, and so are gate and up.

Decoding reads every weight once, and for a small model starting a product costs as much as reading its matrix. So the
matrices that multiply the same input are laid one below the other in one piece of memory, and a single token goes
through the joined matrix. The Linears stay where they are, with weights that are views into it: state-dict keys,
`print(model)` and everything that is done to a Linear are as before. A module whose Linears have since been replaced,
moved or cast, or that carry hooks (a trace's, say), multiplies them one by one again; so do several tokens at
once, where there is nothing to gain.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from llamarium.kernels.cpu_half import linear_half
from llamarium.model import LlamaAttention, LlamaForCausalLM, LlamaMLP

# Weights of a joined matrix, at most. A larger one takes so long to read that starting it no longer counts (and would
# be copied out of the file's mapping).
_MAX_WEIGHTS = 2**22


class Joined:
    """Several Linears over one matrix.

    Args:
        linears: Plain ones of one input size and dtype; their weights become views into the joined one.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.linears = tuple(linears)
        self.sizes = [linear.out_features for linear in linears]
        self.weight = weight
        for linear, rows in zip(linears, weight.split(self.sizes), strict=True):
            linear.weight = nn.Parameter(rows, requires_grad=False)
        self._addresses = [linear.weight.data_ptr() for linear in linears]

    def serves(self, x_BTD: Tensor, linears: Sequence[nn.Module]) -> bool:
        """Whether `x_BTD` is a single token, and `linears` are still those that were joined, where they were."""
        return (
            x_BTD.numel() == x_BTD.shape[-1]
            and not torch.is_grad_enabled()
            and all(now is then for now, then in zip(linears, self.linears, strict=True))
            and all(linear.weight.data_ptr() == a for linear, a in zip(self.linears, self._addresses, strict=True))
            and not any(map(_has_hooks, self.linears))
        )

    def __call__(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return each Linear's output."""
        return linear_half(x_BTD, self.weight).split(self.sizes, dim=-1)


class JoinedAttention(LlamaAttention):
    """A `LlamaAttention` whose q, k and v are one product for a single token."""

    joined: Joined

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, N, H), k and v (B, T, K, H), before rotation."""
        if not self.joined.serves(x_BTD, (self.q_proj, self.k_proj, self.v_proj)):
            return super().project(x_BTD)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.joined(x_BTD))
        return q, k, v

    def _get_name(self) -> str:
        return "LlamaAttention"  # the module tree that people know


class JoinedMLP(LlamaMLP):
    """A `LlamaMLP` whose gate and up are one product for a single token."""

    joined: Joined

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up, (B, T, F) each."""
        if not self.joined.serves(x_BTD, (self.gate_proj, self.up_proj)):
            return super().project(x_BTD)
        gate_BTF, up_BTF = self.joined(x_BTD)
        return gate_BTF, up_BTF

    def _get_name(self) -> str:
        return "LlamaMLP"


def join_projections(model: LlamaForCausalLM) -> int:
    """Join what is small enough, in place, layer by layer.

    Returns:
        How many groups were joined; Linears that are quantized or large are left alone.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, LlamaAttention) and _can_join(module.q_proj, module.k_proj, module.v_proj):
            joined = Joined((module.q_proj, module.k_proj, module.v_proj))
            module.__class__ = JoinedAttention
            cast(JoinedAttention, module).joined = joined
            count += 1
        elif isinstance(module, LlamaMLP) and _can_join(module.gate_proj, module.up_proj):
            joined = Joined((module.gate_proj, module.up_proj))
            module.__class__ = JoinedMLP
            cast(JoinedMLP, module).joined = joined
            count += 1
    return count


def _can_join(*linears: nn.Module) -> bool:
    if not all(isinstance(linear, nn.Linear) for linear in linears):
        return False
    return sum(linear.get_parameter("weight").numel() for linear in linears) <= _MAX_WEIGHTS


def _has_hooks(module: nn.Module) -> bool:
    # torch has no public way to ask; a hook that is skipped would be silently wrong.
    return bool(module._forward_hooks or module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
