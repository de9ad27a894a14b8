"""A model's modules once more, over the same weights, with hooks of their own.

A shell shares every parameter and buffer with the modules that it is made of, and owns nothing but its tables of hooks
and of submodules. So what is hooked or replaced on it changes neither the model nor a request beside it.
"""

import copy
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llamarium.model import LlamaForCausalLM, LlamaRMSNorm
from llamarium.runtime.intervention import Edit, Part
from llamarium.runtime.taps import ACTIVATIONS, Key, Taps

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def watch(shell: LlamaForCausalLM, taps: Taps) -> None:
    """Hook every module that something wanted is read from."""
    head_dim = shell.config.head_dim
    for key in taps.wanted:
        name, layer = key
        activation = ACTIVATIONS[name]
        if activation.side != "attend":
            root = shell if layer is None else shell.model.layers[layer]
            hook = _reader(taps, key, activation.side == "in", head_dim if activation.axes.endswith("H") else None)
            root.get_submodule(activation.module).register_forward_hook(hook)


def _reader(taps: Taps, key: Key, is_input: bool, head_dim: int | None) -> Callable[..., None]:
    def see(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen = (args[0] if is_input else output)[0]  # the batch is one packed row
        if head_dim is not None and seen.ndim == 2:
            seen = seen.unflatten(-1, (-1, head_dim))
        taps.put(key, on_host(seen))

    return see


EDITED: dict[Part, str] = {
    "embed": "model.embed_tokens",
    "attention": "model.layers.{layer}.self_attn",
    "head": "model.layers.{layer}.self_attn.o_proj",
    "mlp": "model.layers.{layer}.mlp",
    "residual": "model.layers.{layer}",
}
"""The module whose output is a part; of a head, whose input it is."""


def hook_edit(shell: LlamaForCausalLM, edit: Edit, where: Callable[[], Tensor | None]) -> RemovableHandle:
    """Hook an edit; in each pass `where` returns which tokens it is of, bool (B, T), None for all."""

    def change(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return apply(edit, output, where())

    def change_head(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads_BTNH = args[0].unflatten(-1, (shell.config.num_attention_heads, -1)).clone()
        heads_BTNH[..., edit.head, :] = apply(edit, heads_BTNH[..., edit.head, :], where())
        return (heads_BTNH.flatten(-2), *args[1:])

    module = shell.get_submodule(EDITED[edit.part].format(layer=edit.layer))
    if edit.part == "head":
        return module.register_forward_pre_hook(change_head)
    return module.register_forward_hook(change)


def hook_norms(shell: LlamaForCausalLM) -> list[RemovableHandle]:
    """Have the norms of an edited model hand out NaN, not 0, for what float32 cannot hold the squares of."""

    def check(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return or_nan(args[0], output)

    return [module.register_forward_hook(check) for module in shell.modules() if isinstance(module, LlamaRMSNorm)]


def or_nan(x: Tensor, normed: Tensor) -> Tensor:
    """Return what a norm made of x, (..., D); NaN where float32 cannot hold the sum of its squares."""
    return torch.where(x.float().square().sum(-1, keepdim=True).isfinite(), normed, torch.nan)


def apply(edit: Edit, x: Tensor, at_BT: Tensor | None) -> Tensor:
    """Return factor * x + add where `at_BT` is true, x elsewhere: (B, T, D or H)."""
    y = x if edit.factor == 1 else torch.zeros_like(x) if edit.factor == 0 else edit.factor * x
    y = y if edit.add is None else y + torch.as_tensor(edit.add).to(x)
    return y if at_BT is None else torch.where(at_BT.unsqueeze(-1), y, x)


def on_host(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor's numbers as float32 of numpy; the same memory where they are that already."""
    return values.detach().float().cpu().numpy()  # sync: to hand out


def shell_of(module: ModuleT) -> ModuleT:
    """Return a module tree that shares every parameter and buffer with `module`, but not its hook tables."""
    shell = copy.copy(module)
    own = shell.__dict__
    own["_modules"] = {name: None if child is None else shell_of(child) for name, child in own["_modules"].items()}
    own |= {name: own[name].copy() for name in _HOOKS}
    return shell
