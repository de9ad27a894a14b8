"""Heads joined: what each head adds to the residual stream.

Attention's output is one product, `o_proj` times the heads' results side by side. A product is a sum over columns, and
each head has columns of its own: so the output is a sum of N vectors, one that each head adds by itself.

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section "attention heads are
independent and additive".
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from llamarium.checkpoints.storage import FLOATS
from llamarium.errors import InputError, show_value
from llamarium.inspect.numbers import Floats, JsonView, lengths, split
from llamarium.inspect.shapes import linear_key, print_key, type_of
from llamarium.inspect.trace import Trace
from llamarium.runtime.runner import Runner

NAMES = ("head_out", "attn_out")
"""What a trace has to hold."""

_TOKENS = 64  # whose heads are multiplied at a time


@dataclass(frozen=True, slots=True)
class HeadShares(JsonView):
    """What each head of a layer adds to the stream of one token.

    Attributes:
        norms: The length of what each head adds.
        shares: How much of attention's output lies along it; they sum to one.
        rounding: The length of what attention's output differs by from the sum of these.
    """

    layer: int
    position: int
    norms: tuple[float, ...]
    shares: tuple[float, ...]
    rounding: float


@dataclass(frozen=True, slots=True, eq=False)
class HeadsJoined:
    """What the heads of one layer add to the stream, at each position of a trace.

    Attributes:
        positions: The tokens on the T axes.
        added_TND: float32; what each head adds.
        rounding_TD: float32; attention's output less their sum: rounding in the pass, and in this sum.
    """

    layer: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    added_TND: Floats
    rounding_TD: Floats

    @property
    def norms_TN(self) -> Floats:
        """The length of what each head adds."""
        return lengths(self.added_TND)

    @property
    def shares_TN(self) -> Floats:
        """How much of attention's output lies in what a head adds: its part along it. They sum to one."""
        whole_TD = self.added_TND.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):  # of nothing there are no shares
            return np.einsum("tnd,td->tn", self.added_TND, whole_TD) / np.square(whole_TD).sum(-1, keepdims=True)

    def at(self, row: int) -> HeadShares:
        """Return lengths and shares at one of the positions."""
        values = self.to_dict()
        return HeadShares(
            self.layer,
            self.positions[row],
            *(tuple(values[name][row]) for name in ("norms", "shares")),
            rounding=values["rounding"][row],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return lengths and shares as JSON values."""
        return {
            "layer": self.layer,
            "token_ids": list(self.token_ids),
            "positions": list(self.positions),
            "norms": self.norms_TN.tolist(),
            "shares": np.nan_to_num(self.shares_TN).tolist(),
            "rounding": lengths(self.rounding_TD).tolist(),
        }


def heads_joined(runner: Runner, trace: Trace, layer: int) -> HeadsJoined:
    """Return what each head of a layer (negative: from the last) adds to the stream; `trace` holds `NAMES` of it.

    InputError if the trace does not hold them.
    """
    layer = layer_in(trace, layer, runner.config.num_hidden_layers, NAMES)
    added_TND = _through_columns(runner, layer, trace.arrays["head_out", layer])
    summed_TD = added_TND.sum(1)
    if runner.config.attention_bias:
        summed_TD = summed_TD + runner.dequantize(linear_key(layer, "o_proj").removesuffix("weight") + "bias")
    rounding_TD = trace.arrays["attn_out", layer] - summed_TD
    return HeadsJoined(layer, trace.token_ids, trace.positions, added_TND, rounding_TD)


def _through_columns(runner: Runner, layer: int, head_out_TNH: Floats) -> Floats:
    key = linear_key(layer, "o_proj")
    if type_of(runner, key) in FLOATS:
        weight_DNH = runner.dequantize(key, adapted=True).reshape(-1, *head_out_TNH.shape[1:])
        return (head_out_TNH.transpose(1, 0, 2) @ weight_DNH.transpose(1, 2, 0)).transpose(1, 0, 2)
    shape = (-1, head_out_TNH.shape[1], runner.config.hidden_size)  # packed: as it multiplies, and nothing is unpacked
    return np.concatenate([runner.product(key, _alone(some)).reshape(shape) for some in split(head_out_TNH, _TOKENS)])


def _alone(head_out_TNH: Floats) -> Floats:
    """Return each head's result at its own columns, zeros elsewhere: (T * N, N * H)."""
    num_heads = head_out_TNH.shape[1]
    apart_TNNH = np.eye(num_heads, dtype=np.float32)[:, :, None] * head_out_TNH[:, None]
    return apart_TNNH.reshape(len(head_out_TNH) * num_heads, -1)


def layer_in(trace: Trace, layer: object, num_layers: int, names: tuple[str, ...]) -> int:
    """Return a layer's index, counted from 0.

    InputError if there is no such layer, or the trace lacks one of these activations of it.
    """
    if isinstance(layer, bool) or not isinstance(layer, int) or not -num_layers <= layer < num_layers:
        raise InputError(f"layer is {show_value(layer)}; expected one within {-num_layers}..{num_layers - 1}")
    layer %= num_layers
    missing = [print_key((name, layer)) for name in names if (name, layer) not in trace.arrays]
    if missing:
        raise InputError(f"the trace lacks {', '.join(missing)}; trace with names={list(names)} (or more)")
    return layer
