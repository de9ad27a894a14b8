"""Scaling of RoPE frequencies for a longer context.

Types and parameters are those of transformers' `modeling_rope_utils.py`; `llamarium/rope.py` computes the frequencies.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from llamarium.config.fields import check, is_int, is_number, optional, require, typed
from llamarium.errors import ConfigError, escape, show_value, warn_caller

RopeType = Literal["llama3", "linear", "yarn", "dynamic"]

# Published factors go up to 128; a much larger one means a damaged file.
_LARGEST_FACTOR = 1e6
_LARGEST = 1e30  # far below the range of float32

_PARAMETERS: dict[RopeType, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": (),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "dynamic": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """A scaling of RoPE frequencies.

    >>> llamarium.preset("llama-3.1-8b").rope_scaling.factor
    8.0

    - `llama3`: frequencies with long wavelengths are divided by `factor`, those with short ones are kept, and those
      between are interpolated (Llama 3.1).
    - `linear`: all frequencies are divided by `factor`.
    - `yarn`: frequencies are interpolated between both by their number of rotations over the original context; queries
      and keys are multiplied by `attention_factor` (Peng et al. 2023).
    - `dynamic`: frequencies depend on the length of texts beyond the context. Such texts are refused, so nothing is
      scaled; the parameters are kept for export.

    Parameters that `rope_type` does not use are None. Missing YaRN parameters get their published defaults.

    Attributes:
        factor: Ratio of the new context length to the original one, from 1; 8 for Llama 3.1, 32 for the small 3.2
            models.
        rope_type: Type of the scaling.
        low_freq_factor: Frequencies with wavelengths above `original / low_freq_factor` tokens are divided by `factor`
            (llama3).
        high_freq_factor: Frequencies with wavelengths below `original / high_freq_factor` tokens are kept (llama3).
        original_max_position_embeddings: Original context length, in tokens (llama3, yarn).
        beta_fast: Pairs with more rotations than this over the original context are kept; default 32 (yarn).
        beta_slow: Frequencies of pairs with fewer rotations are divided by `factor`; default 1 (yarn).
        attention_factor: Factor of cosines and sines; default `0.1 ln(factor) + 1` (yarn).
        truncate: Whether the bounds of the interpolation are rounded to whole pairs; default true (yarn).
    """

    factor: float
    rope_type: RopeType = "llama3"
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        """Set the defaults of YaRN and check ranges; ConfigError names the parameter."""
        check(self.rope_type in _PARAMETERS, "rope_scaling.rope_type", self.rope_type, f"one of {_names()}")
        is_factor = is_number(self.factor) and 1 <= self.factor <= _LARGEST_FACTOR
        check(
            is_factor,
            "rope_scaling.factor",
            self.factor,
            f"a finite number of at least 1, up to {_LARGEST_FACTOR:,.0f}",
        )
        if self.rope_type == "yarn":
            defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
            for name, value in (defaults | {"attention_factor": magnitude(self.factor)}).items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)
        parameters = _PARAMETERS[self.rope_type]
        for field in dataclasses.fields(self)[2:]:
            value, name = getattr(self, field.name), f"rope_scaling.{field.name}"
            if field.name not in parameters:
                check(value is None, name, value, f"None for the type {self.rope_type}")
            elif field.name == "truncate":
                check(isinstance(value, bool), name, value, "true or false")
            elif field.name == "original_max_position_embeddings":
                check(is_int(value) and 1 <= value < 2**31, name, value, "a whole number from 1 to 2^31 - 1")
            else:
                check(
                    is_number(value) and 0 < value < _LARGEST,
                    name,
                    value,
                    f"a finite number above 0, below {_LARGEST:g}",
                )
        self._check_order()

    def _check_order(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None:
            check(high > low, "rope_scaling.high_freq_factor", high, f"more than low_freq_factor ({low})")
        fast, slow = self.beta_fast, self.beta_slow
        if fast is not None and slow is not None:
            check(fast >= slow, "rope_scaling.beta_fast", fast, f"at least beta_slow ({slow})")

    def to_hf(self) -> dict[str, Any]:
        """Return the parameters with the names of a `config.json`."""
        fields = {"rope_type": self.rope_type, **dataclasses.asdict(self)}
        return {name: value for name, value in fields.items() if value is not None}


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines for a context `factor` times longer: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(
    raw: Mapping[str, Any], context: int, default_theta: float, source: str
) -> tuple[float, RopeScaling | None, tuple[str, ...]]:
    """Read theta and the scaling from `rope_scaling` (v4), `rope_parameters` (v5), or both, which must agree.

    Args:
        raw: Contents of a `config.json`.
        context: Its `max_position_embeddings`.
        default_theta: Theta if the file has none.
        source: Name of the file, for messages.

    Returns:
        Theta, the scaling or None, and notes on the values that are defaults.
    """
    spelled = [_spelled(raw, name, source) for name in ("rope_scaling", "rope_parameters")]
    places = [place for place in (raw, *spelled) if place.get("rope_theta") is not None]
    thetas = {float(typed(place["rope_theta"], "rope_theta", float, source)) for place in places}
    if len(thetas) > 1:
        raise ConfigError(f"{source}: rope_theta is given twice: {sorted(thetas)}; expected one value")
    notes = [] if thetas else [f"rope_theta {default_theta:g}"]
    scalings = [_scaling(fields, raw, context, notes, source) for fields in spelled if fields]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ConfigError(f"{source}: rope_scaling says {scalings[0]} and rope_parameters {scalings[1]}")
    return (thetas or {default_theta}).pop(), scalings[0] if scalings else None, tuple(dict.fromkeys(notes))


def _spelled(raw: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    fields: dict[str, Any] = optional(raw, name, dict, {}, source)
    nested = [key for key, value in fields.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(
            f"{source}: {name} differs by layer ({escape(', '.join(nested[:3]), 60)}); supported is one RoPE for all"
        )
    return fields


def _scaling(
    fields: Mapping[str, Any], raw: Mapping[str, Any], context: int, notes: list[str], source: str
) -> RopeScaling | None:
    """Read the scaling from one of the two fields, and add defaults to `notes`."""
    kind = next((fields[name] for name in ("rope_type", "type") if fields.get(name) is not None), None)
    if kind is None and fields.get("factor") is not None:
        raise ConfigError(f"{source}: RoPE's scaling has a factor but no rope_type; expected one of {_names()}")
    if kind not in (None, "default", *_PARAMETERS):
        raise ConfigError(f"{source}: rope_type is {show_value(kind)}; supported are {_names()} and default")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        actual = show_value(fields["partial_rotary_factor"])
        raise ConfigError(f"{source}: partial_rotary_factor is {actual}; supported is 1, whole heads")
    is_scaled = kind in _PARAMETERS
    parameters = {"factor", *(_PARAMETERS[kind] if is_scaled else ())} if is_scaled else set[str]()
    parameters |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
    unused = sorted(set(fields) - parameters - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if unused:
        listed = escape(", ".join(unused[:10]), 200)
        warn_caller(f"{source}: fields of RoPE's scaling that {kind or 'default'} does not use: {listed}")
    if not is_scaled:
        return None
    values = {name: value for name in parameters if (value := _value(fields, name, source)) is not None}
    if "original_max_position_embeddings" in parameters:
        values |= _original(fields, raw, context, notes, source)
    if kind == "yarn":
        _resolve_yarn(values, fields, context, source)
    else:
        _require_all(kind, fields, source)
    return RopeScaling(rope_type=kind, **values)


def _value(fields: Mapping[str, Any], name: str, source: str) -> Any:
    if name == "truncate":
        return optional(fields, name, bool, None, source)
    if name == "original_max_position_embeddings":
        return optional(fields, name, int, None, source)
    value = optional(fields, name, float, None, source)
    return None if value is None else float(value)


def _require_all(kind: RopeType, fields: Mapping[str, Any], source: str) -> None:
    for name in ("factor", *_PARAMETERS[kind]):
        if name != "original_max_position_embeddings":
            require(fields, name, float, source)


def _original(
    fields: Mapping[str, Any], raw: Mapping[str, Any], context: int, notes: list[str], source: str
) -> dict[str, int]:
    """Return the original context length: from the config, else from the scaling, else the context length."""
    name = "original_max_position_embeddings"
    for place in (raw, fields):
        if (value := optional(place, name, int, None, source)) is not None:
            return {name: value}
    notes.append(f"{name} {context}")
    return {name: context}


def _resolve_yarn(values: dict[str, Any], fields: Mapping[str, Any], context: int, source: str) -> None:
    """Replace `mscale` and `mscale_all_dim` by the attention factor, and a null `factor` by the ratio of contexts."""
    if "factor" not in fields:
        require(fields, "factor", float, source)
    values.setdefault("factor", context / max(1, values["original_max_position_embeddings"]))
    mscale, mscale_all_dim = values.pop("mscale", None), values.pop("mscale_all_dim", None)
    for name in ("beta_fast", "beta_slow"):
        if values.get(name) == 0:  # transformers uses the default for 0
            del values[name]
    if "attention_factor" not in values and mscale and mscale_all_dim:
        divisor = magnitude(values["factor"], mscale_all_dim)
        if not math.isfinite(divisor) or divisor == 0:
            raise ConfigError(f"{source}: mscale_all_dim is {mscale_all_dim}; expected a finite number above 0")
        values["attention_factor"] = magnitude(values["factor"], mscale) / divisor


def _names() -> str:
    return ", ".join(get_args(RopeType))
