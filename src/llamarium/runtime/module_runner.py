"""The PyTorch runner: any device and dtype, with adapters and hooks. The reference for the others.

Taps are hooks on a shell of the model (`runtime/shell.py`), so concurrent requests on the same weights are neither
slowed nor recorded. A caller's own hooks on the model still run.
"""

# ruff: noqa: D102 - `Runner` documents its methods

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn

from llamarium.attention.paged import PagedAttend, PagedCache, Segment, find_slots
from llamarium.config import ModelConfig
from llamarium.errors import InputError, OptionError
from llamarium.kernels import native
from llamarium.kernels.input_bits import InputBits
from llamarium.kernels.step_priority import pause
from llamarium.kernels.threads import one_torch_thread
from llamarium.model import LlamaForCausalLM
from llamarium.model.llama import LlamaDecoderLayer
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.quant.codes import Codes, codes_of_blocks, unpack_rows
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.ggml.linear import LinearGGML
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.nf4_state import LEVELS
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.runner import Cache, CacheDtype, Floats, HeldWeight, Logits
from llamarium.runtime.shell import hook_edit, hook_norms, on_host, or_nan, shell_of, watch
from llamarium.runtime.taps import Taps

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class ModuleRunner:
    """Runs a model's modules in their current state."""

    is_row_exact: bool = False
    is_native: bool = False
    takes_edits: bool = True
    adapters: None = None
    addresses: tuple[int, ...] = ()

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def input_bits(self) -> InputBits | None:
        packed = (module for module in self.model.modules() if isinstance(module, LinearPacked) and module.uses_kernels)
        return next((module.input_bits for module in packed), None) if self.device == "cpu" else None

    @property
    def device(self) -> str:
        return str(self.model.device)

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> str:
        return self.dtype

    @property
    def name(self) -> str:
        return f"PyTorch in {self.dtype} on {self.device}"

    @property
    def weights(self) -> Mapping[str, HeldWeight]:
        """All weights by key, without adapters and a tied head."""
        by_key: dict[str, HeldWeight] = {}
        tied = self.model.config.tie_word_embeddings
        for name, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and not (tied and name == "lm_head"):
                key = f"{name.replace('.base_layer', '')}.weight"
                tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                bias = getattr(module, "bias", None)
                num_bytes = sum(tensor.nbytes for tensor in tensors if not tensor.is_meta and tensor is not bias)
                by_key[key] = HeldWeight(key, _type_name(module), _shape(module), num_bytes)
                if isinstance(bias, Tensor):
                    bias_key, type_name = f"{key.removesuffix('.weight')}.bias", _float_name(bias)
                    by_key[bias_key] = HeldWeight(bias_key, type_name, tuple(bias.shape), bias.nbytes)
        return by_key

    @torch.no_grad()
    def dequantize(self, key: str, rows: Sequence[int] | None = None, *, adapted: bool = False) -> Floats:
        if key.endswith(".bias"):
            return on_host(cast(Tensor, self._module(key).bias))
        module = self._module(key)
        outer: Any = self.model.get_submodule(key.rpartition(".")[0])
        if adapted and hasattr(outer, "base_layer") and getattr(outer, "enabled", False):
            weight = torch.cat([part for _, _, part in outer.merged_rows()])
        elif isinstance(module, QuantizedEmbedding) and rows is not None:
            exact = shell_of(module)
            exact.dtype = torch.float32  # affects only this shell
            return on_host(exact(torch.tensor(list(rows), device=self.model.device)))
        elif isinstance(module, QuantizedLinear | QuantizedEmbedding):
            weight = module.dequantize()
        else:
            weight = cast(Tensor, module.weight)
        return on_host(weight if rows is None else weight[torch.tensor(list(rows), device=weight.device)])

    @torch.no_grad()
    def product(self, key: str, x_MI: Floats) -> Floats:
        """See `Runner.product`; a quantized Linear gets float32 inputs, as in the C kernels."""
        module, base = self.model.get_submodule(key.removesuffix(".weight")), self._module(key)
        x = torch.from_numpy(x_MI).to(self.model.device)
        x = x if isinstance(base, QuantizedLinear | QuantizedEmbedding) else x.to(self.model.dtype)
        with threads_for(self.model):
            if isinstance(module, EmbeddingPacked):
                return on_host(module.linear(x))
            if isinstance(module, QuantizedEmbedding):
                return on_host(nn.functional.linear(x, module.dequantize()))
            if isinstance(module, nn.Embedding):
                return on_host(nn.functional.linear(x, module.weight))
            out, bias = on_host(module(x)), getattr(base, "bias", None)
            return out if bias is None else out - on_host(bias)

    def codes(self, key: str, rows: Sequence[int]) -> Codes:
        module = self._module(key)
        return _codes_of(module.linear if isinstance(module, EmbeddingPacked) else module, rows)

    @torch.no_grad()
    def read_stream(self, x_MD: Floats) -> Floats:
        head = getattr(self.model.lm_head, "base_layer", self.model.lm_head)
        dtype = torch.float32 if isinstance(head, QuantizedLinear) else self.model.dtype
        with threads_for(self.model):
            x = torch.from_numpy(x_MD).to(self.model.device, dtype)
            return on_host(self.model.logits(or_nan(x, self.model.model.norm(x))))

    def backend_of(self, key: str) -> str:
        """Return the display name of the backend of a matrix: C for packed Linears, PyTorch for others."""
        in_c = getattr(self._module(key), "uses_kernels", False) and native.library() is not None
        return f"C ({native.kernels()})" if in_c and self.device == "cpu" else "PyTorch"

    def with_adapters(self, adapters: Sequence[Any], default: int = -1) -> NoReturn:
        """Raise an OptionError: modules have at most the one adapter that was loaded."""
        raise OptionError(
            "several adapters at once need a model that the C kernels run (`llamarium doctor`); load a single one with "
            "load(adapter=...), or merge it"
        )

    def fresh(self) -> "ModuleRunner":
        return ModuleRunner(self.model)

    def _module(self, key: str) -> nn.Module:
        """Return the base module of a weight; KeyError if there is none."""
        try:
            module = self.model.get_submodule(key.rpartition(".")[0])
        except AttributeError:
            raise KeyError(key) from None
        return cast(nn.Module, getattr(module, "base_layer", module))

    def new_cache(self, num_blocks: int, dtype: CacheDtype = "auto", block_size: int = BLOCK_SIZE) -> PagedCache:
        """Return a KV cache on the model's device; InputError if two layers have the same `layer_idx`."""
        config = self.model.config
        return PagedCache(
            num_layers=self._num_kept_layers(),
            num_blocks=num_blocks,
            block_size=block_size,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.model.dtype,
            kept=dtype,
            device=self.model.device,
        )

    def _num_kept_layers(self) -> int:
        """Return how many layers the KV cache needs; after layers were removed, the others keep their numbers."""
        numbers = [cast(LlamaDecoderLayer, layer).self_attn.layer_idx for layer in self.model.model.layers]
        if len(set(numbers)) < len(numbers):
            raise InputError(
                f"layers have the indices {numbers}, so some would overwrite the keys and values of others; set a "
                "different self_attn.layer_idx for each copied layer (copy.deepcopy)"
            )
        return max(numbers, default=-1) + 1

    @torch.inference_mode()
    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens; see `Runner.run`.

        With taps, each row of logits is a separate product, as for a request that runs alone: PyTorch rounds a product
        of several rows differently.

        Raises:
            InputError: If the KV cache belongs to another model.
        """
        if not isinstance(cache, PagedCache) or len(cache.k) != self._num_kept_layers():
            raise InputError("the KV cache belongs to another model; expected one from this runner's new_cache")
        if batch.adapters is not None:
            raise InputError("PyTorch modules use the same adapter for every sequence; leave out the request's adapter")
        with threads_for(self.model):
            return self._run(batch, cache, taps)

    def _run(self, batch: Batch, cache: PagedCache, taps: Taps | None) -> Logits:
        device = self.model.device
        ids_1M = torch.from_numpy(batch.token_ids).to(device).unsqueeze(0)
        positions_1M = torch.from_numpy(batch.positions).to(device, torch.int64).unsqueeze(0)
        rows_W = torch.from_numpy(batch.logit_rows).to(device, torch.int64)
        attend = _Attend(PagedAttend(cache, _segments(batch, cache), self.config.sliding_window), taps)
        model = self.model if taps is None and batch.edits is None else shell_of(self.model)
        _hook_edits(model, batch)
        if taps is not None:
            watch(model, taps)
        attributes = vars(model)  # calling the parts of a hooked or patched model would skip its hooks
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"] or "forward" in attributes:
            return _on_host(model(ids_1M, positions_1M, attend)[0][rows_W])
        hidden_WD = model.model(ids_1M, positions_1M, attend)[0][rows_W]
        if taps is None:
            return _on_host(self.model.logits(hidden_WD))
        rows = [self.model.logits(hidden_1D) for hidden_1D in hidden_WD.split(1)]
        return _on_host(torch.cat(rows) if rows else self.model.logits(hidden_WD))


@torch.no_grad()
def _codes_of(linear: nn.Module, rows: Sequence[int]) -> Codes:
    """Return some rows of a Linear as codes and scales; InputError if its format has none."""
    if isinstance(linear, LinearPacked):
        return unpack_rows(linear.weight.cpu().numpy(), np.array(rows, np.int64), linear.format)
    row_list = list(rows)
    if isinstance(linear, LinearGGML) and linear.type_name in PACKED_FORMATS:
        return codes_of_blocks(linear.weight[row_list].cpu().numpy(), linear.type_name)
    if isinstance(linear, Linear4bit):
        places_RC = np.array(row_list)[:, None] * linear.in_features + np.arange(linear.in_features)
        bytes_RC = linear.weight.cpu().numpy().reshape(-1)[places_RC // 2].astype(np.int64)
        codes = np.where(places_RC % 2 == 0, bytes_RC >> 4, bytes_RC & 15)  # the first in the high half
        return Codes("NF4", LEVELS, codes, on_host(linear.scales())[places_RC // linear.layout.block_size])
    if isinstance(linear, nn.Linear | nn.Embedding):
        raise InputError("the weight is not quantized, so it has no codes; load the model with quantize")
    raise InputError(f"{_type_name(linear)} codes are not supported; expected NF4 or {', '.join(PACKED_FORMATS)}")


def _type_name(module: nn.Module) -> str:
    name = getattr(module, "type_name", None)
    if isinstance(name, str):
        return name
    return _float_name(cast(Tensor, module.weight))


def _float_name(weight: Tensor) -> str:
    return _FLOATS.get(weight.dtype, str(weight.dtype).removeprefix("torch."))


def _shape(module: nn.Module) -> tuple[int, ...]:
    for names in (("out_features", "in_features"), ("num_embeddings", "embedding_dim")):
        if hasattr(module, names[0]):
            return tuple(int(getattr(module, name)) for name in names)
    return tuple(cast(Tensor, module.weight).shape)


def threads_for(model: LlamaForCausalLM) -> AbstractContextManager[None]:
    """Return a context that limits PyTorch to one thread if the C kernels multiply.

    The kernels have their own threads, and the operations left to PyTorch are small: its threads would only take cores
    from the kernels while they wait for each other.
    """
    is_packed = any(isinstance(module, LinearPacked) for module in model.modules())
    return one_torch_thread() if is_packed else nullcontext()


def _hook_edits(shell: LlamaForCausalLM, batch: Batch) -> None:
    """Hook the edits of a batch, each restricted to the tokens of its sequence."""
    if batch.edits is not None:
        hook_norms(shell)
    for row, edits in enumerate(batch.edits or ()):
        for edit in edits:
            at_M = batch.sequences == row
            at_M = at_M if edit.positions is None else at_M & np.isin(batch.positions, edit.positions)
            at_1M = torch.from_numpy(at_M).to(shell.model.embed_tokens.weight.device).unsqueeze(0)
            hook_edit(shell, edit, lambda at_1M=at_1M: at_1M)


def _on_host(logits_WV: Tensor) -> Logits:
    """Return logits as a float32 numpy array if they are on the CPU, else unchanged."""
    return logits_WV.float().numpy() if logits_WV.device.type == "cpu" else logits_WV


def _segments(batch: Batch, cache: PagedCache) -> list[Segment]:
    """Return each sequence's tokens in the packed row and its slots in the KV cache; InputError for a bad batch."""
    borders = np.flatnonzero(np.diff(batch.sequences)) + 1
    segments: list[Segment] = []
    for begin, end in zip([0, *borders.tolist()], [*borders.tolist(), len(batch.sequences)], strict=True):
        start, table = int(batch.positions[begin]), batch.block_tables[batch.sequences[begin]].tolist()
        used_blocks = table[: -(-(start + end - begin) // cache.block_size)]
        follow = (np.diff(batch.positions[begin:end]) == 1).all()
        if not follow or start + end - begin > len(table) * cache.block_size or max(used_blocks) >= cache.num_blocks:
            raise InputError("the batch has positions that are not consecutive, or blocks outside the KV cache")
        slots = find_slots(table, cache.block_size, start + end - begin, cache.device)
        segments.append(Segment(slice(begin, end), start, slots))
    return segments


class _Attend:
    """An `Attend` that hands out tapped queries, and lets engine steps run between layers (`pause`)."""

    def __init__(self, inner: PagedAttend, taps: Taps | None) -> None:
        self._inner, self._taps = inner, taps

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        pause()
        if self._taps is not None:
            self._taps.put(("q_rot", layer_idx), on_host(q_BTNH[0]))
        return self._inner(layer_idx, q_BTNH, k_BTKH, v_BTKH)
