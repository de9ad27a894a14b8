"""Lock a run's folder, so that two runs cannot overwrite each other's checkpoints."""

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamarium.errors import TrainingError, escape
from llamarium.io import unwritable


@contextmanager
def run_lock(run: Path) -> Generator[None]:
    """Let only one process train in a folder, which is made if missing.

    TrainingError if another process, which is named, holds the lock; OutputError if it cannot be written. The lock is
    the kernel's (`flock`) and ends with the process, so a killed run needs no cleanup. If the folder holds nothing but
    the lock at the end, as the run was refused, both are removed, and parent folders that were made for it.
    """
    try:
        made = [path for path in (run, *run.parents) if not path.exists()]
        run.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # no link's target is written
        descriptor = os.open(run / ".lock", flags, 0o644)
    except OSError as error:
        raise unwritable(run, error) from error
    try:
        _lock(run, descriptor)
        try:
            yield
        finally:
            _tidy(run, made)
    finally:
        os.close(descriptor)


def _tidy(run: Path, made: list[Path]) -> None:
    """Remove the folders made for a refused run, while the lock is held."""
    with suppress(OSError):
        if made and [path.name for path in run.iterdir()] == [".lock"]:
            (run / ".lock").unlink()
            for path in made:  # the innermost first; one in use stays
                path.rmdir()


def _lock(run: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "not named"
        raise TrainingError(
            f"{escape(run)}: another run is training in this folder (process {escape(holder)}); wait for it, "
            "end it, or choose another folder"
        ) from None
    except OSError as error:
        raise TrainingError(
            f"{escape(run)}: the file system cannot lock the folder ({escape(error.strerror or error)}), so a "
            "second run could not be kept out of it; choose a folder on another one"
        ) from None
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        raise unwritable(run, error) from error
