"""Whether a model's modules are still those that its runner was made of.

The modules of a loaded model are there to be read, hooked, patched and trained. The C kernels know their weights alone.
So before a request somebody asks whether anything else has been done to the modules since they were built: hooks,
adapters, replaced modules, weights that are others or elsewhere, a method patched on a module or its class, another
number in an attribute, a change of numbers of which the runner has a copy (an adapter's). Any other weight that was
changed in place is the same memory; but the keys and values that it has made are not what it would make now, so that is
noticed too.
"""

from collections.abc import Collection, Iterator
from types import FunctionType

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_OWN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ModuleSnapshot:
    """What a model's modules were at first, and when they were last looked at.

    Args:
        model: The modules.
        shared: The addresses of the weights that the runner reads.
    """

    def __init__(self, model: nn.Module, shared: Collection[int] = ()) -> None:
        self._shared = frozenset(shared)
        self._kept = list(model.modules())  # so that nothing new can have the identity of something old
        self._state = self._last = list(_state(model, self._shared))
        self._versions = _versions(model)

    def look(self, model: nn.Module) -> tuple[bool, bool]:
        """Return whether the modules are others than at first, beyond weights' values, and whether than last time."""
        last, self._last = self._last, list(_state(model, self._shared))
        versions, self._versions = self._versions, _versions(model)
        is_changed = (last, versions) != (self._last, self._versions)
        is_hooked = any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS)
        return is_hooked or self._last != self._state, is_changed


def _versions(model: nn.Module) -> list[int]:
    """Return how often each weight was written to."""
    tensors = (*model.parameters(), *model.buffers())
    return [_version(tensor) for tensor in tensors]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _state(model: nn.Module, shared: Collection[int]) -> Iterator[object]:
    """Yield what a request could see of the modules, the values of shared weights apart."""
    for kind in dict.fromkeys(map(type, model.modules())):
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            yield base, [(name, value) for name, value in vars(base).items() if isinstance(value, FunctionType)]
    for name, module in model.named_modules(remove_duplicate=False):
        own = vars(module)
        yield name, id(module), *own["_forward_hooks"], *own["_forward_pre_hooks"]
        for key, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            yield key, None if tensor is None else _identity(tensor, shared)
        for key, value in own.items():
            if key not in _OWN and not key.startswith("_") and not isinstance(value, torch.Tensor):
                yield key, value if isinstance(value, (bool, int, float, str)) else id(value)


def _identity(tensor: torch.Tensor, shared: Collection[int]) -> tuple[object, ...]:
    """Which memory a tensor is, how it lies there, and how often it was written to where the runner does not see it."""
    address = tensor.data_ptr()
    return address, tensor.dtype, tensor.shape, tensor.stride(), 0 if address in shared else _version(tensor)
