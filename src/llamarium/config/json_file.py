"""Small JSON files beside a model."""

import stat
from pathlib import Path
from typing import Any

from llamarium.errors import ConfigError, escape
from llamarium.strict_json import parse_json


def read_json_object(path: Path, limit_bytes: int = 2 * 2**20) -> dict[str, Any]:
    """Read one JSON object from a small file.

    ConfigError if the file is missing, not a regular file, larger than `limit_bytes`, not UTF-8 or JSON, nested too
    deeply, not an object, or if it has a key twice, a NaN or an infinity, which JSON lacks.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise ConfigError(f"{escape(path)}: is not a regular file; expected a JSON file")
        if status.st_size > limit_bytes:
            raise ConfigError(f"{escape(path)}: {status.st_size} bytes; expected at most {limit_bytes} for a JSON file")
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError, as NotJson is
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{escape(path)}: cannot be read as JSON: {escape(why)}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{escape(path)}: expected a JSON object, found {type(value).__name__}")
    return value
