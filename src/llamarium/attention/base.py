"""The `Attend` protocol, the reference definition of attention, and attention without a cache.

Shape suffixes: B batch, T tokens, N query heads, K key-value heads, G = N / K query heads per key-value head,
H head_dim, S keys that a query may see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.errors import InputError


class Context(NamedTuple):
    """The keys, values and mask of one attention call.

    Attributes:
        k_BSKH: The keys.
        v_BSKH: The values.
        visible_BTS: bool; True where a query may see a key. The batch axis may be 1.
    """

    k_BSKH: Tensor
    v_BSKH: Tensor
    visible_BTS: Tensor


class Attend(Protocol):
    """Computes attention for one layer, and may store k and v.

    The model calls it once per layer, with q and k already rotated. Training, generation, serving and inspection differ
    only in the object that is passed to the model.
    """

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H) in q's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Eager:
    """The intermediate results of attention.

    Attributes:
        scores_BNTS: float32; q·k / sqrt(H), -inf where masked.
        pattern_BNTS: float32; attention weights: softmax of the scores over S, zero in rows without visible keys.
        out_BTNH: The weighted sum of the values, in q's dtype.
    """

    scores_BNTS: Tensor
    pattern_BNTS: Tensor
    out_BTNH: Tensor


def attend_eagerly(q_BTNH: Tensor, context: Context) -> Eager:
    """Compute attention by its definition, softmax(q·k / sqrt(H)) · v, in float32; head n uses key-value head n // G.

    Source: Vaswani et al. 2017, section 3.2.1; Ainslie et al. 2023 for the groups.
    """
    groups = q_BTNH.shape[2] // context.k_BSKH.shape[2]
    k_BSNH = context.k_BSKH.repeat_interleave(groups, dim=2).float()
    v_BSNH = context.v_BSKH.repeat_interleave(groups, dim=2).float()
    scores_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH.float(), k_BSNH) * q_BTNH.shape[-1] ** -0.5
    scores_BNTS = scores_BNTS.masked_fill(~context.visible_BTS.unsqueeze(1), float("-inf"))
    pattern_BNTS = scores_BNTS.softmax(dim=-1).nan_to_num(0.0)
    out_BTNH = torch.einsum("bnts,bsnh->btnh", pattern_BNTS, v_BSNH)
    return Eager(scores_BNTS, pattern_BNTS, out_BTNH.to(q_BTNH.dtype))


def attend_fused(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, mask: Tensor | None, *, is_causal: bool = False
) -> Tensor:
    """Return attention (B, T, N, H) by PyTorch's fused kernels; `mask` is bool and broadcasts to (B, N, T, S)."""
    q_BNTH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKSH, v_BKSH, mask, is_causal=is_causal, enable_gqa=True)
    return out_BNTH.transpose(1, 2)


def causal_mask(positions_T: Tensor, keys_S: Tensor, window: int | None = None) -> Tensor:
    """Return the causal mask, bool (T, S): True where a query sees a key.

    Args:
        positions_T: int; positions of the queries.
        keys_S: int; positions of the keys.
        window: Sliding window: how many positions a query sees, including its own; None for no limit.

    Source: transformers, `masking_utils.py`, `sliding_window_overlay`.
    """
    distance_TS = positions_T.unsqueeze(1) - keys_S
    return distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)


def visible_in_row(
    num_tokens: int, segments_BT: Tensor | None, bidirectional: bool, device: torch.device, window: int | None = None
) -> Tensor:
    """Return the mask, (1 or B, T, T), for T tokens without a cache; other arguments as in `RowAttend`."""
    positions_T = torch.arange(num_tokens, device=device)
    visible_BTT = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=device)
    if not bidirectional:
        visible_BTT = causal_mask(positions_T, positions_T, window).unsqueeze(0)
    if segments_BT is not None:
        visible_BTT = visible_BTT & (segments_BT.unsqueeze(2) == segments_BT.unsqueeze(1))
    return visible_BTT


class RowAttend:
    """The base of attention without a cache.

    Args:
        segments_BT: int; tokens of different segments do not see each other. Use one number per document in packed
            rows, and a separate number for padding. None means one segment.
        bidirectional: Whether every token sees its whole segment, as in an encoder.
        window: A model's `sliding_window`: how many tokens each token sees, including itself. None for no limit.

    Raises:
        InputError: If `window` is less than 1, or combined with `bidirectional`.
    """

    def __init__(
        self, *, segments_BT: Tensor | None = None, bidirectional: bool = False, window: int | None = None
    ) -> None:
        if window is not None and (bidirectional or window < 1):
            reason = " beside bidirectional=True, where every token sees its whole segment" if bidirectional else ""
            raise InputError(f"window is {window}{reason}; expected 1 or more with causal attention, or None")
        self.segments_BT = segments_BT
        self.bidirectional = bidirectional
        self.window = window

    def context(self, layer_idx: int, k_BTKH: Tensor, v_BTKH: Tensor) -> Context:
        """Return the keys, values and mask of a call."""
        mask = visible_in_row(k_BTKH.shape[1], self.segments_BT, self.bidirectional, k_BTKH.device, self.window)
        return Context(k_BTKH, v_BTKH, mask)


class EagerAttend(RowAttend):
    """The reference: attention by explicit softmax in float32, nothing fused; arguments as for `RowAttend`."""

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        return attend_eagerly(q_BTNH, self.context(layer_idx, k_BTKH, v_BTKH)).out_BTNH


class CausalAttend(RowAttend):
    """Attention through PyTorch's fused kernels, without a cache: the model's default. Arguments as for `RowAttend`."""

    _mask_B1TT: Tensor | None = None

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        num_tokens, mask_B1TT = q_BTNH.shape[1], self._mask_B1TT
        is_masked = self.segments_BT is not None or (self.window is not None and self.window < num_tokens)
        if is_masked and (mask_B1TT is None or mask_B1TT.shape[-1] != num_tokens):  # built once for all layers
            self._mask_B1TT = self.context(layer_idx, k_BTKH, v_BTKH).visible_BTS.unsqueeze(1)
        mask = self._mask_B1TT if is_masked else None
        return attend_fused(q_BTNH, k_BTKH, v_BTKH, mask, is_causal=not is_masked and not self.bidirectional)


class CrossAttend:
    """Cross-attention of a decoder to a fixed memory; the k and v of the call itself are ignored.

    The memory comes from the same attention modules: `attention.project(encoder_hidden)` returns k and v of the
    encoder's hidden states, without RoPE.

    Args:
        memory: A (k, v) pair of (B, S, K, H) per layer.
        visible_BS: bool; False at padding. None means no padding.
    """

    def __init__(self, memory: Sequence[tuple[Tensor, Tensor]], visible_BS: Tensor | None = None) -> None:
        self.memory = memory
        self.visible_BS = visible_BS

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        """Return (B, T, N, H)."""
        mask_B11S = None if self.visible_BS is None else self.visible_BS[:, None, None, :]
        return attend_fused(q_BTNH, *self.memory[layer_idx], mask_B11S)
