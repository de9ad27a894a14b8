"""What a trace holds, by name and by shape, and what it weighs: no weights, no pass, no numbers."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, cast

from llamarium.config import ModelConfig
from llamarium.errors import InputError, MemoryBudgetError, show_value
from llamarium.generation.kept import PREFILL_CHUNK
from llamarium.runtime.runner import DTYPE_BYTES, Runner
from llamarium.runtime.taps import ACTIVATIONS, FROM_CACHE, Key

_BYTES = 2  # of a number in bfloat16, in which the presets were published

_EXACT_CHUNK = 256  # tokens of a batch where cutting a text changes no bit: bounds what a trace holds for a while


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


@dataclass(frozen=True, slots=True)
class TracePlan:
    """What is kept, decided and weighed before the run.

    Attributes:
        keys: The trace's keys, in the order of computation.
        positions: The tokens on the T axes.
        sizes: The length of each axis by its letter.
        itemsize: Bytes of a number in the dtype that the runner computes in.
        is_row_exact: Whether tokens can run once more, without the others, to be handed out.
    """

    keys: tuple[str, ...]
    positions: tuple[int, ...]
    sizes: Mapping[str, int]
    itemsize: int
    is_row_exact: bool

    @classmethod
    def of(
        cls,
        runner: Runner,
        num_tokens: int,
        names: Collection[str] | None,
        layers: Collection[int] | None,
        positions: Sequence[int] | None,
    ) -> "TracePlan":
        """Return the plan of a trace of so many tokens; raises as `trace` does for what there is not."""
        c = runner.config
        kept = indices(positions, num_tokens, "positions")
        keys = keys_of(check_names(names), sorted(indices(layers, c.num_hidden_layers, "layers")))
        return cls(keys, kept, axis_sizes(c, len(kept), num_tokens), DTYPE_BYTES[runner.dtype], runner.is_row_exact)

    @property
    def chunk(self) -> int:
        """Tokens of a batch; all of them are handed out before those that are not wanted go."""
        return _EXACT_CHUNK if self.is_row_exact else PREFILL_CHUNK  # PyTorch's bits hang on it

    @property
    def tapped(self) -> set[Key]:
        """What the runner has to hand out."""
        wanted = {split_key(key) for key in self.keys}
        queries = {("q_rot", layer) for name, layer in wanted if name in ("scores", "pattern")}
        return {key for key in wanted if key[0] not in (*FROM_CACHE, "logits")} | queries

    @property
    def runs_every_token(self) -> bool:
        """Whether the pass itself hands out what is wanted, and not some of its tokens that run once more."""
        has_all = any(ACTIVATIONS[name].axes[0] == "S" for name, _ in self.tapped)
        return has_all or not self.is_row_exact or self.sizes["T"] == self.sizes["S"]

    def wants(self, name: str, layer: int) -> bool:
        """Whether an activation of a layer is kept."""
        return make_key(name, layer) in self.keys

    def num_bytes(self, key: str) -> int:
        """What one of the keys occupies."""
        activation = ACTIVATIONS[split_key(key)[0]]
        return math.prod(self.sizes[a] for a in activation.axes) * (4 if activation.is_float32 else self.itemsize)

    def working_bytes(self) -> int:
        """What is there for a while: a batch's rows that are not wanted, one layer's mask, and `attend_eagerly`."""
        s = self.sizes
        others = max(0, min(self.chunk, s["S"]) - s["T"]) if self.runs_every_token else 0
        batch = sum(self._row_bytes(name) for name, _ in self.tapped if ACTIVATIONS[name].axes[0] == "T") * others
        if not any(ACTIVATIONS[split_key(key)[0]].is_float32 for key in self.keys):
            return batch
        matrices = (1 + 2 * 4 * s["N"]) * s["T"] * s["S"]
        keys_and_values = 2 * 4 * s["S"] * s["N"] * s["H"]
        return batch + matrices + keys_and_values

    def _row_bytes(self, name: str) -> int:
        return math.prod(self.sizes[a] for a in ACTIVATIONS[name].axes[1:]) * self.itemsize

    def check_budget(self, budget_mb: float) -> None:
        """Refuse what is too much.

        Raises:
            MemoryBudgetError: Says what it would need, and of which names the most.
        """
        by_name: dict[str, int] = {}
        for key in self.keys:
            name = split_key(key)[0]
            by_name[name] = by_name.get(name, 0) + self.num_bytes(key)
        needed = sum(by_name.values()) + self.working_bytes()
        if needed <= budget_mb * 1e6:
            return
        largest = sorted(by_name, key=lambda name: by_name[name], reverse=True)[:3]
        raise MemoryBudgetError(
            f"tracing {self.sizes['S']} tokens needs {needed / 1e6:,.1f} MB and the budget is {budget_mb:,.1f} MB; the "
            f"largest: {', '.join(f'{name} {by_name[name] / 1e6:,.1f} MB' for name in largest)}. "
            "Restrict names, layers or positions, or raise budget_mb"
        )


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
