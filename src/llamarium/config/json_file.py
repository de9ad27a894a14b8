"""Reading the small JSON files of a model."""

import stat
from pathlib import Path
from typing import Any

from llamarium.errors import ConfigError, escape
from llamarium.strict_json import parse_json


def read_json_object(path: Path, limit_bytes: int = 2 * 2**20) -> dict[str, Any]:
    """Read a JSON object from a small file.

    Raises:
        ConfigError: If the file is missing, not a regular file, larger than `limit_bytes`, not UTF-8, not valid JSON,
            nested too deeply, or not an object. Duplicate keys, NaN and infinity are not valid JSON.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise ConfigError(f"{escape(path)}: is not a regular file; expected a JSON file")
        if status.st_size > limit_bytes:
            raise ConfigError(f"{escape(path)}: {status.st_size} bytes; expected at most {limit_bytes} for a JSON file")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:  # NotJson, or a path with a NUL byte, is a ValueError
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{escape(path)}: cannot be read as JSON: {escape(why)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{escape(path)}: expected a JSON object, found {type(value).__name__}")
    return value
