"""Who wrote what: each addition to the residual stream, and its share of a token's logit.

The stream that the head reads is a sum: the embedding row, and what attention and MLP of each layer add. The final norm
divides it by one number, its root mean square, and multiplies by weights, and a logit is a product with one row of the
head. With that number taken from the very pass all of it is linear, so a logit is the sum of what each addition gives,
and what an attention gives is the sum of what its heads do.

Such a share tells what was written straight towards the token. What one layer writes for a later one to read is not in
it: for that, take it away and look what changes (`inspect/interventions`).

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Nanda 2022, "direct logit attribution".
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from llamarium.errors import InputError
from llamarium.inspect.probes.heads import heads_joined
from llamarium.inspect.probes.neurons import row_of_position
from llamarium.inspect.probes.weights import row_of
from llamarium.inspect.tokens import check_token
from llamarium.inspect.trace import Trace, make_key
from llamarium.model import LlamaForCausalLM

NAMES = ("embed", "head_out", "attn_out", "mlp_out", "resid", "logits")
"""What a trace has to hold, of all layers."""


_Part = Literal["embed", "attention", "head", "mlp"]


@dataclass(frozen=True, slots=True)
class Addition:
    """Something that was added to the stream.

    Attributes:
        part: What added it.
        layer: Of which layer; None for the embedding.
        head: Which head; None but for heads.
        norm: The length of what was added.
        logit: What it gives to the logit.
    """

    part: _Part
    layer: int | None
    head: int | None
    norm: float
    logit: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where a logit comes from.

    Attributes:
        token_ids: The ids that were run.
        position: After which of them the token is asked for.
        target_id: The token.
        against_id: Where given, all numbers are of the target's logit less this token's.
        logit: What the pass has computed.
        scale: What the final norm of that pass multiplies the stream with.
        additions: The embedding, then attention and MLP of each layer: they sum to the logit, but for `rounding`.
        heads: The heads of each layer, which sum to its attention.
        rounding: The logit less the sum: what the pass has rounded, and this sum.
    """

    token_ids: tuple[int, ...]
    position: int
    target_id: int
    against_id: int | None
    logit: float
    scale: float
    additions: tuple[Addition, ...]
    heads: tuple[Addition, ...]
    rounding: float

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)


@torch.no_grad()
def attribute(
    model: LlamaForCausalLM, trace: Trace, target_id: int, *, position: int = -1, against_id: int | None = None
) -> Attribution:
    """Divide a token's logit among everything that was added to the stream.

    Args:
        model: The model that was traced.
        trace: With `NAMES` of all layers.
        target_id: The token whose logit it is.
        position: The token of the text that it is to follow; negative ones count from the last.
        against_id: Take this token's logit away: what speaks for the one rather than the other.

    Raises:
        InputError: If the trace lacks something, or for a token or a position that there is not.
    """
    row = row_of_position(trace, position)
    _check_trace(trace, model.config.num_hidden_layers)
    toward_D = _direction(model, target_id).double()
    logit = float(trace["logits"][row, target_id])  # sync: to show
    if against_id is not None:
        toward_D -= _direction(model, against_id).double()
        logit -= float(trace["logits"][row, against_id])
    last_D = trace[make_key("resid", model.config.num_hidden_layers - 1)][row].double()
    scale = torch.rsqrt(last_D.square().mean() + model.model.norm.eps)
    toward_D = toward_D.to(last_D.device) * model.model.norm.weight.double() * scale
    additions = tuple(_additions(trace, row, toward_D))
    heads = tuple(_heads(model, trace, row, toward_D))
    rounding = logit - sum(one.logit for one in additions)
    at = trace.positions[row]
    return Attribution(trace.token_ids, at, target_id, against_id, logit, float(scale), additions, heads, rounding)


def _additions(trace: Trace, row: int, toward_D: Tensor) -> Iterator[Addition]:
    parts = list[tuple[_Part, int | None]]([("embed", None)])
    added = [trace["embed"][row]]
    for layer in trace.layers:
        parts.extend((("attention", layer), ("mlp", layer)))
        added += [trace[make_key("attn_out", layer)][row], trace[make_key("mlp_out", layer)][row]]
    for (part, layer), (norm, logit) in zip(parts, _measure(torch.stack(added), toward_D), strict=True):
        yield Addition(part, layer, None, norm, logit)


def _heads(model: LlamaForCausalLM, trace: Trace, row: int, toward_D: Tensor) -> Iterator[Addition]:
    at, layers = trace.select(names=["head_out", "attn_out"], positions=[trace.positions[row]]), trace.layers
    added_LND = torch.stack([heads_joined(model, at, layer).added_TND[0] for layer in layers])
    num_heads = added_LND.shape[1]
    for i, (norm, logit) in enumerate(_measure(added_LND.flatten(0, 1), toward_D)):
        yield Addition("head", layers[i // num_heads], i % num_heads, norm, logit)


def _measure(added_RD: Tensor, toward_D: Tensor) -> list[tuple[float, float]]:
    """Return the length of each row, and what it gives to the logit."""
    rows_RD = added_RD.double()
    return list(zip(rows_RD.norm(dim=-1).tolist(), (rows_RD @ toward_D).tolist(), strict=True))  # sync: to show


def _direction(model: LlamaForCausalLM, token_id: object) -> Tensor:
    """Return the head's row of a token, (D,)."""
    return row_of(model.lm_head, check_token(token_id, model.config.vocab_size), "lm_head")


def _check_trace(trace: Trace, num_layers: int) -> None:
    inner = [make_key(name, i) for i in range(num_layers) for name in ("head_out", "attn_out", "mlp_out", "resid")]
    missing = [key for key in ("embed", *inner, "logits") if key not in trace]
    if missing:
        raise InputError(
            f"the trace lacks {len(missing)} activations, {missing[0]} among them; trace with names={list(NAMES)}, "
            "all layers"
        )
