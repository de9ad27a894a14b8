"""Detect edits of a loaded model's modules.

A caller may hook, patch or train the modules of a loaded model, but the C kernels read only the weights. So before each
request the modules are compared with their state at loading: hooks, adapters, replaced modules or weights, methods
patched on a module or its class, numeric attributes, and in-place changes of weights that the runner has copied (those
of adapters). In-place changes of other weights need no fallback, because the runner reads the same memory, but they
invalidate the KV cache, so they are detected, too.
"""

from collections.abc import Collection, Iterator
from types import FunctionType

import torch
from torch import nn
from torch.nn.modules import module as torch_module

_OWN = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "training")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ModuleSnapshot:
    """The state of a model's modules when they were built, and when they were last compared.

    Args:
        model: The modules.
        shared: Addresses of the weights that the runner reads in place.
    """

    def __init__(self, model: nn.Module, shared: Collection[int] = ()) -> None:
        self._shared = frozenset(shared)
        self._kept = list(model.modules())  # keeps old modules alive, so that no new one gets the id of an old one
        self._state = self._last = list(_state(model, self._shared))
        self._versions = _versions(model)

    def look(self, model: nn.Module) -> tuple[bool, bool]:
        """Return whether anything but weight values differs from the first state, and anything at all from the last."""
        last, self._last = self._last, list(_state(model, self._shared))
        versions, self._versions = self._versions, _versions(model)
        is_changed = (last, versions) != (self._last, self._versions)
        is_hooked = any(getattr(torch_module, name, None) for name in _GLOBAL_HOOKS)
        return is_hooked or self._last != self._state, is_changed


def _versions(model: nn.Module) -> list[int]:
    tensors = (*model.parameters(), *model.buffers())
    return [_version(tensor) for tensor in tensors]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _state(model: nn.Module, shared: Collection[int]) -> Iterator[object]:
    """Yield everything that results depend on, except the values of shared weights."""
    for kind in dict.fromkeys(map(type, model.modules())):
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            yield base, [(name, value) for name, value in vars(base).items() if isinstance(value, FunctionType)]
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = vars(module)
        yield name, id(module), *attributes["_forward_hooks"], *attributes["_forward_pre_hooks"]
        for key, tensor in (*attributes["_parameters"].items(), *attributes["_buffers"].items()):
            yield key, None if tensor is None else _identity(tensor, shared)
        for key, value in attributes.items():
            if key not in _OWN and not key.startswith("_") and not isinstance(value, torch.Tensor):
                yield key, value if isinstance(value, (bool, int, float, str)) else id(value)


def _identity(tensor: torch.Tensor, shared: Collection[int]) -> tuple[object, ...]:
    """Return a tensor's address and layout, and its version counter if the runner has a copy."""
    address = tensor.data_ptr()
    return address, tensor.dtype, tensor.shape, tensor.stride(), 0 if address in shared else _version(tensor)
