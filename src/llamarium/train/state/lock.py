"""Lock a run's folder so that two runs cannot overwrite each other's checkpoints."""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamarium.errors import TrainingError, escape
from llamarium.io import unwritable
from llamarium.system import lock, open_file, read_at, remove_open, write_at


@contextmanager
def run_lock(run: Path) -> Generator[None]:
    """Lock a run's folder for this process; create the folder if it is missing.

    The lock is released when the process ends, so a killed run needs no cleanup. If at the end the folder has
    only the lock, as the run was refused, it is removed together with parent folders that were created for it.

    Raises:
        TrainingError: If another process holds the lock; the message names the process.
        OutputError: If the lock cannot be written.
    """
    try:
        missing = [path for path in (run, *run.parents) if not path.exists()]
        run.mkdir(parents=True, exist_ok=True)
        # not through a symbolic link, which would let it be written elsewhere
        descriptor = open_file(run / ".lock", os.O_RDWR | os.O_CREAT, 0o644, follows_links=False)
    except OSError as error:
        raise unwritable(run, error) from error
    try:
        _lock(run, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        yield
    finally:
        _release(run, missing, descriptor)


def _release(run: Path, made: list[Path], descriptor: int) -> None:
    """Release the lock, and remove the folders that were created for a refused run."""
    if not made or [path.name for path in run.iterdir()] != [".lock"]:
        os.close(descriptor)
        return
    with suppress(OSError):
        remove_open(run / ".lock", descriptor)
        for path in made:  # innermost first; non-empty ones stay
            path.rmdir()


def _lock(run: Path, descriptor: int) -> None:
    is_locked = lock(descriptor)
    if is_locked is None:
        raise TrainingError(
            f"{escape(run)}: the file system cannot lock the folder, so a second run could not be kept out of it; "
            "choose a folder on another one"
        )
    if not is_locked:
        holder = read_at(descriptor, 200, 0).decode("utf-8", "replace").strip() or "not named"
        raise TrainingError(
            f"{escape(run)}: another run is training in this folder (process {escape(holder)}); wait for it, "
            "end it, or choose another folder"
        )
    try:
        os.ftruncate(descriptor, 0)
        write_at(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        raise unwritable(run, error) from error
