"""What a trace of a model would hold, from its shape alone: no weights, no pass, no numbers."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llamarium.config import ModelConfig
from llamarium.inspect.trace import ACTIVATIONS, axis_sizes, check_names, indices, keys_of, split_key

_BYTES = 2  # of a number in bfloat16, in which the presets were published


@dataclass(frozen=True, slots=True)
class Shape:
    """An activation that a trace would hold.

    Attributes:
        key: Its name, with its layer.
        axes: A letter for each axis, as `ACTIVATIONS` has them.
        shape: The sizes of the axes.
        num_bytes: In bfloat16; scores and pattern are float32.
    """

    key: str
    axes: str
    shape: tuple[int, ...]
    num_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)


def trace_shapes(
    config: ModelConfig,
    num_tokens: int,
    *,
    names: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    positions: Sequence[int] | None = None,
) -> list[Shape]:
    """Return the shapes of what `trace` would keep of a text of so many tokens.

    Raises:
        InputError: For names, layers or positions that there are not.
    """
    sizes = axis_sizes(config, len(indices(positions, num_tokens, "positions")), num_tokens)
    keys = keys_of(check_names(names), sorted(indices(layers, config.num_hidden_layers, "layers")))
    return [_shape(key, sizes) for key in keys]


def _shape(key: str, sizes: dict[str, int]) -> Shape:
    activation = ACTIVATIONS[split_key(key)[0]]
    shape = tuple(sizes[axis] for axis in activation.axes)
    return Shape(key, activation.axes, shape, math.prod(shape) * (4 if activation.is_float32 else _BYTES))
