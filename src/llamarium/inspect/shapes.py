"""What a trace holds, by name and by shape: no weights, no pass, no numbers."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, cast

from llamarium.config import ModelConfig
from llamarium.errors import InputError, show_value
from llamarium.runtime.taps import ACTIVATIONS

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


def make_key(name: str, layer: int | None) -> str:
    """Return the key of an activation in a trace: "q" of layer 3 is "layers.3.q"."""
    return name if layer is None else f"layers.{layer}.{name}"


def split_key(key: str) -> tuple[str, int | None]:
    """Return the name and the layer of a key: "layers.3.q" is ("q", 3), "embed" is ("embed", None)."""
    if not key.startswith("layers."):
        return key, None
    _, layer, name = key.split(".")
    return name, int(layer)


def axis_sizes(config: ModelConfig, num_positions: int, num_tokens: int) -> dict[str, int]:
    """Return the length of each axis by its letter."""
    return {
        "T": num_positions, "S": num_tokens, "D": config.hidden_size, "N": config.num_attention_heads,
        "K": config.num_key_value_heads, "H": config.head_dim, "F": config.intermediate_size, "V": config.vocab_size,
    }  # fmt: skip


def keys_of(names: Sequence[str], layers: Sequence[int]) -> tuple[str, ...]:
    """Every key, in the order of computation."""
    outer = [name for name in names if not ACTIVATIONS[name].in_layer]
    inner = [make_key(name, layer) for layer in layers for name in names if ACTIVATIONS[name].in_layer]
    first = [name for name in outer if name == "embed"]
    return (*first, *inner, *outer[len(first) :])


def check_names(names: Collection[str] | None) -> list[str]:
    """Return the names asked for, in the order of computation."""
    if not isinstance(names, Iterable | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"names is {show_value(names)}; expected some of {', '.join(ACTIVATIONS)}")
    wanted = set(ACTIVATIONS) if names is None else {names} if isinstance(names, str) else set(names)
    unknown = sorted(map(str, wanted - set(ACTIVATIONS)))
    if unknown or not wanted:
        found = f"unknown activations {', '.join(unknown)}" if unknown else "no activation was named"
        raise InputError(f"{found}; there are: {', '.join(ACTIVATIONS)}")
    return [name for name in ACTIVATIONS if name in wanted]


def indices(wanted: Collection[int] | None, size: int, what: str) -> tuple[int, ...]:
    """Return the indices asked for, each once, in the order given, negative ones counted from the end."""
    if wanted is None:
        return tuple(range(size))
    check_whole(wanted, what)
    if not wanted or any(not -size <= i < size for i in wanted):
        raise InputError(f"{what} are {list(wanted)}; expected some within {-size}..{size - 1}")
    return tuple(dict.fromkeys(i % size for i in wanted))


def check_whole(wanted: object, what: str) -> None:
    """Refuse what is no list of whole numbers."""
    if not isinstance(wanted, Collection) or not all(isinstance(i, Integral) for i in cast("Collection[Any]", wanted)):
        raise InputError(f"{what} is {show_value(wanted)}; expected a list of whole numbers")
