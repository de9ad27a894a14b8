"""SwiGLU: the neurons that fire most for a token, and on which tokens of the text they do.

A neuron of the MLP is one row of the gate, one of the up projection, and one column of the down projection: it adds
silu(gate) · up times that column to the stream.
"""

from dataclasses import dataclass

from llamarium.config import ModelConfig
from llamarium.errors import InputError, show_value
from llamarium.inspect.numbers import JsonView, largest
from llamarium.inspect.probes.heads import layer_in
from llamarium.inspect.tokens import check_count
from llamarium.inspect.trace import Trace

NAMES = ("gate", "up", "act", "gated")
"""What a trace has to hold."""


@dataclass(frozen=True, slots=True)
class Neuron:
    """What one neuron computes for a token.

    Attributes:
        act: silu(gate).
        gated: act · up, the factor of its column of the down projection.
        by_token: `gated` at each of the trace's positions.
    """

    index: int
    gate: float
    act: float
    up: float
    gated: float
    by_token: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Neurons(JsonView):
    """The neurons of one layer that fire most for the token at `position`, by the size of `gated`, the largest first.

    `positions` are the tokens of each neuron's `by_token`.
    """

    layer: int
    position: int
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    neurons: tuple[Neuron, ...]


def top_neurons(config: ModelConfig, trace: Trace, layer: int, *, position: int = -1, k: int = 10) -> Neurons:
    """Return the k neurons of a layer whose product is largest, of either sign; `trace` holds `NAMES` of the layer.

    See `Inspector.neurons`. InputError if the trace does not hold them, or `k` is out of range.
    """
    check_count(k, "k", config.intermediate_size)
    layer = layer_in(trace, layer, config.num_hidden_layers, NAMES)
    row = row_of_position(trace, position)
    gate_F, up_F, act_F, gated_F = (trace.arrays[name, layer][row] for name in NAMES)
    ids = largest(abs(gated_F), k)
    by_token = map(tuple, trace.arrays["gated", layer][:, ids].T.tolist())
    columns = (ids, gate_F[ids], act_F[ids], up_F[ids], gated_F[ids])
    neurons = tuple(map(Neuron, *(column.tolist() for column in columns), by_token))
    return Neurons(layer, trace.positions[row], trace.token_ids, trace.positions, neurons)


def row_of_position(trace: Trace, position: object) -> int:
    """Return where a position stands on a trace's T axes; InputError if the trace does not hold it."""
    if isinstance(position, int) and not isinstance(position, bool):
        index = position + len(trace.token_ids) if position < 0 else position
        if index in trace.positions:
            return trace.positions.index(index)
    raise InputError(f"position is {show_value(position)}; this trace holds {list(trace.positions)}")
