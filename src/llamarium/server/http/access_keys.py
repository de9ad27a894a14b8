"""The server's API keys, from options, environment and file. Imports nothing heavy."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from llamarium.errors import OptionError, escape, warn_caller

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
        with file.open(encoding="utf-8") as opened:
            text = opened.read()
            _warn_of_others(file, os.fstat(opened.fileno()))
            return text
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not in UTF-8"
        raise OptionError(f"{escape(file)}: cannot be read: {why}; expected API keys, one a line") from None


def _warn_of_others(file: Path, found: os.stat_result) -> None:
    """Warn if other users can read or change a file of keys; of a link, what it leads to counts.

    It is not refused: secrets that Docker and Kubernetes mount have mode 444 or 644, in a container with one user. A
    group may read root's file: that is how systemd and Kubernetes hand one to a service's user.
    """
    if not stat.S_ISREG(found.st_mode):
        return
    user = os.geteuid()
    if found.st_uid not in (0, user):
        warn_caller(f"{escape(file)}: it belongs to user {found.st_uid}, who can read and change the keys; chown it")
    mode, may_read = stat.S_IMODE(found.st_mode), 0o004 if found.st_uid == 0 != user else 0o044
    if what := [word for word, bits in (("read", may_read), ("change", 0o022)) if mode & bits]:
        can = " and ".join(what)
        warn_caller(f"{escape(file)}: other users can {can} the keys (mode {mode:03o}): chmod 600 {escape(file)}")
