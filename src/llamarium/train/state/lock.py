"""Lock a run's folder, so that two runs cannot overwrite each other's checkpoints."""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from llamarium.errors import TrainingError, escape
from llamarium.io import unwritable


class RunLock:
    """Context manager: only one process trains in a folder, which is made if missing.

    The lock is the kernel's (`flock`) and ends with the process, so a killed run needs no cleanup. If the folder holds
    nothing but the lock at the end, as the run was refused, both are removed, and parent folders that were made for it.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def __enter__(self) -> "RunLock":
        """Take the lock; TrainingError if another process, which is named, holds it, or OutputError."""
        path = self.run / ".lock"
        try:
            self._made = [path for path in (self.run, *self.run.parents) if not path.exists()]
            self.run.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # no link's target is written
        except OSError as error:
            raise unwritable(self.run, error) from error
        try:
            self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            self._tidy()
            os.close(self._descriptor)
            self._descriptor = None

    def _tidy(self) -> None:
        """Remove the folders made for a refused run, while the lock is held."""
        with suppress(OSError):
            if self._made and [path.name for path in self.run.iterdir()] == [".lock"]:
                (self.run / ".lock").unlink()
                for path in self._made:  # the innermost first; one in use stays
                    path.rmdir()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode("utf-8", "replace").strip() or "not named"
            raise TrainingError(
                f"{escape(self.run)}: another run is training in this folder (process {escape(holder)}); wait for it, "
                "end it, or choose another folder"
            ) from None
        except OSError as error:
            raise TrainingError(
                f"{escape(self.run)}: the file system cannot lock the folder ({escape(error.strerror or error)}), so a "
                "second run could not be kept out of it; choose a folder on another one"
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            raise unwritable(self.run, error) from error
