"""Lock a run's folder so that two runs cannot overwrite each other's checkpoints."""

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
    """Lock a run's folder for this process; create the folder if it is missing.

    The lock (`flock`) is released when the process ends, so a killed run needs no cleanup. If at the end the folder has
    only the lock, as the run was refused, it is removed together with parent folders that were created for it.

    Raises:
        TrainingError: If another process holds the lock; the message names the process.
        OutputError: If the lock cannot be written.
    """
    try:
        missing = [path for path in (run, *run.parents) if not path.exists()]
        run.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # do not write through a symbolic link
        descriptor = os.open(run / ".lock", flags, 0o644)
    except OSError as error:
        raise unwritable(run, error) from error
    try:
        _lock(run, descriptor)
        try:
            yield
        finally:
            _tidy(run, missing)
    finally:
        os.close(descriptor)


def _tidy(run: Path, made: list[Path]) -> None:
    """Remove the folders created for a refused run, while the lock is held."""
    with suppress(OSError):
        if made and [path.name for path in run.iterdir()] == [".lock"]:
            (run / ".lock").unlink()
            for path in made:  # innermost first; non-empty ones stay
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
