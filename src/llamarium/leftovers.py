"""Remove temporary files of killed writers.

A writer locks its temporary file or folder. The operating system releases the lock when the process ends, so a
temporary name without a lock belongs to a killed process and is removed by the next writer.
"""

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from llamarium.system import lock, lock_path, open_file

_STALE_AFTER_S = 24 * 3600


@contextlib.contextmanager
def held(temporary: Path) -> Generator[None]:
    """Lock a temporary file or folder in the body; SIGTERM raises an exception there, so that it is removed."""
    descriptor = _open_lock(temporary, creates=True)
    try:
        lock(descriptor)
        with _term_raises():
            yield
    finally:
        os.close(descriptor)


def take(descriptor: int) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock.

    Returns True on file systems without locks.
    """
    return lock(descriptor) is not False


def remove_leftovers(target: Path) -> None:
    """Remove temporary files of killed writers of `target`, and restore a target that one had moved away."""
    ours = re.compile(re.escape(f".{target.name}.") + r"[a-z0-9_]{8}(\.part)?")
    with contextlib.suppress(OSError):
        for path in [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]:
            if _is_left(path):
                _remove(path, target)


def remove_stale(folder: Path, pattern: str) -> None:
    """Remove folders of killed processes, except those of the last day, which may be in use."""
    for old in folder.glob(pattern):
        if old.stat().st_mtime < time.time() - _STALE_AFTER_S:
            shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path, target: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif {inner.name for inner in path.iterdir()} <= {"new", "old", lock_path(path).name}:
        if Path(path, "old").exists() and not target.exists():
            Path(path, "old").rename(target)  # killed between two renames
        shutil.rmtree(path)


def _is_left(path: Path) -> bool:
    """Return whether a temporary file or folder has no writer."""
    if path.is_symlink() or path.is_dir() == (path.suffix == ".part"):
        return False
    try:
        descriptor = _open_lock(path, creates=False)
    except OSError:
        return False
    try:
        return lock(descriptor) is True
    finally:
        os.close(descriptor)


def _open_lock(temporary: Path, *, creates: bool) -> int:
    """Open what is locked for a temporary file or folder: itself, or a file in the folder."""
    path = lock_path(temporary)
    return open_file(path, os.O_RDONLY | (os.O_CREAT if creates and path != temporary else 0))


@contextlib.contextmanager
def _term_raises() -> Generator[None]:
    """Let SIGTERM unwind the stack, unless another handler is set."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
