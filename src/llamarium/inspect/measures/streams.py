"""Distance of two passes' residual streams, layer by layer."""

import math
from dataclasses import dataclass

import numpy as np

from llamarium.errors import InputError
from llamarium.inspect.numbers import Floats, lengths
from llamarium.inspect.shapes import print_key
from llamarium.inspect.trace import Trace
from llamarium.runtime.taps import Key


@dataclass(frozen=True, slots=True)
class StreamError:
    """The distance of the stream after a layer from another pass's.

    Attributes:
        relative: For each position the length of the difference over the length of the other's stream.
        cosine: For each position that of the angle between the two.
    """

    layer: int
    relative: tuple[float, ...]
    cosine: tuple[float, ...]


def relative_error(error: float, reference: float) -> float:
    """Return the length of an error over that of its reference; 0 where both are 0."""
    return error / reference if reference else 0.0 if error == 0 else math.inf


def stream_errors(trace: Trace, against: Trace) -> list[StreamError]:
    """Return the distance of a trace's stream after each layer from that of `against`; both hold "resid".

    InputError if the two are not of the same tokens and layers.
    """
    are_alike = all(getattr(trace, name) == getattr(against, name) for name in ("token_ids", "positions", "layers"))
    keys: list[Key] = [("resid", layer) for layer in trace.layers]
    if not are_alike or any(key not in trace.arrays or key not in against.arrays for key in keys) or not keys:
        raise InputError('the traces are not of the same tokens and layers; trace both with names=["resid"]')
    return [
        _stream_error(layer, trace.arrays["resid", layer], against.arrays["resid", layer]) for layer in trace.layers
    ]


def _stream_error(layer: int, here_TD: Floats, there_TD: Floats) -> StreamError:
    if here_TD.shape != there_TD.shape:
        name = print_key(("resid", layer))
        raise InputError(f"{name} is {here_TD.shape} and {there_TD.shape}; expected one model's shape")
    x_TD, y_TD = here_TD.astype(np.float64), there_TD.astype(np.float64)
    norms = zip(lengths(x_TD - y_TD).tolist(), lengths(y_TD).tolist(), strict=True)
    cosine_T = (x_TD * y_TD).sum(-1) / np.maximum(lengths(x_TD) * lengths(y_TD), 1e-8)
    return StreamError(layer, tuple(relative_error(*pair) for pair in norms), tuple(cosine_T.tolist()))
