"""LoRA's settings: rank, strength, and which Linears get an adapter. `lora.py` explains LoRA."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

from llamarium.errors import TrainingError, escape, show_value
from llamarium.runtime.adapter import LAYER_LINEARS

ALL_PROJECTIONS = tuple(name.rpartition(".")[2] for name in LAYER_LINEARS.values())
"""Every Linear of a layer; the head is none of them."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings of the adapters; TrainingError for a value outside its range.

    Attributes:
        r: Rank, at least 1.
        alpha: Strength; the correction is multiplied by alpha / r.
        dropout: Share of the adapters' inputs that is zeroed in training, in [0, 1).
        target_modules: The Linears that get one, by the end of their name: `q_proj`, `mlp.up_proj`,
            `layers.0.self_attn.q_proj`. "all-linear" is every Linear except the head.
        use_rslora: Scale by alpha / sqrt(r).
        use_dora: Learn each row's length, too.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ALL_PROJECTIONS
    use_rslora: bool = False
    use_dora: bool = False

    def __post_init__(self) -> None:
        _check("r", self.r, "a whole number of at least 1", _is_number(self.r, int) and self.r >= 1)
        _check("alpha", self.alpha, "a number above 0, at most 1e6", _is_number(self.alpha) and 0 < self.alpha <= 1e6)
        _check("dropout", self.dropout, "at least 0 and below 1", _is_number(self.dropout) and 0 <= self.dropout < 1)
        for name in ("use_rslora", "use_dora"):
            value: object = getattr(self, name)
            _check(name, value, "true or false", isinstance(value, bool))
        targets: object = self.target_modules
        if targets != "all-linear":
            names = cast("tuple[object, ...]", targets) if isinstance(targets, tuple) else ()
            good = bool(names) and all(isinstance(name, str) and name for name in names)
            _check("target_modules", targets, '"all-linear" or a tuple of names such as "q_proj"', good)

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def choose(self, linears: Sequence[str], *, is_tied: bool) -> list[str]:
        """Return the Linears, by full name, that get an adapter, in the model's order.

        `is_tied`: the head is the embedding table. TrainingError for a target that the model lacks or that cannot have
        one.
        """
        targets = self.target_modules
        if isinstance(targets, str):  # "all-linear"
            return [name for name in linears if name != "lm_head"]
        chosen = {target: [name for name in linears if f".{name}".endswith(f".{target}")] for target in targets}
        if unknown := [target for target, found in chosen.items() if not found]:
            there_are = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
            shown = ", ".join(escape(name, 80) for name in unknown[:10])
            raise TrainingError(f"LoRA: the model has no Linear called {shown}; there are: {there_are}")
        wanted = set(chain.from_iterable(chosen.values()))
        if "lm_head" in wanted and is_tied:
            raise TrainingError(
                "LoRA: this model's lm_head is its embedding table, which a merge would part; leave it out"
            )
        return [name for name in linears if name in wanted]


def _check(name: str, value: object, expected: str, good: bool) -> None:
    if not good:
        raise TrainingError(f"LoRA: {name} is {show_value(value)}; expected {expected}")


def _is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
