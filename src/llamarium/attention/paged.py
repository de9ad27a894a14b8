"""Attention over a paged cache: sequences of any lengths, packed into one row of tokens.

A cache is a number of slots, in blocks; a sequence's position p lies in the slot that its block table names. So
sequences grow without being moved, share what they have in common, and leave without a gap. The model sees one row of
M tokens, whichever sequences they belong to; each sequence's queries see its own slots, and nothing else.

At a long context it is the cache that a token's time goes into: 8,000 tokens of Llama 3.2 1B are 262 MB in bfloat16,
and every new token reads all of it. Kept as codes of 8 or 4 bits it is little more than a half or a quarter
(`kv_codes.py`). Keys are rounded after RoPE has rotated them.
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
from llamarium.attention.codes import SCALE_DTYPES, decode, encode, shapes_of, spread
from llamarium.errors import InputError
from llamarium.kernels.memory import no_room, reserve
from llamarium.kv_codes import CacheDtype, is_codes, kinds_of


class PagedCache:
    """Keys and values of every layer, in blocks of slots.

    Args:
        dtype: What keys and values are computed in.
        kept: What they are kept in: "auto" is `dtype`, the others are codes and scales.

    Raises:
        MemoryBudgetError: If there is not that much memory.

    Attributes:
        k: L tensors of (slots, K, H): a sequence whose blocks lie side by side is read where it lies. Codes of 4 bits
            are bytes, two codes in each.
        v: The same for the values.
        k_scales: Of codes, L tensors of (slots, K, scales of a vector). Else nothing.
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
        kept: CacheDtype = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size, self.dtype, self.kept, self.device = block_size, dtype, kept, torch.device(device)
        self._num_layers, self._heads = num_layers, (num_key_value_heads, head_dim)
        self._allocate(num_blocks)

    def _allocate(self, num_blocks: int) -> None:
        slots, heads = num_blocks * self.block_size, self._heads[0]
        layers, pairs = range(self._num_layers), self._parts()
        try:
            self.k, self.v = ([self._zeros(slots, heads, *codes) for _ in layers] for codes, _ in pairs)
            self.k_scales, self.v_scales = (
                [self._zeros(slots, heads, *scales) for _ in layers if scales[0]] for _, scales in pairs
            )
        except (RuntimeError, MemoryError):
            bytes_per_pair = sum(width * dtype.itemsize for parts in pairs for width, dtype in parts)
            raise no_room(slots, len(layers) * slots * heads * bytes_per_pair) from None
        self.num_blocks = num_blocks

    def _parts(self) -> list[tuple[tuple[int, torch.dtype], tuple[int, torch.dtype]]]:
        """Return, for keys and for values, how many numbers of which dtype a vector is, and how many its scales are."""
        head_dim, found = self._heads[1], list[tuple[tuple[int, torch.dtype], tuple[int, torch.dtype]]]()
        for kind in kinds_of(self.kept):
            if is_codes(kind):
                width, dtype, num_scales = shapes_of(kind, head_dim)
                found.append(((width, dtype), (num_scales, SCALE_DTYPES[kind])))
            else:
                found.append(((head_dim, self.dtype), (0, self.dtype)))
        return found

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
        if self.k_scales:
            k_SKH, v_SKH = spread(k_SKH), spread(v_SKH)
        return k_SKH.float().cpu().numpy(), v_SKH.float().cpu().numpy()  # sync: to hand out

    def at(self, layer_idx: int, slots: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of some slots, (S, K, H) each; codes as numbers of `dtype`, rotated (`spread`)."""
        k_SKH, v_SKH = self.k[layer_idx][slots], self.v[layer_idx][slots]
        if not self.k_scales:
            return k_SKH, v_SKH
        head_dim = self._heads[1]
        k_SKH = decode(k_SKH, self.k_scales[layer_idx][slots], head_dim)
        v_SKH = decode(v_SKH, self.v_scales[layer_idx][slots], head_dim)
        return k_SKH.to(dtype), v_SKH.to(dtype)

    def put(self, layer_idx: int, slots: slice | Tensor, k_MKH: Tensor, v_MKH: Tensor) -> None:
        """Keep keys and values of M tokens in these slots."""
        parts = ((self.k, self.k_scales, k_MKH), (self.v, self.v_scales, v_MKH))
        for kind, (kept, scales, new_MKH) in zip(kinds_of(self.kept), parts, strict=True):
            if scales:
                new_MKH, scales[layer_idx][slots] = encode(kind, new_MKH)
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
        q_BTNH = spread(q_BTNH) if self.cache.k_scales else q_BTNH
        parts = [self._attend(layer_idx, i, one, q_BTNH[:, one.rows]) for i, one in enumerate(self.segments)]
        out_BTNH = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return spread(out_BTNH) if self.cache.v_scales else out_BTNH

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


def find_slots(blocks: Sequence[int], block_size: int, num_slots: int, device: torch.device | str) -> slice | Tensor:
    """Return the slots of a sequence's first positions; a slice where its blocks lie side by side."""
    used = list(blocks[: math.ceil(num_slots / block_size)])
    if used == list(range(used[0], used[0] + len(used))):
        return slice(used[0] * block_size, used[0] * block_size + num_slots)
    starts_B1 = torch.tensor(used, device=device).unsqueeze(1) * block_size
    return (starts_B1 + torch.arange(block_size, device=device)).flatten()[:num_slots]


def _from(slots: slice | Tensor, start: int, end: int) -> slice | Tensor:
    return slice(slots.start + start, slots.start + end) if isinstance(slots, slice) else slots[start:end]
