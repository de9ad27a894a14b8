"""Shells: copies of a module tree that share all weights but have their own hooks.

A shell shares every parameter and buffer with the original and owns only its tables of hooks and submodules. Hooking or
replacing something on a shell affects neither the model nor concurrent requests.
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
    """Hook the modules whose activations are tapped."""
    head_dim = shell.config.head_dim
    for key in taps.keys:
        name, layer = key
        activation = ACTIVATIONS[name]
        if activation.side != "attend":
            root = shell if layer is None else shell.model.layers[layer]
            reader = _reader(taps, key, activation.side == "in", head_dim if activation.axes.endswith("H") else None)
            root.get_submodule(activation.module).register_forward_hook(reader)


def _reader(taps: Taps, key: Key, is_input: bool, head_dim: int | None) -> Callable[..., None]:
    def read(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        value = (args[0] if is_input else output)[0]  # the batch is one packed row
        if head_dim is not None and value.ndim == 2:
            value = value.unflatten(-1, (-1, head_dim))
        taps.put(key, on_host(value))

    return read


EDITED: dict[Part, str] = {
    "embed": "model.embed_tokens",
    "attention": "model.layers.{layer}.self_attn",
    "head": "model.layers.{layer}.self_attn.o_proj",
    "mlp": "model.layers.{layer}.mlp",
    "residual": "model.layers.{layer}",
}
"""The module whose output is the activation; for a head, whose input it is."""


def hook_edit(shell: LlamaForCausalLM, edit: Edit, where: Callable[[], Tensor | None]) -> RemovableHandle:
    """Hook an edit; `where` returns, in each pass, the edited tokens as bool (B, T), or None for all."""

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
    """Make the norms of an edited model return NaN instead of 0 where the sum of squares overflows float32."""

    def check(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return or_nan(args[0], output)

    return [module.register_forward_hook(check) for module in shell.modules() if isinstance(module, LlamaRMSNorm)]


def or_nan(x: Tensor, normed: Tensor) -> Tensor:
    """Return the norm's output for x, (..., D), with NaN in rows whose sum of squares overflows float32."""
    return torch.where(x.float().square().sum(-1, keepdim=True).isfinite(), normed, torch.nan)


def apply(edit: Edit, x: Tensor, at_BT: Tensor | None) -> Tensor:
    """Return factor * x + add where `at_BT` is True, and x elsewhere: (B, T, D or H)."""
    y = x if edit.factor == 1 else torch.zeros_like(x) if edit.factor == 0 else edit.factor * x
    y = y if edit.add is None else y + torch.as_tensor(edit.add).to(x)
    return y if at_BT is None else torch.where(at_BT.unsqueeze(-1), y, x)


def on_host(values: Tensor) -> NDArray[np.float32]:
    """Return a tensor as a float32 numpy array, without a copy where possible."""
    return values.detach().float().cpu().numpy()  # sync: the caller needs the values


def shell_of(module: ModuleT) -> ModuleT:
    """Return a copy of a module tree that shares every parameter and buffer, but no hook tables."""
    shell = copy.copy(module)
    attributes = shell.__dict__
    attributes["_modules"] = {
        name: None if child is None else shell_of(child) for name, child in attributes["_modules"].items()
    }
    attributes |= {name: attributes[name].copy() for name in _HOOKS}
    return shell
