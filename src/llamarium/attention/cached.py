"""Attention with a past: keys and values of earlier tokens are kept, so that each token is computed once.

A slot of the cache is a position: the token at position p of row b has its key and value in slot p of row b. A query
at position p sees the slots 0..p. So rows of different lengths need no padding mask (what lies beyond a row's end is
never visible, and is overwritten as the row grows), and going back is nothing but continuing from a smaller position.

At a long context it is the cache that a token's time goes into: 8,000 tokens of Llama 3.2 1B are 262 MB in bfloat16,
and every new token reads all of it. Kept in 8 bits it is little more than half: each key and each value, a vector of
head_dim, becomes whole numbers from -127 to 127 and one scale. Keys are rounded after their rotation, so that they are
read as they are.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.attention.base import Context
from llamarium.errors import ContextLengthError, InputError, MemoryBudgetError

SCALE_DTYPE = torch.float32
"""Of a key's or value's scale, in a cache of 8 bits."""


class KVCache:
    """Keys and values of every layer, allocated once; holds no notion of how full it is.

    Args:
        num_layers: L.
        batch_size: B, rows.
        num_slots: S, positions that a row can hold.
        num_key_value_heads: K.
        head_dim: H.
        dtype: Of the keys and values; torch.int8 keeps codes and scales (`to_codes`).
        device: Where they live.

    Raises:
        MemoryBudgetError: If there is not that much memory.

    Attributes:
        k: L tensors of (B, K, S, H): the keys of one head lie together, as the decode step reads them.
        v: The same for the values.
        k_scales: With int8, L tensors of (B, K, S, 1), float32: keys are k * k_scales. Else nothing.
        v_scales: The same for the values.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        num_slots: int,
        num_key_value_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch_size, num_key_value_heads, num_slots)
        num_scaled = num_layers if dtype is torch.int8 else 0
        try:
            self.k, self.v = (_zeros(num_layers, (*shape, head_dim), dtype, device) for _ in "kv")
            self.k_scales, self.v_scales = (_zeros(num_scaled, (*shape, 1), SCALE_DTYPE, device) for _ in "kv")
        except (RuntimeError, MemoryError):
            bytes_per_vector = head_dim * dtype.itemsize + (SCALE_DTYPE.itemsize if num_scaled else 0)
            gigabytes = 2 * num_layers * math.prod(shape) * bytes_per_vector / 1e9
            raise MemoryBudgetError(
                f"the KV cache of {batch_size} rows of {num_slots} tokens takes {gigabytes:,.1f} GB, more than there "
                "is; ask for fewer tokens (max_tokens) or fewer answers at once (n)"
            ) from None

    @property
    def batch_size(self) -> int:
        """B."""
        return self.k[0].shape[0]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.k[0].shape[2]

    @property
    def num_bytes(self) -> int:
        """What keys and values together occupy, their scales included."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, *self.k_scales, *self.v_scales]

    def read(self, layer_idx: int, num_slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values in the first slots, (B, K, num_slots, H); of int8, as numbers of `dtype`."""
        k_BKSH, v_BKSH = self.k[layer_idx][:, :, :num_slots], self.v[layer_idx][:, :, :num_slots]
        if not self.k_scales:
            return k_BKSH, v_BKSH
        k_scale_BKS1, v_scale_BKS1 = (
            self.k_scales[layer_idx][:, :, :num_slots],
            self.v_scales[layer_idx][:, :, :num_slots],
        )
        return (k_BKSH * k_scale_BKS1).to(dtype), (v_BKSH * v_scale_BKS1).to(dtype)


def _zeros(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors of head_dim to 8 bits, so that x is about codes * scale.

    The scale is the largest magnitude over 127; codes are rounded to the nearest, ties to even. A vector with NaN or
    infinity gets NaN for its scale, so that whatever sees it is NaN.

    Args:
        x: (..., H).

    Returns:
        Codes (..., H), int8, and scales (..., 1), float32.
    """
    numbers = x.float()
    scale = numbers.abs().amax(dim=-1, keepdim=True) / 127
    usable = scale.isfinite() & (scale > 0)
    codes = torch.where(usable, (numbers / scale).round().clamp(-127, 127), 0).to(torch.int8)
    return codes, torch.where(scale.isfinite(), scale, torch.nan)


class CachedAttend:
    """Attention of one forward pass over a `KVCache`.

    Row b's T tokens take the positions `starts[b] .. starts[b] + T - 1`; every slot before `starts[b]` must have been
    filled by earlier calls. The object holds for one pass; the cache is what lives on. Starts are Python integers,
    so that nothing has to be read back from a GPU.

    Args:
        cache: Where keys and values are kept.
        starts: The first position of each row.
        num_tokens: T.

    Raises:
        InputError: If `starts` has not one entry for each row, or a negative one.
        ContextLengthError: If the cache has fewer slots than the last position needs.
    """

    def __init__(self, cache: KVCache, starts: Sequence[int], num_tokens: int) -> None:
        if len(starts) != cache.batch_size or min(starts) < 0:
            raise InputError(f"starts are {list(starts)}; expected {cache.batch_size} positions of 0 or more")
        self.cache = cache
        self.num_tokens = num_tokens
        self.end = max(starts) + num_tokens
        if self.end > cache.num_slots:
            raise ContextLengthError(f"{self.end} positions needed, and the KV cache holds {cache.num_slots}")
        self.starts = tuple(starts)
        self._start = starts[0] if min(starts) == max(starts) else None  # None: the rows stand at different places
        device = cache.k[0].device
        first_B1 = torch.tensor(starts, device=device).unsqueeze(1)
        self.positions_BT = first_B1 if num_tokens == 1 else first_B1 + torch.arange(num_tokens, device=device)
        self._mask_B1TS: Tensor | None = None
        if self._start is None or (num_tokens > 1 and self._start > 0):
            self._mask_B1TS = self._visible().unsqueeze(1)

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Store k and v, then return (B, T, N, H)."""
        self._keep(self.cache.k, self.cache.k_scales, layer_idx, k_BTKH)
        self._keep(self.cache.v, self.cache.v_scales, layer_idx, v_BTKH)
        k_BKSH, v_BKSH = self.cache.read(layer_idx, self.end, q_BTNH.dtype)
        if self.num_tokens == 1:
            return self._decode(q_BTNH, k_BKSH, v_BKSH)
        out_BNTH = F.scaled_dot_product_attention(
            q_BTNH.transpose(1, 2),
            k_BKSH,
            v_BKSH,
            attn_mask=self._mask_B1TS,
            is_causal=self._mask_B1TS is None,  # all rows start at 0: the plain triangle
            enable_gqa=True,
        )
        return out_BNTH.transpose(1, 2)

    def context(self, layer_idx: int, k_BTKH: Tensor, v_BTKH: Tensor) -> Context:
        """The cached keys and values up to this pass's last position."""
        k_BKSH, v_BKSH = self.cache.read(layer_idx, self.end, k_BTKH.dtype)
        return Context(k_BKSH.transpose(1, 2), v_BKSH.transpose(1, 2), self._visible())

    def _visible(self) -> Tensor:
        """(B, T, S): slot s is visible to position p if s <= p."""
        slots_S = torch.arange(self.end, device=self.positions_BT.device)
        return slots_S <= self.positions_BT.unsqueeze(-1)

    def _keep(self, kept: list[Tensor], scales: list[Tensor], layer_idx: int, new_BTKH: Tensor) -> None:
        if scales:
            new_BTKH, scale_BTK1 = to_codes(new_BTKH)
            self._store(scales[layer_idx], scale_BTK1)
        self._store(kept[layer_idx], new_BTKH)

    def _store(self, kept_BKSH: Tensor, new_BTKH: Tensor) -> None:
        if self._start is not None:
            kept_BKSH[:, :, self._start : self.end] = new_BTKH.transpose(1, 2)
        else:
            rows_B1 = torch.arange(new_BTKH.shape[0], device=new_BTKH.device).unsqueeze(1)
            kept_BKSH.transpose(1, 2)[rows_B1, self.positions_BT] = new_BTKH

    def _decode(self, q_B1NH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        """One token a row: the G query heads of a group stand where tokens stand, so no key is read twice."""
        batch, _, num_heads, head_dim = q_B1NH.shape
        q_BKGH = q_B1NH.view(batch, k_BKSH.shape[1], -1, head_dim)
        out_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BKSH, v_BKSH, attn_mask=self._mask_B1TS)
        return out_BKGH.reshape(batch, 1, num_heads, head_dim)
