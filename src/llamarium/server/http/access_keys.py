"""Reads the server's API keys from options, environment and file. Imports nothing heavy."""

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from llamarium.errors import OptionError, escape, warn_caller

KEY_VARIABLE = "LLAMARIUM_API_KEY"
"""Environment variable with an API key."""


def access_keys(file: Path | None, given: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the API keys from options, from `KEY_VARIABLE` and from a file.

    Args:
        file: A file with one key per line; blank lines and lines that start with `#` are ignored.
        given: Keys from options.

    Raises:
        OptionError: If a key is empty or has characters that are not allowed in a header, or if the file cannot be
            read or contains no key.
    """
    of_environment = [("the variable " + KEY_VARIABLE, os.environ[KEY_VARIABLE])] if KEY_VARIABLE in os.environ else []
    of_file = [] if file is None else _keys_of_file(file)
    keys = [*(("the option", key) for key in given), *of_environment, *of_file]
    for place, key in keys:
        if not key.strip():
            raise OptionError(f"{place}: the API key is empty; set one, or leave it out")
        if not key.strip().isascii() or not key.strip().isprintable():
            reason = "has characters that are not allowed in an HTTP header"
            raise OptionError(f"{place}: the API key {reason}; expected printable ASCII")
    return tuple(key.strip() for _, key in keys)


def _keys_of_file(file: Path) -> list[tuple[str, str]]:
    """Return (location, key) for each key of a file."""
    lines = enumerate(_read(file).splitlines(), 1)
    keys = [(f"{escape(file)}, line {number}", line) for number, line in lines]
    keys = [(place, line) for place, line in keys if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise OptionError(f"{escape(file)}: contains no API key; expected one per line")
    return keys


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read()
            _warn_of_others(file, os.fstat(stream.fileno()))
            return text
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(f"{escape(file)}: cannot be read: {why}; expected one API key per line") from None


def _warn_of_others(file: Path, status: os.stat_result) -> None:
    """Warn if other users can read or change a key file.

    It is no error, as secrets mounted by Docker and Kubernetes have mode 444 or 644, in a container with a single user.
    A file of root may be readable by its group: systemd and Kubernetes pass secrets to a service's user that way.

    Args:
        file: The file, for the message.
        status: The status of the opened file, i.e. of a link's target.
    """
    if sys.platform == "win32" or not stat.S_ISREG(status.st_mode):  # Windows has no such permissions
        return
    user = os.geteuid()
    if status.st_uid not in (0, user):
        warn_caller(f"{escape(file)}: it belongs to user {status.st_uid}, who can read and change the keys; chown it")
    mode, may_read = stat.S_IMODE(status.st_mode), 0o004 if status.st_uid == 0 != user else 0o044
    if verbs := [word for word, bits in (("read", may_read), ("change", 0o022)) if mode & bits]:
        can = " and ".join(verbs)
        warn_caller(f"{escape(file)}: other users can {can} the keys (mode {mode:03o}): chmod 600 {escape(file)}")
