"""The server's API keys, from options, environment and file. Imports nothing heavy."""

import os
from collections.abc import Iterable
from pathlib import Path

from llamarium.errors import OptionError, escape

KEY_VARIABLE = "LLAMARIUM_API_KEY"
"""An environment variable with a key."""


def access_keys(file: Path | None, given: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the keys of `given`, of `KEY_VARIABLE`, and of a file with one a line."""
    of_environment = [os.environ[KEY_VARIABLE]] if KEY_VARIABLE in os.environ else []
    of_file = [] if file is None else _read(file).splitlines() or [""]
    keys = tuple(key.strip() for key in (*given, *of_environment, *of_file))
    if "" in keys:
        raise OptionError("an API key is empty; give one, or leave the option, the line or the variable out")
    if any(not key.isascii() or not key.isprintable() for key in keys):
        raise OptionError("an API key has characters that no HTTP header holds; expected printable ASCII")
    return keys


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not in UTF-8"
        raise OptionError(f"{escape(file)}: cannot be read: {why}; expected API keys, one a line") from None
