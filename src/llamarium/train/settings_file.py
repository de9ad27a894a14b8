"""The TOML file of a run's settings, including earlier names of settings."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from llamarium.errors import TrainingError, escape, show_value

_EARLIER_NAMES = {"too_long": "truncate"}

# Python decodes bytes of the command line that are not UTF-8 to lone surrogates, which TOML cannot represent.
_HALF_PAIR = re.compile("[\ud800-\udfff]")


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


def check_text(name: str, value: object) -> None:
    """Raise TrainingError if TOML cannot hold a text: if it, or a name in a mapping, is not valid Unicode."""
    texts = list(cast("Mapping[str, float]", value)) if isinstance(value, Mapping) else [value]
    if any(isinstance(text, str) and _HALF_PAIR.search(text) for text in texts):
        raise TrainingError(
            f"{name} is {show_value(value)}; expected a text that is valid Unicode (rename a file whose name is not)"
        )
