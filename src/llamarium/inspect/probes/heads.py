"""Heads joined: what each head adds to the residual stream.

Attention's output is one product, `o_proj` times the heads' results side by side. A product is a sum over columns, and
each head has columns of its own: so the output is a sum of N vectors, one that each head adds by itself.

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section "attention heads are
independent and additive".
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llamarium.errors import InputError
from llamarium.inspect.probes.weights import matrix_of
from llamarium.inspect.trace import Trace, make_key
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedLinear

NAMES = ("head_out", "attn_out")
"""What a trace has to hold."""

_TOKENS = 64  # whose heads are multiplied at a time


@dataclass(frozen=True, slots=True, eq=False)
class HeadsJoined:
    """What the heads of one layer add to the stream, at each position of a trace.

    Attributes:
        layer: The layer.
        token_ids: The ids that were run.
        positions: The tokens on the T axes.
        added_TND: float32; what each head adds.
        rounding_TD: float32; attention's output less their sum: what the pass has rounded, and this sum.
    """

    layer: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    added_TND: Tensor
    rounding_TD: Tensor

    @property
    def norms_TN(self) -> Tensor:
        """The length of what each head adds."""
        return self.added_TND.norm(dim=-1)

    @property
    def shares_TN(self) -> Tensor:
        """How much of attention's output lies in what a head adds: its part along it. They sum to one."""
        whole_TD = self.added_TND.sum(dim=1)
        squared_T1 = whole_TD.square().sum(dim=-1, keepdim=True)
        return torch.einsum("tnd,td->tn", self.added_TND, whole_TD) / squared_T1

    def to_dict(self) -> dict[str, Any]:
        """Return lengths and shares as JSON values."""
        return {
            "layer": self.layer,
            "token_ids": list(self.token_ids),
            "positions": list(self.positions),
            "norms": self.norms_TN.tolist(),  # sync: to show
            "shares": self.shares_TN.nan_to_num(0.0).tolist(),
            "rounding": self.rounding_TD.norm(dim=-1).tolist(),
        }


@torch.no_grad()
def heads_joined(model: LlamaForCausalLM, trace: Trace, layer: int) -> HeadsJoined:
    """Return what each head of a layer adds to the stream through its columns of `o_proj`.

    Args:
        model: The model that was traced.
        trace: With "head_out" and "attn_out" of the layer.
        layer: The layer; a negative one counts from the last.

    Raises:
        InputError: If the trace does not hold them.
    """
    layer = layer_in(trace, layer, model.config.num_hidden_layers, NAMES)
    head_out_TNH = trace[make_key("head_out", layer)].float()
    added_TND = _through_columns(model, layer, head_out_TNH)
    out_TD = trace[make_key("attn_out", layer)].float()
    return HeadsJoined(layer, trace.token_ids, trace.positions, added_TND, out_TD - added_TND.sum(dim=1))


def _through_columns(model: LlamaForCausalLM, layer: int, head_out_TNH: Tensor) -> Tensor:
    o_proj = model.get_submodule(f"model.layers.{layer}.self_attn.o_proj")
    if isinstance(getattr(o_proj, "base_layer", o_proj), QuantizedLinear):  # as it multiplies, and nothing is unpacked
        return torch.cat([o_proj(_alone(part_CNH)) for part_CNH in head_out_TNH.split(_TOKENS)])
    weight_DNH = matrix_of(o_proj, f"layers.{layer}.self_attn.o_proj").unflatten(1, head_out_TNH.shape[1:])
    return torch.einsum("tnh,dnh->tnd", head_out_TNH, weight_DNH)


def _alone(head_out_TNH: Tensor) -> Tensor:
    """Return each head's result where it lies among the others, and zeros in their places: (T, N, N * H)."""
    num_heads = head_out_TNH.shape[1]
    apart_NN1 = torch.eye(num_heads, device=head_out_TNH.device).unsqueeze(-1)
    return (apart_NN1 * head_out_TNH.unsqueeze(1)).flatten(-2)


def layer_in(trace: Trace, layer: int, num_layers: int, names: tuple[str, ...]) -> int:
    """Return the number of a layer of which a trace holds these activations.

    Raises:
        InputError: If there is no such layer, or the trace lacks one of them.
    """
    if not -num_layers <= layer < num_layers:
        raise InputError(f"layer is {layer}; expected one within {-num_layers}..{num_layers - 1}")
    layer %= num_layers
    missing = [key for name in names if (key := make_key(name, layer)) not in trace]
    if missing:
        raise InputError(f"the trace lacks {', '.join(missing)}; trace with names={list(names)} (or more)")
    return layer
