"""LoRA settings: rank, scale and target modules. `lora.py` explains LoRA."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from llamarium.adapters.patterns import PatternMatcher
from llamarium.errors import TrainingError, escape, show_value
from llamarium.runtime.adapter import LAYER_LINEARS

ALL_PROJECTIONS = tuple(name.rpartition(".")[2] for name in LAYER_LINEARS.values())
"""The Linears of a layer, without the head."""

EMBED_TOKENS, LM_HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings of the adapters; TrainingError for a value outside its range.

    Attributes:
        r: Rank, at least 1.
        alpha: The correction is scaled by alpha / r.
        dropout: Dropout probability of the adapters' inputs in training, in [0, 1).
        target_modules: Modules that get an adapter: a tuple of names, matched against the end of the full name
            (`q_proj`, `mlp.up_proj`, `layers.0.self_attn.q_proj`, `lm_head`, `embed_tokens`); "all-linear" for every
            Linear of the layers; or another string, a regular expression for the full name.
        use_rslora: Scale by alpha / sqrt(r).
        use_dora: Use DoRA, which also learns the norm of each row.
        exclude_modules: Modules to exclude: names, or a regular expression.
        layers_to_transform: Layers to adapt, if `target_modules` are names; empty for all.
        layers_pattern: Names of the module lists that hold the layers (`layers`); empty for any.
        rank_pattern: Ranks of individual modules, by names or regular expressions for the end of the full name.
        alpha_pattern: Values of alpha for individual modules, by the same patterns.
        modules_to_save: Modules whose whole weights are trained and saved, by the end of the full name.

    Source: peft, `tuners/lora/config.py`.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ALL_PROJECTIONS
    use_rslora: bool = False
    use_dora: bool = False
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_rank("r", self.r)
        _check_alpha("alpha", self.alpha)
        _check("dropout", self.dropout, "at least 0 and below 1", _is_number(self.dropout) and 0 <= self.dropout < 1)
        for name in ("use_rslora", "use_dora"):
            value: object = getattr(self, name)
            _check(name, value, "true or false", isinstance(value, bool))

        expected = '"all-linear", a regular expression, or a tuple of names such as "q_proj"'
        targets = self.target_modules
        _check("target_modules", targets, expected, bool(targets or self.modules_to_save) and _is_text(targets))
        _check("exclude_modules", self.exclude_modules, "names or a regular expression", _is_text(self.exclude_modules))
        for name in ("layers_pattern", "modules_to_save"):
            _check(name, getattr(self, name), "a tuple of names", _are_names(getattr(self, name)))
        layers: tuple[object, ...] = self.layers_to_transform
        _check("layers_to_transform", layers, "whole numbers", all(_is_number(i, int) for i in layers))

        for pattern, rank in self.rank_pattern.items():
            _check_rank(f"rank_pattern[{show_value(pattern)}]", rank)
        for pattern, alpha in self.alpha_pattern.items():
            _check_alpha(f"alpha_pattern[{show_value(pattern)}]", alpha)

    def rank_of(self, name: str, matcher: PatternMatcher | None = None) -> int:
        """Return the rank of a module's adapter, by its full name."""
        pattern = (matcher or PatternMatcher()).first(self.rank_pattern, name)
        return self.r if pattern is None else self.rank_pattern[pattern]

    def scale_of(self, name: str, matcher: PatternMatcher | None = None) -> float:
        """Return the factor of B A x of a module's adapter."""
        matcher = matcher or PatternMatcher()
        pattern, rank = matcher.first(self.alpha_pattern, name), self.rank_of(name, matcher)
        alpha = self.alpha if pattern is None else self.alpha_pattern[pattern]
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def choose(self, modules: Sequence[str]) -> list[str]:
        """Return the full names of `modules` that get an adapter; TrainingError for an invalid pattern."""
        matcher = PatternMatcher()
        return [name for name in modules if self._targets(name, matcher)]

    def check_targets(self, modules: Sequence[str]) -> None:
        """Check that each target name is a module's, and that a pattern matches a module; TrainingError if not."""
        targets = self.target_modules if isinstance(self.target_modules, tuple) else ()
        unknown = [target for target in targets if not any(_ends_with(name, target) for name in modules)]
        if unknown or not self.choose(modules):
            unknown = unknown or [str(self.target_modules)]
            there_are = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules))
            missing = ", ".join(escape(name, 80) for name in unknown[:10])
            raise TrainingError(f"LoRA: the model has no Linear or embedding called {missing}; there are: {there_are}")

    def saves(self, name: str) -> bool:
        """Return whether a module, by its full name, or one of its parents is in `modules_to_save`.

        As in peft, a name need not begin after a dot: `norm` matches every module whose name ends with it.
        """
        return any(owner.endswith(saved) for owner in _owners(name) for saved in self.modules_to_save)

    def _targets(self, name: str, matcher: PatternMatcher) -> bool:
        if self._excludes(name, matcher) or self.saves(name):
            return False
        targets = self.target_modules
        if targets == "all-linear":
            return name not in (LM_HEAD, EMBED_TOKENS)
        if isinstance(targets, str):
            return matcher.matches(targets, name)
        if name in targets:
            return True
        return any(_ends_with(name, target) for target in targets) and self._has_layer(name, matcher)

    def _excludes(self, name: str, matcher: PatternMatcher) -> bool:
        if isinstance(self.exclude_modules, str):
            return bool(self.exclude_modules) and matcher.matches(self.exclude_modules, name)
        return any(_ends_with(name, excluded) for excluded in self.exclude_modules)

    def _has_layer(self, name: str, matcher: PatternMatcher) -> bool:
        """Return whether a module is in one of `layers_to_transform`."""
        if not self.layers_to_transform:
            return True
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if i and part.isdecimal() and i + 1 < len(parts)), None)
        if place is None:
            return False
        listed = not self.layers_pattern or any(matcher.matches(p, parts[place - 1]) for p in self.layers_pattern)
        return listed and int(parts[place]) in self.layers_to_transform


def _ends_with(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _owners(name: str) -> Iterator[str]:
    """Yield a module's full name and those of its parents."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _check_rank(name: str, value: object) -> None:
    _check(name, value, "a whole number of at least 1", _is_number(value, int) and cast(int, value) >= 1)


def _check_alpha(name: str, value: object) -> None:
    _check(name, value, "a number above 0, at most 1e6", _is_number(value) and 0 < cast(float, value) <= 1e6)


def _check(name: str, value: object, expected: str, is_valid: bool) -> None:
    if not is_valid:
        raise TrainingError(f"LoRA: {name} is {show_value(value)}; expected {expected}")


def _is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or _are_names(value)


def _are_names(value: object) -> bool:
    names: Collection[object] = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (None,)
    return all(isinstance(name, str) and name for name in names)
