"""Names, shapes and sizes of the activations of a trace, computed from the config without running the model."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import InputError, MemoryBudgetError, show_value
from llamarium.inspect.forward import PREFILL_CHUNK
from llamarium.inspect.numbers import JsonView
from llamarium.kernels.step_priority import piece_tokens
from llamarium.runtime.adapter import LAYER_LINEARS
from llamarium.runtime.runner import Runner
from llamarium.runtime.taps import ACTIVATIONS, FROM_CACHE, Key, axis_sizes

_BYTES = 4  # float32

_EXACT_CHUNK = 256  # tokens per batch if splitting a text does not change bits; bounds temporary memory


@dataclass(frozen=True, slots=True)
class ActivationShape(JsonView):
    """The shape of an activation.

    Attributes:
        key: Public name, such as "layers.3.q".
        axes: A letter per axis, as in `ACTIVATIONS`.
        shape: Size of each axis.
        num_bytes: Size in float32.
    """

    key: str
    axes: str
    shape: tuple[int, ...]
    num_bytes: int


def trace_shapes(
    config: ModelConfig,
    num_tokens: int,
    *,
    names: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    positions: Sequence[int] | None = None,
) -> list[ActivationShape]:
    """Return the shapes of the activations in a trace of `num_tokens`; for the other arguments see `trace`.

    InputError for invalid names, layers or positions.
    """
    plan = TracePlan.of(config, num_tokens, names, layers, positions)
    axes = [ACTIVATIONS[name].axes for name, _ in plan.keys]
    shapes = [tuple(plan.sizes[axis] for axis in letters) for letters in axes]
    num_bytes = [_BYTES * math.prod(shape) for shape in shapes]
    return list(map(ActivationShape, map(print_key, plan.keys), axes, shapes, num_bytes))


@dataclass(frozen=True, slots=True)
class TracePlan:
    """The contents of a trace, planned before the run.

    Attributes:
        keys: Keys of the activations, in the order of computation.
        positions: Tokens on the T axes.
        sizes: Size of each axis, by its letter.
        is_row_exact: True if tokens can be computed again without the others, with the same bits.
    """

    keys: tuple[Key, ...]
    positions: tuple[int, ...]
    sizes: Mapping[str, int]
    is_row_exact: bool

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        num_tokens: int,
        names: Collection[str] | None = None,
        layers: Collection[int] | None = None,
        positions: Sequence[int] | None = None,
        *,
        is_row_exact: bool = True,
    ) -> "TracePlan":
        """Return the plan of a trace of `num_tokens`; for the other arguments and errors see `trace`."""
        selected = indices(positions, num_tokens, "positions")
        keys = _keys_of(check_names(names), sorted(indices(layers, config.num_hidden_layers, "layers")))
        return cls(keys, selected, {"T": len(selected), "S": num_tokens, **axis_sizes(config)}, is_row_exact)

    @property
    def chunk(self) -> int:
        """Tokens per batch; all their activations are in memory until unneeded rows are dropped."""
        return piece_tokens(_EXACT_CHUNK) if self.is_row_exact else PREFILL_CHUNK  # PyTorch's bits depend on the batch

    @property
    def tapped(self) -> set[Key]:
        """Activations that the runner must return."""
        queries = {("q_rot", layer) for name, layer in self.keys if name in ("scores", "pattern")}
        return {key for key in self.keys if key[0] not in (*FROM_CACHE, "logits")} | queries

    @property
    def runs_every_token(self) -> bool:
        """True if activations are taken from the pass over all tokens, False if needed tokens are computed again."""
        has_all = any(ACTIVATIONS[name].axes[0] == "S" for name, _ in self.tapped)
        return has_all or not self.is_row_exact or self.sizes["T"] == self.sizes["S"]

    def num_bytes(self, key: Key) -> int:
        """Return the bytes of one activation."""
        return _BYTES * math.prod(self.sizes[a] for a in ACTIVATIONS[key[0]].axes)

    def working_bytes(self) -> int:
        """Return the bytes of temporary memory: a batch's unneeded rows, and a layer's mask, scores and keys."""
        s = self.sizes
        num_unneeded = max(0, min(self.chunk, s["S"]) - s["T"]) if self.runs_every_token else 0
        by_token = (axes for name, _ in self.tapped if (axes := ACTIVATIONS[name].axes)[0] == "T")
        batch = _BYTES * num_unneeded * sum(math.prod(s[a] for a in axes[1:]) for axes in by_token)
        if not any(name in ("scores", "pattern") for name, _ in self.keys):
            return batch
        matrices = (1 + 2 * _BYTES * s["N"]) * s["T"] * s["S"]
        keys_and_values = 2 * _BYTES * s["S"] * s["K"] * s["H"]
        return batch + matrices + keys_and_values

    def check_budget(self, budget_mb: float) -> None:
        """Check the size of the trace; MemoryBudgetError with its size and largest activations if it is too large."""
        by_name: dict[str, int] = {}
        for key in self.keys:
            by_name[key[0]] = by_name.get(key[0], 0) + self.num_bytes(key)
        if isinstance(budget_mb, bool) or not isinstance(budget_mb, int | float):  # pyright: ignore
            raise InputError(f"budget_mb is {show_value(budget_mb)}; expected megabytes, a number")
        num_bytes = sum(by_name.values()) + self.working_bytes()
        if num_bytes <= budget_mb * 1e6:
            return
        largest = sorted(by_name, key=lambda name: by_name[name], reverse=True)[:3]
        raise MemoryBudgetError(
            f"tracing {self.sizes['S']} tokens needs {num_bytes / 1e6:,.1f} MB and the budget is {budget_mb:,.1f} MB; "
            f"the largest: {', '.join(f'{name} {by_name[name] / 1e6:,.1f} MB' for name in largest)}. "
            "Restrict names, layers or positions, or raise budget_mb"
        )


def print_key(key: Key) -> str:
    """Return an activation's public name: "q" of layer 3 is "layers.3.q"."""
    name, layer = key
    return name if layer is None else f"layers.{layer}.{name}"


def parse_key(text: str) -> Key:
    """Return the key of a public name: "layers.3.q" is ("q", 3), "embed" is ("embed", None)."""
    layer, _, name = text.removeprefix("layers.").partition(".")
    return (name, int(layer)) if text.startswith("layers.") and layer.isdecimal() else (text, None)


def _keys_of(names: Sequence[str], layers: Sequence[int]) -> tuple[Key, ...]:
    outer: list[Key] = [(name, None) for name in names if not ACTIVATIONS[name].in_layer]
    inner: list[Key] = [(name, layer) for layer in layers for name in names if ACTIVATIONS[name].in_layer]
    first = [key for key in outer if key[0] == "embed"]
    return (*first, *inner, *outer[len(first) :])


def check_names(names: Collection[str] | None) -> list[str]:
    """Return activation names in the order of computation; None means all. InputError for an unknown name."""
    if not isinstance(names, Iterable | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"names is {show_value(names)}; expected some of {', '.join(ACTIVATIONS)}")
    selected = list(ACTIVATIONS) if names is None else [names] if isinstance(names, str) else list(names)
    unknown = sorted(str(name) for name in selected if name not in tuple(ACTIVATIONS))
    if unknown or not selected:
        problem = f"unknown activations {', '.join(unknown)}" if unknown else "no activation was named"
        raise InputError(f"{problem}; there are: {', '.join(ACTIVATIONS)}")
    return [name for name in ACTIVATIONS if name in selected]


def indices(selected: Collection[int] | None, size: int, subject: str) -> tuple[int, ...]:
    """Resolve indices: negative ones count from the end, duplicates are removed, None means all.

    InputError if one is out of range.
    """
    if selected is None:
        return tuple(range(size))
    check_whole(selected, subject)
    if not selected or any(not -size <= i < size for i in selected):
        raise InputError(f"{subject} are {list(selected)}; expected some within {-size}..{size - 1}")
    return tuple(dict.fromkeys(i % size for i in selected))


def check_finite(name: str, value: object, *, is_positive: bool = False) -> None:
    """Check that a value is a finite number, and above 0 if `is_positive`; InputError if not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} is {show_value(value)}; expected a finite number")
    if is_positive and value <= 0:
        raise InputError(f"{name} is {value}; expected a number above 0")


def check_whole(value: object, subject: str) -> None:
    """Check that a value is a collection of integers; InputError if not."""
    if not isinstance(value, Collection) or not all(isinstance(i, Integral) for i in cast("Collection[Any]", value)):
        raise InputError(f"{subject} is {show_value(value)}; expected a list of whole numbers")


def linear_key(layer: int, linear: str) -> str:
    """Return the state-dict key of a layer's Linear, such as "q_proj" or "down"."""
    return f"model.layers.{layer}.{LAYER_LINEARS.get(linear.removesuffix('_proj'), linear)}.weight"


def type_of(runner: Runner, key: str) -> str:
    """Return the stored type of a matrix; InputError if its module has been replaced and the type is unknown."""
    weight = runner.weights.get(EMBEDDING if key == HEAD and runner.config.tie_word_embeddings else key)
    if weight is None:
        name = key.removesuffix(".weight")
        raise InputError(f"{name} is another module, whose matrix is not known; expected a Linear")
    return weight.type_name
