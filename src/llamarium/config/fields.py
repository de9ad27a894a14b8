"""Typed access to the fields of a config; errors name the file, the field and the value."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from llamarium.errors import ConfigError, escape, show_value


def check(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise ConfigError unless `ok`."""
    if not ok:
        raise ConfigError(f"{name} is {escape(value)}; expected {expected}")


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a float, or an integer that fits into a float."""
    return isinstance(value, float) or (is_int(value) and abs(value) < 2**63)  # float() of a huge one overflows


def require(raw: Mapping[str, Any], name: str, kind: type, source: str) -> Any:
    """Return a required field; ConfigError if it is missing or has another type."""
    if name not in raw:
        raise ConfigError(f"{source}: {name} is missing; a Llama config needs it")
    return typed(raw[name], name, kind, source)


def optional(raw: Mapping[str, Any], name: str, kind: type, default: Any, source: str) -> Any:
    """Return a field, or `default` if it is missing or null; ConfigError if it has another type."""
    return default if raw.get(name) is None else typed(raw[name], name, kind, source)


def typed(value: Any, name: str, kind: type, source: str) -> Any:
    """Return a value after checking its type; integers are accepted as floats. ConfigError for another type."""
    checks: dict[type, Callable[[object], bool]] = {int: is_int, float: is_number}
    ok = checks[kind](value) if kind in checks else isinstance(value, kind)
    if not ok:
        raise ConfigError(f"{source}: {name} is {show_value(value)}; expected {kind.__name__}")
    return value


def token_id(raw: Mapping[str, Any], name: str, source: str) -> int | None:
    """Return a token id, or None; ConfigError if it is invalid."""
    ids = token_ids(raw, name, source)
    if len(ids) > 1:
        raise ConfigError(f"{source}: {name} is {list(ids)}; expected one id")
    return ids[0] if ids else None


def token_ids(raw: Mapping[str, Any], name: str, source: str) -> tuple[int, ...]:
    """Return the token ids of a field, an integer, a list or null; ConfigError if one is invalid."""
    value = raw.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if name == "pad_token_id" and values == [-1]:  # Llama 2: -1 means none
        return ()
    for item in values:
        if not is_int(item) or item < 0:
            raise ConfigError(f"{source}: {name} is {show_value(value)}; expected ids of 0 or more")
    return tuple(values)
