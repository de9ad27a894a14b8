"""The TOML file of a run's settings, including earlier names of settings."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.errors import TrainingError, escape

_EARLIER_NAMES = {"too_long": "truncate"}


def read_toml(file: Path) -> dict[str, Any]:
    """Return a file's settings under their current names; TrainingError if it cannot be read."""
    try:
        return renamed(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # invalid TOML or UTF-8, or nested too deeply
        raise TrainingError(f"{file}: is no TOML: {escape(error)}") from None


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings of an earlier version to their current names."""
    return {_EARLIER_NAMES.get(name, name): value for name, value in settings.items()}


def toml_value(value: Any) -> str:
    """Format a setting's value as TOML."""
    if isinstance(value, Mapping):
        pairs = cast("Mapping[str, float]", value).items()
        return f"{{{', '.join(f'{toml_value(name)} = {weight}' for name, weight in pairs)}}}"
    if isinstance(value, str):
        body = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in value)
        return f'"{body}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
