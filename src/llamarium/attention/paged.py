"""Attention over a paged cache: sequences of any lengths, packed into one row of tokens.

A cache is a number of slots, in blocks; a sequence's position p lies in the slot that its block table names. So
sequences grow without being moved, share what they have in common, and leave without a gap. The model sees one row of
M tokens, whichever sequences they belong to; each sequence's queries see its own slots, and nothing else.

At a long context it is the cache that a token's time goes into: 8,000 tokens of Llama 3.2 1B are 262 MB in bfloat16,
and every new token reads all of it. Kept in 8 bits it is little more than half: each key and each value, a vector of
head_dim, becomes whole numbers from -127 to 127 and one scale. Keys are rounded after their rotation.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from llamarium.attention.base import attend_fused, causal_mask
from llamarium.errors import InputError
from llamarium.kernels.memory import no_room, reserve

SCALE_DTYPE = torch.float32
"""Of a key's or value's scale, in a cache of 8 bits."""


class PagedCache:
    """Keys and values of every layer, in blocks of slots; of dtype torch.int8 codes and scales.

    Raises:
        MemoryBudgetError: If there is not that much memory.

    Attributes:
        k: L tensors of (slots, K, H): a sequence whose blocks lie side by side is read where it lies.
        v: The same for the values.
        k_scales: With int8, L tensors of (slots, K, 1), float32: keys are k * k_scales. Else nothing.
        v_scales: The same for the values.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_key_value_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size, self.dtype, self.device = block_size, dtype, torch.device(device)
        self._num_layers, self._heads = num_layers, (num_key_value_heads, head_dim)
        self._allocate(num_blocks)

    def _allocate(self, num_blocks: int) -> None:
        slots, (heads, head_dim) = num_blocks * self.block_size, self._heads
        num_scaled = self._num_layers if self.dtype is torch.int8 else 0
        try:
            self.k, self.v = (
                [self._zeros(slots, heads, head_dim, self.dtype) for _ in range(self._num_layers)] for _ in "kv"
            )
            self.k_scales, self.v_scales = (
                [self._zeros(slots, heads, 1, SCALE_DTYPE) for _ in range(num_scaled)] for _ in "kv"
            )
        except (RuntimeError, MemoryError):
            bytes_per_vector = head_dim * self.dtype.itemsize + (SCALE_DTYPE.itemsize if num_scaled else 0)
            raise no_room(slots, 2 * self._num_layers * slots * heads * bytes_per_vector) from None
        self.num_blocks = num_blocks

    def _zeros(self, slots: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        if self.device.type != "cpu" or slots == 0:
            return torch.zeros(slots, heads, width, dtype=dtype, device=self.device)
        taken = torch.from_numpy(reserve((slots * heads * width * dtype.itemsize,), np.uint8))
        return taken.view(dtype).view(slots, heads, width)

    @property
    def num_bytes(self) -> int:
        """What keys and values together occupy once all slots are used, scales included."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, *self.k_scales, *self.v_scales]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's content to another, in all layers."""
        for tensor in self._tensors():
            blocks = tensor.unflatten(0, (-1, self.block_size))
            blocks[target] = blocks[source]

    def grow(self, num_blocks: int) -> None:
        """Become larger; what the blocks hold stays. Where that fails or is interrupted, the cache is as it was.

        MemoryBudgetError if there is not that much memory.
        """
        larger = copy.copy(self)
        larger._allocate(num_blocks)
        for new, kept in zip(larger._tensors(), self._tensors(), strict=True):
            new[: len(kept)] = kept
        vars(self).update(vars(larger))

    def read(
        self, layer_idx: int, blocks: Sequence[int], num_slots: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the keys and values of a sequence's first positions: (S, K, H) each, float32."""
        slots = find_slots(blocks, self.block_size, num_slots, self.device)
        k_SKH, v_SKH = self.at(layer_idx, slots, torch.float32)
        return k_SKH.float().cpu().numpy(), v_SKH.float().cpu().numpy()  # sync: to hand out

    def at(self, layer_idx: int, slots: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of some slots, (S, K, H) each; of int8 as numbers of `dtype`."""
        k_SKH, v_SKH = self.k[layer_idx][slots], self.v[layer_idx][slots]
        if not self.k_scales:
            return k_SKH, v_SKH
        k_scale_SK1, v_scale_SK1 = self.k_scales[layer_idx][slots], self.v_scales[layer_idx][slots]
        return (k_SKH * k_scale_SK1).to(dtype), (v_SKH * v_scale_SK1).to(dtype)

    def put(self, layer_idx: int, slots: slice | Tensor, k_MKH: Tensor, v_MKH: Tensor) -> None:
        """Keep keys and values of M tokens in these slots."""
        for kept, scales, new_MKH in ((self.k, self.k_scales, k_MKH), (self.v, self.v_scales, v_MKH)):
            if scales:
                new_MKH, scale_MK1 = to_codes(new_MKH)
                scales[layer_idx][slots] = scale_MK1
            kept[layer_idx][slots] = new_MKH


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one sequence in a packed row.

    Attributes:
        rows: Where they are in the row.
        start: The first one's position; the others follow it.
        slots: Of all positions of the sequence, up to the last of these tokens: (S,), or the slice that they are.
    """

    rows: slice
    start: int
    slots: slice | Tensor

    @property
    def end(self) -> int:
        """S: positions that the last of them sees."""
        return self.start + self.rows.stop - self.rows.start


class PagedAttend:
    """Attention of one packed row, with a segment for each sequence, over a `PagedCache`; holds for one pass.

    Earlier passes have filled all positions before the segments that a window, where there is one, leaves in sight.
    """

    def __init__(self, cache: PagedCache, segments: Sequence[Segment], window: int | None = None) -> None:
        self.cache, self.segments, self.window = cache, segments, window
        self._new = [_from(segment.slots, segment.start, segment.end) for segment in segments]
        self._masks: dict[int, Tensor] = {}

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Store k and v, then return (1, M, N, H).

        InputError if the tokens are not one packed row of the segments' tokens.
        """
        if q_BTNH.shape[:2] != (1, self.segments[-1].rows.stop):
            expected = (1, self.segments[-1].rows.stop)
            raise InputError(f"{tuple(q_BTNH.shape[:2])} tokens; expected {expected}, as the segments have")
        for segment, slots in zip(self.segments, self._new, strict=True):
            self.cache.put(layer_idx, slots, k_BTKH[0, segment.rows], v_BTKH[0, segment.rows])
        parts = [self._attend(layer_idx, i, one, q_BTNH[:, one.rows]) for i, one in enumerate(self.segments)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _attend(self, layer_idx: int, i: int, segment: Segment, q_1TNH: Tensor) -> Tensor:
        first = 0 if self.window is None else max(0, segment.start + 1 - self.window)  # what the first query sees
        slots = _from(segment.slots, first, segment.end)
        k_1SKH, v_1SKH = (kept.unsqueeze(0) for kept in self.cache.at(layer_idx, slots, q_1TNH.dtype))
        if segment.end == segment.start + 1:
            return _decode(q_1TNH, k_1SKH.transpose(1, 2), v_1SKH.transpose(1, 2))
        is_whole = segment.start == 0 and (self.window is None or self.window >= segment.end)
        if not is_whole and i not in self._masks:  # (T, S)
            positions_S = torch.arange(first, segment.end, device=self.cache.device)
            self._masks[i] = causal_mask(positions_S[segment.start - first :], positions_S, self.window)
        return attend_fused(q_1TNH, k_1SKH, v_1SKH, self._masks.get(i), is_causal=is_whole)


def _decode(q_11NH: Tensor, k_1KSH: Tensor, v_1KSH: Tensor) -> Tensor:
    """One token: the G query heads of a group stand where tokens stand, so no key is read twice."""
    q_1KGH = q_11NH.view(1, k_1KSH.shape[1], -1, q_11NH.shape[-1])
    return F.scaled_dot_product_attention(q_1KGH, k_1KSH, v_1KSH).reshape(q_11NH.shape)


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors (..., H) to codes (..., H), int8, and scales (..., 1), float32, so that x is about codes * scale.

    The scale is the largest magnitude over 127; codes are rounded to the nearest, ties to even. A vector with NaN or
    infinity gets NaN for its scale, so that whatever sees it is NaN.
    """
    numbers = x.float()
    scale = numbers.abs().amax(dim=-1, keepdim=True) / 127
    usable = scale.isfinite() & (scale > 0)
    codes = torch.where(usable, (numbers / scale).round().clamp(-127, 127), 0).to(torch.int8)
    return codes, torch.where(scale.isfinite(), scale, torch.nan)


def find_slots(blocks: Sequence[int], block_size: int, num_slots: int, device: torch.device | str) -> slice | Tensor:
    """Return the slots of a sequence's first positions; a slice where its blocks lie side by side."""
    used = list(blocks[: math.ceil(num_slots / block_size)])
    if used == list(range(used[0], used[0] + len(used))):
        return slice(used[0] * block_size, used[0] * block_size + num_slots)
    starts_B1 = torch.tensor(used, device=device).unsqueeze(1) * block_size
    return (starts_B1 + torch.arange(block_size, device=device)).flatten()[:num_slots]


def _from(slots: slice | Tensor, start: int, end: int) -> slice | Tensor:
    return slice(slots.start + start, slots.start + end) if isinstance(slots, slice) else slots[start:end]
