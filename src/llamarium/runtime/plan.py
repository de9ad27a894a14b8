"""The whole forward pass in C: from the embedded tokens to the last norm, in one call.

For one new token, what a model costs is reading its weights; what remains (hundreds of small operations, each started
from Python) costs as much again in a small model. So a model whose Linears the kernels can multiply gets a plan: the
addresses of its weights, layer by layer, for `native.forward`. The modules stay what and where they are: state-dict
keys, `print(model)` and everything that is done to a module are as before, and the model's definition knows nothing of
this.

The plan serves passes over a `KVCache` on the CPU, and plain causal ones, without gradients. Everything else (a trace,
training, packed rows) goes through the modules; and so does everything once a module of the plan has been replaced,
moved or cast, or carries a hook. Only a `forward` that is set on a module itself passes unseen: use a hook.

Residual stream and activations are float32 here, where the modules round to the model's dtype after each operation.
"""

import operator
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,  # pyright: ignore[reportPrivateUsage]
    _global_forward_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from llamarium.attention import Attend, CachedAttend, CausalAttend, KVCache
from llamarium.errors import InputError
from llamarium.kernels import native
from llamarium.kernels.threads import one_torch_thread
from llamarium.model import LlamaForCausalLM, LlamaModel, LlamaRMSNorm
from llamarium.quant.base import QuantizedLinear
from llamarium.quant.half import KernelLinear
from llamarium.quant.packed import GROUP, EmbeddingPacked, LinearPacked

# Tokens that are computed at once, and bytes of what attention knows of each chunk of 256 slots: they bound the memory
# between the layers; the result does not depend on them.
_MAX_ROWS, _CHUNK_SLOTS, _MAX_PARTS_BYTES = 256, 256, 2**28
# Weights that are not packed are multiplied token by token in C; beyond this many, PyTorch's product is faster.
_MAX_ROWS_UNPACKED = 4

_LINEARS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CACHE_DTYPES = {**_DTYPES, torch.int8: 2}


class Plan:
    """A trunk's weights for the kernels.

    Args:
        trunk: On the CPU, with Linears that `use_kernels` allows.

    Attributes:
        max_rows: The most tokens for which the plan is faster than the modules, or None.
    """

    def __init__(self, trunk: LlamaModel) -> None:
        config = trunk.rotary_emb.config
        weighted = list(map(_tensors, _weighted(trunk)))
        self._weights = [tensors["weight"] for tensors in weighted]
        self._addresses = list(map(Tensor.data_ptr, self._weights))
        watched = [*_children(trunk), *((tensors, "weight", tensors["weight"]) for tensors in weighted)]
        self._owners, self._names, self._owned = zip(*watched, strict=True)
        self._hooks = list(_hooks(trunk))
        self._trunk_layers = trunk.layers
        takes_all = getattr(trunk, "deterministic", False) or all(isinstance(m, LinearPacked) for m in _linears(trunk))
        self.max_rows = None if takes_all else _MAX_ROWS_UNPACKED
        self._frequencies = trunk.rotary_emb.frequencies(torch.device("cpu"))
        self._layers = (native.Layer * len(trunk.layers))(*map(self._layer, trunk.layers))
        self._model = native.Model(
            len(trunk.layers), config.hidden_size, config.intermediate_size, config.num_attention_heads,
            config.num_key_value_heads, config.head_dim, config.rms_norm_eps, _DTYPES[trunk.norm.weight.dtype],
            self._frequencies.data_ptr(), trunk.norm.weight.data_ptr(), self._layers,
        )  # fmt: skip
        # Caches that were described, and the tensors they had then.
        self._caches = weakref.WeakKeyDictionary[KVCache, tuple[list[Tensor], native.Cache]]()

    def serves(self, ids_BT: Tensor) -> bool:
        """Whether the plan can run these tokens, given an attend that it knows."""
        return (
            not torch.is_grad_enabled()
            and ids_BT.device.type == "cpu"
            and (self.max_rows is None or ids_BT.numel() <= self.max_rows)
            and self._is_intact()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None: addresses are of one process, and a copy's weights lie elsewhere."""
        return type(None), ()

    def _is_intact(self) -> bool:
        """Whether every module and weight is still what and where it was, without a hook, and no layer more."""
        # Maps of C functions over 700 things take 30 microseconds, where a generator expression takes twice that.
        return (
            all(map(operator.is_, map(dict[str, object].get, self._owners, self._names), self._owned))
            and list(map(Tensor.data_ptr, self._weights)) == self._addresses
            and not any(self._hooks)
            and len(self._trunk_layers) == self._model.num_layers
        )

    def run(self, hidden_MD: Tensor, attend: CachedAttend) -> None:
        """Run embedded tokens through the trunk, in place: float32, (B * T, D), row after row."""
        cache, places, num_rows = self._cache(attend.cache), _places(attend), self._rows_at_once(attend)
        for start, part_MD in zip(range(0, len(hidden_MD), num_rows), hidden_MD.split(num_rows), strict=True):
            native.forward(self._model, cache, places[start : start + num_rows], part_MD)

    def step(self, ids_B1: Tensor, attend: CachedAttend, table: EmbeddingPacked, head: LinearPacked) -> Tensor | None:
        """Run one token a row, from ids to logits, float32 (B, V), as the modules would round them.

        None if those are too many rows for one call.
        """
        if len(ids_B1) > self._rows_at_once(attend):
            return None
        cache, places = self._cache(attend.cache), _places(attend)
        return native.step(self._model, cache, places, ids_B1, table.linear.matrix, head.matrix, _DTYPES[table.dtype])

    def _rows_at_once(self, attend: CachedAttend) -> int:
        row_bytes = 4 * self._model.num_heads * (self._model.head_dim + 2) * (attend.end // _CHUNK_SLOTS + 1)
        return max(1, min(_MAX_ROWS, _MAX_PARTS_BYTES // row_bytes))

    def _layer(self, layer: nn.Module) -> native.Layer:
        norms = ("input_layernorm", "post_attention_layernorm")
        addresses = [layer.get_submodule(name).get_parameter("weight").data_ptr() for name in norms]
        matrices = {key: self._matrix(layer.get_submodule(name)) for key, name in _LINEARS.items()}
        return native.Layer(*addresses, **matrices)

    def _matrix(self, linear: nn.Module) -> native.Matrix:
        if isinstance(linear, LinearPacked):
            return linear.matrix
        weight = linear.get_parameter("weight")
        return native.Matrix(native.Kind.BF16, *weight.shape, weight.data_ptr(), None)

    def _cache(self, cache: KVCache) -> native.Cache:
        """Describe a cache, anew where its tensors are others than at the last pass."""
        known = self._caches.get(cache)
        if known is None or known[0] is not cache.k:
            _, kv_heads, slots, head_dim = cache.k[0].shape
            found = (len(cache.k), kv_heads, head_dim)
            expected = (self._model.num_layers, self._model.num_kv_heads, self._model.head_dim)
            if found != expected:
                raise InputError(
                    f"the cache has {found[0]} layers of {found[1]} heads of {found[2]}; expected {expected[0]} layers "
                    f"of {expected[1]} heads of {expected[2]}, as the model has"
                )
            described = native.Cache(
                _CACHE_DTYPES[cache.k[0].dtype], kv_heads * slots * head_dim, slots * head_dim,
                *map(native.pointers, (cache.k, cache.v, cache.k_scales, cache.v_scales)),
            )  # fmt: skip
            known = self._caches[cache] = (cache.k, described)
        return known[1]


class NativeLlamaModel(LlamaModel):
    """A `LlamaModel` whose passes over a cache are run by a plan.

    Attributes:
        plan: None in a copy, until its first pass.
        deterministic: Whether the plan takes all passes, and those that it cannot take are refused.
    """

    plan: Plan | None
    deterministic: bool = False

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Return the normalised hidden states (B, T, D).

        Raises:
            InputError: If the model is to be deterministic, and this pass is one for the modules.
        """
        if self.plan is None and _can_run(self):  # a copy, which has come without
            self.plan = Plan(self)
        is_here = self.embed_tokens.weight.device.type == "cpu"
        serves = self.plan is not None and is_here and self.plan.serves(ids_BT)
        cached = self._cached(ids_BT, positions_BT, attend) if serves else None
        if self.plan is None or cached is None:
            if self.deterministic:
                raise InputError(
                    "this pass has an adapter, a hook, a gradient, a recorder or packed rows, or the model was "
                    "changed, moved or cast, which the C kernels do not take; load the model without deterministic"
                )
            return super().forward(ids_BT, positions_BT, attend)
        with one_torch_thread():
            x_BTD = self.embed_tokens(ids_BT)
            hidden_MD = x_BTD.flatten(0, 1).to(torch.float32, copy=True)
            self.plan.run(hidden_MD, cached)
            return hidden_MD.view(x_BTD.shape).to(x_BTD.dtype)

    def _cached(self, ids_BT: Tensor, positions_BT: Tensor, attend: Attend) -> CachedAttend | None:
        """Return the attend if it keeps its keys, one that keeps them for this pass if it is causal, else None."""
        if type(attend) is CachedAttend:
            is_known = attend.cache.k[0].dtype in _CACHE_DTYPES and _stands_there(ids_BT, positions_BT, attend)
            return attend if is_known else None
        if type(attend) is not CausalAttend or attend.segments_BT is not None or attend.bidirectional:
            return None
        batch, num_tokens = ids_BT.shape
        if not bool((positions_BT == torch.arange(num_tokens)).all()):
            return None
        config = self.rotary_emb.config
        cache = KVCache(
            num_layers=len(self.layers),
            batch_size=batch,
            num_slots=num_tokens,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.norm.weight.dtype,
        )
        return CachedAttend(cache, [0] * batch, num_tokens)

    def _get_name(self) -> str:
        return "LlamaModel"  # the module tree that people know


def _stands_there(ids_BT: Tensor, positions_BT: Tensor, attend: CachedAttend) -> bool:
    """Whether tokens stand where the attend puts them.

    Raises:
        InputError: If they are not as many as it was made for.
    """
    if ids_BT.shape != attend.positions_BT.shape:
        (rows, tokens), (own_rows, own_tokens) = ids_BT.shape, attend.positions_BT.shape
        raise InputError(f"ids are {rows} rows of {tokens}; expected {own_rows} of {own_tokens}, as the attend has")
    return positions_BT is attend.positions_BT or torch.equal(positions_BT, attend.positions_BT)


class NativeLlamaForCausalLM(LlamaForCausalLM):
    """A `LlamaForCausalLM` that decodes in one call of C, where its embedding and its head are packed too.

    Between two calls of C a step touches as little as it can: what it touches has left the caches since the last one.
    """

    def next_logits(self, ids_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Return the logits of what follows each row's last token, (B, V); float32 from C."""
        trunk, head = self.model, cast(nn.Module, self.lm_head)
        table = cast(nn.Module, trunk.embed_tokens)
        plan = trunk.plan if isinstance(trunk, NativeLlamaModel) else None
        if (
            plan is not None
            and type(table) is EmbeddingPacked
            and type(head) is LinearPacked
            and type(attend) is CachedAttend
            and ids_BT.shape[1] == 1
            and ids_BT.dtype is torch.int64
            and table.dtype in _DTYPES
            and attend.cache.k[0].dtype in _CACHE_DTYPES
            and head.uses_kernels
            and head.weight.device.type == table.weight.device.type == "cpu"
            and not any((*_hooks_of(table), *_hooks_of(head), *_hooks_of(trunk)))
            and _stands_there(ids_BT, positions_BT, attend)
            and plan.serves(ids_BT)
        ):
            logits_BV = plan.step(ids_BT, attend, table, head)
            if logits_BV is not None:
                return logits_BV
        return super().next_logits(ids_BT, positions_BT, attend)

    def _get_name(self) -> str:
        return "LlamaForCausalLM"


def use_kernels(model: LlamaForCausalLM) -> bool:
    """Give a model on the CPU a plan, in place, if the C kernels are there and can multiply all of its Linears."""
    trunk = model.model
    if native.library() is None or not _can_run(trunk):
        return False
    plan = Plan(trunk)
    trunk.__class__ = NativeLlamaModel
    cast(NativeLlamaModel, trunk).plan = plan
    if type(model) is LlamaForCausalLM:
        model.__class__ = NativeLlamaForCausalLM
    return True


def make_deterministic(model: LlamaForCausalLM) -> bool:
    """Let the kernels take every pass of a model with a plan, and its head, in place.

    Returns:
        Whether they can; each row's bits are then those that it has alone.
    """
    trunk, head = model.model, cast(nn.Module, model.lm_head)
    if not isinstance(trunk, NativeLlamaModel) or not _can_multiply(head):
        return False
    if isinstance(head, nn.Linear):
        kernel = KernelLinear(head.in_features, head.out_features, device="meta")
        kernel.weight = head.weight
        model.lm_head = kernel
    trunk.deterministic = True
    trunk.plan = Plan(trunk)
    return True


def exact_tokens(model: LlamaForCausalLM) -> int | None:
    """Return how many tokens a pass over a cache may have, so that each comes out as it would alone, to the bit.

    None is any number, and 1 is what PyTorch promises: its products round otherwise for several tokens than for one.
    """
    trunk = model.model
    plan = trunk.plan if isinstance(trunk, NativeLlamaModel) else None
    with torch.no_grad():
        return plan.max_rows if plan is not None and plan.serves(torch.zeros(1, 1, dtype=torch.int64)) else 1


def multiplied_by(model: LlamaForCausalLM) -> dict[str, str]:
    """Say what multiplies each Linear's weight, by its key: C with its set of kernels, PyTorch, or which when."""
    kernels = native.kernels()
    planned = set[nn.Module]() if getattr(model.model, "plan", None) is None else set(_linears(model.model))
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Linear, QuantizedLinear)):
            tiles = isinstance(module, LinearPacked)
            by_c = module.uses_kernels and module.weight.device.type == "cpu" if tiles else module in planned
            c = f"C ({kernels})" if tiles else f"C ({kernels}) up to {_MAX_ROWS_UNPACKED} tokens, else PyTorch"
            found[f"{name}.weight"] = c if by_c and kernels is not None else "PyTorch"
    return found


def unfit_linears(model: LlamaForCausalLM) -> list[str]:
    """Return the names of the Linears whose rows the kernels cannot cut into groups, each with its columns."""
    linears = ((name, module) for name, module in model.named_modules() if hasattr(module, "in_features"))
    sizes = ((name, int(cast(Any, module).in_features)) for name, module in linears)
    return [f"{name} ({columns} columns)" for name, columns in sizes if columns % GROUP]


def _can_run(trunk: LlamaModel) -> bool:
    """Whether there are as many layers as a cache has, and the kernels can multiply all of their Linears."""
    if len(trunk.layers) != trunk.rotary_emb.config.num_hidden_layers:
        return False
    norms = [module.weight for module in trunk.modules() if isinstance(module, LlamaRMSNorm)]
    if any(weight.device.type != "cpu" or weight.dtype is not norms[0].dtype for weight in norms):
        return False
    return norms[0].dtype in _DTYPES and all(map(_can_multiply, _linears(trunk)))


def _can_multiply(linear: nn.Module) -> bool:
    if isinstance(linear, LinearPacked):
        return linear.uses_kernels
    weight = linear.weight if isinstance(linear, nn.Linear) else None
    return (
        weight is not None
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and weight.shape[1] % GROUP == 0
    )


# --- what a plan watches ----------------------------------------------------------------------------------------------
# The dicts of nn.Module are private, and asked a hundred times faster than its attributes; a plan looks at each pass.


def _places(attend: CachedAttend) -> list[tuple[int, int]]:
    """Return each token's row and slot of the cache."""
    return [(row, start + i) for row, start in enumerate(attend.starts) for i in range(attend.num_tokens)]


def _linears(trunk: LlamaModel) -> list[nn.Module]:
    return [layer.get_submodule(name) for layer in trunk.layers for name in _LINEARS.values()]


def _weighted(trunk: LlamaModel) -> list[nn.Module]:
    return [*_linears(trunk), *(module for module in trunk.modules() if isinstance(module, LlamaRMSNorm))]


def _children(trunk: LlamaModel) -> Iterator[tuple[dict[str, nn.Module | None], str, nn.Module | None]]:
    """Yield every child that a pass goes through, and where its parent keeps it."""
    for module in (trunk, *trunk.layers.modules()):
        for name, child in module._modules.items():  # pyright: ignore[reportPrivateUsage]
            if child is not trunk.embed_tokens:
                yield module._modules, name, child  # pyright: ignore[reportPrivateUsage]


def _hooks(trunk: LlamaModel) -> Iterator[Mapping[int, object]]:
    yield from (_global_forward_hooks, _global_forward_pre_hooks)
    for module in (trunk.norm, trunk.rotary_emb, *trunk.layers.modules()):
        yield from _hooks_of(module)


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, object], Mapping[int, object]]:
    return module._forward_hooks, module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]


def _tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Return the dict that holds a module's weight."""
    held = module._parameters if "weight" in module._parameters else module._buffers  # pyright: ignore[reportPrivateUsage]
    return cast("Mapping[str, Tensor]", held)
