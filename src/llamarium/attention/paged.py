"""Paged attention in PyTorch: sequences of any lengths, packed into one row of tokens.

A KV cache consists of blocks of slots; a sequence's block table maps positions to slots. So sequences can grow without
being moved, share prefixes, and end without leaving gaps. The model sees one row of M tokens of any sequences; the
queries of each sequence see only its own slots.

With a long context, decoding mostly reads the cache: 8,000 tokens of Llama 3.2 1B take 262 MB in bfloat16, and every
new token reads all of it. Quantized to 8 or 4 bits it takes slightly more than a half or a quarter (`kv_codes.py`).
Keys are quantized after RoPE.
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
    """A paged KV cache for all layers.

    Args:
        num_layers: L.
        num_blocks: Number of blocks.
        block_size: Slots per block.
        num_key_value_heads: K.
        head_dim: H.
        dtype: Compute dtype of keys and values.
        kept: KV cache dtype; "auto" is `dtype`, the others are quantized.
        device: The device.

    Raises:
        MemoryBudgetError: If there is not enough memory.

    Attributes:
        k, v: L tensors (slots, K, H); a sequence whose blocks are adjacent is read without a copy. Two 4-bit codes
            share a byte.
        k_scales, v_scales: If quantized, L tensors (slots, K, scales of a vector); else empty.
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
        """Return for keys and for values: size and dtype of a vector, and number and dtype of its scales."""
        head_dim, parts = self._heads[1], list[tuple[tuple[int, torch.dtype], tuple[int, torch.dtype]]]()
        for kind in kinds_of(self.kept):
            if is_codes(kind):
                width, dtype, num_scales = shapes_of(kind, head_dim)
                parts.append(((width, dtype), (num_scales, SCALE_DTYPES[kind])))
            else:
                parts.append(((head_dim, self.dtype), (0, self.dtype)))
        return parts

    def _zeros(self, slots: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        if self.device.type != "cpu" or slots == 0:
            return torch.zeros(slots, heads, width, dtype=dtype, device=self.device)
        memory = torch.from_numpy(reserve((slots * heads * width * dtype.itemsize,), np.uint8))
        return memory.view(dtype).view(slots, heads, width)

    @property
    def num_bytes(self) -> int:
        """Size in bytes once all slots are used, scales included."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, *self.k_scales, *self.v_scales]

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block to another one, in all layers."""
        for tensor in self._tensors():
            blocks = tensor.unflatten(0, (-1, self.block_size))
            blocks[target] = blocks[source]

    def grow(self, num_blocks: int) -> None:
        """Grow to `num_blocks` blocks, keeping their contents; a failure or an interrupt leaves the cache unchanged.

        Raises:
            MemoryBudgetError: If there is not enough memory.
        """
        larger = copy.copy(self)
        larger._allocate(num_blocks)
        for new, current in zip(larger._tensors(), self._tensors(), strict=True):
            new[: len(current)] = current
        vars(self).update(vars(larger))

    def read(
        self, layer_idx: int, blocks: Sequence[int], num_slots: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the keys and values of a sequence's first positions, dequantized: (S, K, H) each, float32."""
        slots = find_slots(blocks, self.block_size, num_slots, self.device)
        k_SKH, v_SKH = self.at(layer_idx, slots, torch.float32)
        if self.k_scales:
            k_SKH, v_SKH = spread(k_SKH), spread(v_SKH)
        return k_SKH.float().cpu().numpy(), v_SKH.float().cpu().numpy()  # sync: the caller needs the values

    def at(self, layer_idx: int, slots: slice | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of some slots, (S, K, H) each; dequantized ones in `dtype`, still rotated."""
        k_SKH, v_SKH = self.k[layer_idx][slots], self.v[layer_idx][slots]
        if not self.k_scales:
            return k_SKH, v_SKH
        head_dim = self._heads[1]
        k_SKH = decode(k_SKH, self.k_scales[layer_idx][slots], head_dim)
        v_SKH = decode(v_SKH, self.v_scales[layer_idx][slots], head_dim)
        return k_SKH.to(dtype), v_SKH.to(dtype)

    def put(self, layer_idx: int, slots: slice | Tensor, k_MKH: Tensor, v_MKH: Tensor) -> None:
        """Store keys and values of M tokens in the given slots."""
        parts = ((self.k, self.k_scales, k_MKH), (self.v, self.v_scales, v_MKH))
        for kind, (stored, scales, new_MKH) in zip(kinds_of(self.kept), parts, strict=True):
            if scales:
                new_MKH, scales[layer_idx][slots] = encode(kind, new_MKH)
            stored[layer_idx][slots] = new_MKH


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one sequence in a packed row.

    Attributes:
        rows: Their place in the row.
        start: Position of the first token.
        slots: Slots of all positions up to the last of these tokens: (S,), or a slice if they are contiguous.
    """

    rows: slice
    start: int
    slots: slice | Tensor

    @property
    def end(self) -> int:
        """S, the number of positions up to the last token."""
        return self.start + self.rows.stop - self.rows.start


class PagedAttend:
    """Attention of a packed row over a `PagedCache`, with one segment per sequence; used for one pass.

    Earlier passes must have filled all visible positions before the segments.
    """

    def __init__(self, cache: PagedCache, segments: Sequence[Segment], window: int | None = None) -> None:
        self.cache, self.segments, self.window = cache, segments, window
        self._new = [_from(segment.slots, segment.start, segment.end) for segment in segments]
        self._masks: dict[int, Tensor] = {}

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Store k and v, then return attention (1, M, N, H); InputError unless the tokens match the segments."""
        if q_BTNH.shape[:2] != (1, self.segments[-1].rows.stop):
            expected = (1, self.segments[-1].rows.stop)
            raise InputError(f"{tuple(q_BTNH.shape[:2])} tokens; expected {expected}, as the segments have")
        for segment, slots in zip(self.segments, self._new, strict=True):
            self.cache.put(layer_idx, slots, k_BTKH[0, segment.rows], v_BTKH[0, segment.rows])
        q_BTNH = spread(q_BTNH) if self.cache.k_scales else q_BTNH
        parts = [self._attend(layer_idx, i, part, q_BTNH[:, part.rows]) for i, part in enumerate(self.segments)]
        out_BTNH = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return spread(out_BTNH) if self.cache.v_scales else out_BTNH

    def _attend(self, layer_idx: int, i: int, segment: Segment, q_1TNH: Tensor) -> Tensor:
        first = (
            0 if self.window is None else max(0, segment.start + 1 - self.window)
        )  # first position that the first query sees
        slots = _from(segment.slots, first, segment.end)
        k_1SKH, v_1SKH = (stored.unsqueeze(0) for stored in self.cache.at(layer_idx, slots, q_1TNH.dtype))
        if segment.end == segment.start + 1:
            return _decode(q_1TNH, k_1SKH.transpose(1, 2), v_1SKH.transpose(1, 2))
        is_whole = segment.start == 0 and (self.window is None or self.window >= segment.end)
        if not is_whole and i not in self._masks:  # (T, S)
            positions_S = torch.arange(first, segment.end, device=self.cache.device)
            self._masks[i] = causal_mask(positions_S[segment.start - first :], positions_S, self.window)
        return attend_fused(q_1TNH, k_1SKH, v_1SKH, self._masks.get(i), is_causal=is_whole)


def _decode(q_11NH: Tensor, k_1KSH: Tensor, v_1KSH: Tensor) -> Tensor:
    """Attend from one token, with the G query heads of a group on the token axis, so that each key is read once."""
    q_1KGH = q_11NH.view(1, k_1KSH.shape[1], -1, q_11NH.shape[-1])
    return F.scaled_dot_product_attention(q_1KGH, k_1KSH, v_1KSH).reshape(q_11NH.shape)


def find_slots(blocks: Sequence[int], block_size: int, num_slots: int, device: torch.device | str) -> slice | Tensor:
    """Return the slots of a sequence's first positions, as a slice if its blocks are adjacent."""
    used_blocks = list(blocks[: math.ceil(num_slots / block_size)])
    if used_blocks == list(range(used_blocks[0], used_blocks[0] + len(used_blocks))):
        return slice(used_blocks[0] * block_size, used_blocks[0] * block_size + num_slots)
    starts_B1 = torch.tensor(used_blocks, device=device).unsqueeze(1) * block_size
    return (starts_B1 + torch.arange(block_size, device=device)).flatten()[:num_slots]


def _from(slots: slice | Tensor, start: int, end: int) -> slice | Tensor:
    return slice(slots.start + start, slots.start + end) if isinstance(slots, slice) else slots[start:end]
