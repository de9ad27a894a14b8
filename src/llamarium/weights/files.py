"""Opening files that came from outside, and writing files that are complete or absent."""

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from llamarium.errors import CheckpointError, ModelNotFoundError, escape


def regular_size(path: Path) -> int:
    """Return the size in bytes of the regular file at `path`; a symbolic link is followed, as the hub's cache needs.

    Raises:
        ModelNotFoundError: If nothing is there, or a link leads nowhere.
        CheckpointError: If it cannot be looked at, or is a folder, a pipe or a device, which reading might block on.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        link = " (a symbolic link that leads nowhere)" if path.is_symlink() else ""
        raise ModelNotFoundError(f"{escape(path)}: no such file{link}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{escape(path)}: cannot be opened: {escape(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise CheckpointError(f"{escape(path)}: is {kind}; expected a file")
    return status.st_size


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hex.

    Raises:
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """Write `path` so that it is complete or untouched: a temporary file beside it, synced, then renamed over it.

    Raises:
        OSError: As the file system says; the temporary file is gone then and `path` is what it was.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp's 0600 is for secrets
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
