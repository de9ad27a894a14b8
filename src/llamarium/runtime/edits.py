"""Whether a model's modules are still those that its runner was made of.

The modules of a loaded model are there to be read, hooked, patched and trained. The C kernels know their weights alone.
So before a request somebody asks whether anything else has been done to the modules since they were built: hooks,
adapters, replaced modules, weights that are others or elsewhere, a patched method, another number in an attribute. A
weight that was changed in place is the same memory; but the keys and values that it has made are not what it would make
now, so that is noticed too.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_OWN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class Snapshot:
    """What a model's modules were at first, and when they were last looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = list(model.modules())  # so that nothing new can have the identity of something old
        self._state = self._last = list(_state(model))
        self._versions = _versions(model)

    def look(self, model: nn.Module) -> tuple[bool, bool]:
        """Return whether the modules are others than at first, beyond weights' values, and whether than last time."""
        last, self._last = self._last, list(_state(model))
        versions, self._versions = self._versions, _versions(model)
        is_changed = (last, versions) != (self._last, self._versions)
        is_hooked = any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS)
        return is_hooked or self._last != self._state, is_changed


def _versions(model: nn.Module) -> list[int]:
    """Return how often each weight was written to."""
    tensors = (*model.parameters(), *model.buffers())
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _state(model: nn.Module) -> Iterator[object]:
    """Yield what a request could see of the modules, their weights' values apart."""
    for name, module in model.named_modules(remove_duplicate=False):
        own = vars(module)
        yield name, id(module), type(module).forward, *own["_forward_hooks"], *own["_forward_pre_hooks"]
        for key, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            yield key, None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        for key, value in own.items():
            if key not in _OWN and not key.startswith("_") and not isinstance(value, torch.Tensor):
                yield key, value if isinstance(value, (bool, int, float, str)) else id(value)
