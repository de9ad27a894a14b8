"""The file of a run's settings: TOML, with the names that settings had before."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.errors import TrainingError, escape

_EARLIER_NAMES = {"too_long": "truncate"}


def read_toml(file: Path) -> dict[str, Any]:
    """Return a file's settings, by their names of today; TrainingError if it cannot be read."""
    try:
        return renamed(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's, and what is nested too deep
        raise TrainingError(f"{file}: is no TOML: {escape(error)}") from None


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run of an earlier version by their names of today."""
    return {_EARLIER_NAMES.get(name, name): value for name, value in settings.items()}


def toml_value(value: Any) -> str:
    """Return a setting's value as TOML spells it."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, float]", value).items()
        return f"{{{', '.join(f'{toml_value(name)} = {weight}' for name, weight in pairs)}}}"
    if isinstance(value, str):
        body = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in value)
        return f'"{body}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
