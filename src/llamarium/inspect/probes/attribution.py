"""Attribution: each addition to the residual stream, and its share of a token's logit.

The stream that the head reads is a sum: the embedding row, and what attention and MLP of each layer add. The final norm
divides it by one number, its root mean square, and multiplies by weights, and a logit is a product with one row of the
head. With that number taken from the same pass all of it is linear, so a logit is the sum of what each addition gives,
and what an attention gives is the sum of what its heads do.

A share covers what was written directly towards the token. What one layer writes for a later one to read is not in it:
for that, remove it and measure the change (`inspect/interventions`).

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Nanda 2022, "direct logit attribution".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamarium.config import HEAD
from llamarium.errors import InputError
from llamarium.inspect.numbers import JsonView, lengths
from llamarium.inspect.probes.heads import heads_joined
from llamarium.inspect.probes.neurons import row_of_position
from llamarium.inspect.shapes import print_key, type_of
from llamarium.inspect.tokens import check_token
from llamarium.inspect.trace import Trace
from llamarium.runtime.runner import Runner
from llamarium.runtime.taps import Key

NAMES = ("embed", "head_out", "attn_out", "mlp_out", "resid", "logits")
"""What a trace has to hold, of all layers."""

_Part = Literal["embed", "attention", "head", "mlp"]
_Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition to the stream.

    Attributes:
        layer: None for the embedding.
        head: None but for heads.
        norm: The length of what was added.
        logit: Its share of the logit.
    """

    part: _Part
    layer: int | None
    head: int | None
    norm: float
    logit: float


@dataclass(frozen=True, slots=True)
class Attribution(JsonView):
    """A logit as a sum.

    Attributes:
        position: The token before the one that is predicted.
        against_id: Where given, all numbers are of the target's logit less this token's.
        logit: What the pass has computed.
        scale: The factor of the final norm in that pass.
        additions: The embedding, then attention and MLP of each layer: they sum to the logit, but for `rounding`.
        heads: The heads of each layer, which sum to its attention.
        rounding: The logit less the sum: rounding in the pass, and in this sum.
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


def attribute(
    runner: Runner, trace: Trace, target_id: int, *, position: int = -1, against_id: int | None = None
) -> Attribution:
    """Divide a token's logit among the additions to the stream; `trace` holds `NAMES` of all layers.

    See `Inspector.attribution`. InputError if the trace lacks something, or for an invalid token or position.
    """
    row, config = row_of_position(trace, position), runner.config
    _check_trace(trace, config.num_hidden_layers)
    logits_V = trace.arrays["logits", None][row]
    toward_D, logit = _direction(runner, target_id), float(logits_V[target_id])
    if against_id is not None:
        toward_D, logit = toward_D - _direction(runner, against_id), logit - float(logits_V[against_id])
    last_D = trace.arrays["resid", config.num_hidden_layers - 1][row].astype(np.float64)
    scale = float(1 / np.sqrt(np.square(last_D).mean() + config.rms_norm_eps))
    toward_D = toward_D * runner.dequantize("model.norm.weight") * scale
    additions = tuple(_additions(trace, row, toward_D))
    heads = tuple(_heads(runner, trace, row, toward_D))
    rounding = logit - sum(addition.logit for addition in additions)
    at = trace.positions[row]
    return Attribution(trace.token_ids, at, target_id, against_id, logit, scale, additions, heads, rounding)


def _additions(trace: Trace, row: int, toward_D: _Doubles) -> Iterator[Addition]:
    parts: list[tuple[_Part, Key]] = [("embed", ("embed", None))]
    for layer in trace.layers:
        parts.extend((("attention", ("attn_out", layer)), ("mlp", ("mlp_out", layer))))
    added_RD = np.stack([trace.arrays[key][row] for _, key in parts])
    for (part, (_, layer)), (norm, logit) in zip(parts, _measure(added_RD, toward_D), strict=True):
        yield Addition(part, layer, None, norm, logit)


def _heads(runner: Runner, trace: Trace, row: int, toward_D: _Doubles) -> Iterator[Addition]:
    at = trace.select(names=["head_out", "attn_out"], positions=[trace.positions[row]])
    for layer in trace.layers:
        added_ND = heads_joined(runner, at, layer).added_TND[0]
        for head, (norm, logit) in enumerate(_measure(added_ND, toward_D)):
            yield Addition("head", layer, head, norm, logit)


def _measure(added_RD: NDArray[np.float32], toward_D: _Doubles) -> Iterator[tuple[float, float]]:
    rows_RD = added_RD.astype(np.float64)
    return zip(lengths(rows_RD).tolist(), (rows_RD @ toward_D).tolist(), strict=True)


def _direction(runner: Runner, token_id: object) -> _Doubles:
    checked_id = check_token(token_id, runner.config.vocab_size)
    type_of(runner, HEAD)
    return runner.dequantize(HEAD, [checked_id], adapted=True)[0].astype(np.float64)


def _check_trace(trace: Trace, num_layers: int) -> None:
    names = ("head_out", "attn_out", "mlp_out", "resid")
    expected: list[Key] = [("embed", None), *((name, i) for i in range(num_layers) for name in names), ("logits", None)]
    missing = [key for key in expected if key not in trace.arrays]
    if missing:
        raise InputError(
            f"the trace lacks {len(missing)} activations, {print_key(missing[0])} among them; trace with "
            f"names={list(NAMES)}, all layers"
        )
