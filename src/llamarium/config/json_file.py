"""Strict JSON: no key twice, no NaN, bounded size."""

import json
import stat
from pathlib import Path
from typing import Any, cast

from llamarium.errors import ConfigError, escape, show_value


def read_json_object(path: Path, limit_bytes: int = 2 * 2**20) -> dict[str, Any]:
    """Read one JSON object from a small file.

    ConfigError if the file is missing, no regular file, larger than `limit_bytes`, no UTF-8, no JSON, nested too
    deeply, no object, has a key twice, or has NaN or an infinity, which JSON lacks.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise ConfigError(f"{escape(path)}: is no regular file; expected a JSON file")
        if status.st_size > limit_bytes:
            raise ConfigError(f"{escape(path)}: {status.st_size} bytes; expected at most {limit_bytes} for a JSON file")
        text = path.read_bytes().decode("utf-8")
        value = json.loads(text, object_pairs_hook=without_duplicates, parse_constant=no_constant)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{escape(path)}: cannot be read as JSON: {escape(why)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{escape(path)}: expected a JSON object, found {type(value).__name__}")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse, by a ValueError, two equal keys, of which json would take the last; an `object_pairs_hook`."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {show_value(twice)} stands there twice")
    return found


def without_nulls(value: Any) -> Any:
    """Return JSON's values without fields that are null, within lists and objects, too; null means left out."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in cast("dict[str, Any]", value).items() if item is not None}
    return [without_nulls(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def no_constant(name: str) -> float:
    """Refuse NaN and infinities, which JSON lacks, by a ValueError. A `parse_constant`."""
    raise ValueError(f"{name} is no number of JSON")
