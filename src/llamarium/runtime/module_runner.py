"""The modules themselves as a runner: any device, any dtype, adapters, hooks. The reference of all others.

Taps are read by hooks on a shell of the model (`runtime/shell.py`), so a request on the same weights at the same moment
is neither slowed nor recorded. Hooks that a caller has put on the model run all the same: they are part of what the
model computes.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
from torch import Tensor

from llamarium.attention.paged import PagedAttend, PagedCache, Segment, find_slots
from llamarium.config import ModelConfig
from llamarium.errors import InputError
from llamarium.kernels.threads import one_torch_thread
from llamarium.model import LlamaForCausalLM
from llamarium.model.llama import LlamaDecoderLayer
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.batch import BLOCK_SIZE, Batch
from llamarium.runtime.runner import Cache, CacheDtype, Logits
from llamarium.runtime.shell import shell_of, watch
from llamarium.runtime.taps import Taps


class ModuleRunner:
    """Runs a model's modules.

    Attributes:
        model: As it is at each request.
    """

    is_row_exact: bool = False

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config

    @property
    def device(self) -> str:
        """Where the model computes."""
        return str(self.model.device)

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> str:
        """What it keeps keys and values in: as it computes."""
        return self.dtype

    @property
    def name(self) -> str:
        """What computes, for people."""
        return f"PyTorch in {self.dtype} on {self.device}"

    def new_cache(self, num_blocks: int, dtype: CacheDtype = "auto", block_size: int = BLOCK_SIZE) -> PagedCache:
        """Return an empty cache on the model's device; see `Runner.new_cache`.

        Raises:
            InputError: If two layers would keep their keys and values in the same place.
        """
        config = self.model.config
        return PagedCache(
            num_layers=self._num_kept_layers(),
            num_blocks=num_blocks,
            block_size=block_size,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=torch.int8 if dtype == "int8" else self.model.dtype,
            device=self.model.device,
        )

    def _num_kept_layers(self) -> int:
        """How many layers a cache needs; somebody may have taken some out, and each keeps its own number."""
        numbers = [cast(LlamaDecoderLayer, layer).self_attn.layer_idx for layer in self.model.model.layers]
        if len(set(numbers)) < len(numbers):
            raise InputError(
                f"layers have the numbers {numbers}, so some would overwrite others' keys and values; give each copy "
                "its own (copy.deepcopy, then self_attn.layer_idx)"
            )
        return max(numbers, default=-1) + 1

    def _whole(self, ids_1M: Tensor, positions_1M: Tensor, attend: PagedAttend, taps: Taps | None) -> Tensor:
        """Call the model itself: the logits of all tokens, (M, V)."""
        if taps is None:
            return self.model(ids_1M, positions_1M, attend)[0]
        shell = shell_of(self.model)
        watch(shell, taps)
        return shell(ids_1M, positions_1M, _TappedAttend(attend, taps))[0]

    @torch.inference_mode()
    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Logits:
        """Run the batch's tokens; see `Runner.run`.

        Each row of logits that is tapped is a product of its own, as it is when a request is answered alone: PyTorch
        rounds a product of several rows otherwise.

        Raises:
            InputError: If the cache is not one of this model's.
        """
        if not isinstance(cache, PagedCache) or len(cache.k) != self._num_kept_layers():
            raise InputError("the cache is another model's; expected one that this runner's new_cache made")
        if batch.adapters is not None:
            raise InputError("the modules have the adapter that was put on them, for every sequence; name none")
        with threads_for(self.model):
            return self._run(batch, cache, taps)

    def _run(self, batch: Batch, cache: PagedCache, taps: Taps | None) -> Logits:
        device = self.model.device
        ids_1M = torch.from_numpy(batch.token_ids).to(device).unsqueeze(0)
        positions_1M = torch.from_numpy(batch.positions).to(device, torch.int64).unsqueeze(0)
        rows_W = torch.from_numpy(batch.logit_rows).to(device, torch.int64)
        attend = PagedAttend(cache, _segments(batch, cache))
        if _is_called_whole(self.model):
            return _on_host(self._whole(ids_1M, positions_1M, attend, taps)[rows_W])
        if taps is None:
            hidden_WD = self.model.model(ids_1M, positions_1M, attend)[0][rows_W]
            return _on_host(self.model.logits(hidden_WD))
        shell = shell_of(self.model)
        watch(shell, taps)
        hidden_WD = shell.model(ids_1M, positions_1M, _TappedAttend(attend, taps))[0][rows_W]
        rows = [self.model.logits(hidden_1D) for hidden_1D in hidden_WD.split(1)]
        return _on_host(torch.cat(rows) if rows else self.model.logits(hidden_WD))


def threads_for(model: LlamaForCausalLM) -> AbstractContextManager[None]:
    """Return the block in which modules are run: with one thread for PyTorch where the C kernels multiply.

    They have threads of their own, and what is left to PyTorch is small: its threads would wait for each other, and
    take the cores from the kernels meanwhile.
    """
    is_packed = any(isinstance(module, LinearPacked) for module in model.modules())
    return one_torch_thread() if is_packed else nullcontext()


def _is_called_whole(model: LlamaForCausalLM) -> bool:
    """Whether somebody has hooked or patched the model itself, which would not be seen by calling its parts."""
    own = vars(model)
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own)


def _on_host(logits_WV: Tensor) -> Logits:
    """Logits as float32 of numpy on a CPU; elsewhere they stay where they are."""
    return logits_WV.float().numpy() if logits_WV.device.type == "cpu" else logits_WV


def _segments(batch: Batch, cache: PagedCache) -> list[Segment]:
    """Return where each sequence's tokens are in the packed row, and where its past lies."""
    borders = np.flatnonzero(np.diff(batch.sequences)) + 1
    segments: list[Segment] = []
    for begin, end in zip([0, *borders.tolist()], [*borders.tolist(), len(batch.sequences)], strict=True):
        start, table = int(batch.positions[begin]), batch.block_tables[batch.sequences[begin]].tolist()
        used = table[: -(-(start + end - begin) // cache.block_size)]
        follow = (np.diff(batch.positions[begin:end]) == 1).all()
        if not follow or start + end - begin > len(table) * cache.block_size or max(used) >= cache.num_blocks:
            raise InputError("the batch names positions that do not follow each other, or blocks that the cache lacks")
        slots = find_slots(table, cache.block_size, start + end - begin, cache.device)
        segments.append(Segment(slice(begin, end), start, slots))
    return segments


class _TappedAttend:
    """An `Attend` whose rotated queries are handed out."""

    def __init__(self, inner: PagedAttend, taps: Taps) -> None:
        self._inner, self._taps = inner, taps

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        self._taps.put(("q_rot", layer_idx), q_BTNH[0])
        return self._inner(layer_idx, q_BTNH, k_BTKH, v_BTKH)
