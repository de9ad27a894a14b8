"""What a killed writer leaves beside its target: a name like ours without a lock on it, removed at the next start.

A writer holds a lock on what it writes. The system gives it back whenever the process ends, so a name like ours without
a lock is free. Where there are no such locks (Windows) nothing is removed.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import NoReturn

if sys.platform != "win32":
    import fcntl

_STALE_AFTER_S = 24 * 3600


@contextlib.contextmanager
def held(temporary: Path) -> Generator[None]:
    """Hold the lock on a file or folder that is being written, and end of SIGTERM by an exception, which removes it."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        _lock(descriptor)
        with _term_raises():
            yield
    finally:
        os.close(descriptor)


def take(descriptor: int) -> bool:
    """Take the lock on an open file until it is closed; False if another process has it.

    Without locks there is none to hold.
    """
    return _lock(descriptor) is not False


def remove_leftovers(target: Path) -> None:
    """Remove what writers of `target` that were killed have left; give back what one had moved out of the way."""
    ours = re.compile(re.escape(f".{target.name}.") + r"[a-z0-9_]{8}(\.part)?")
    with contextlib.suppress(OSError):
        for path in [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]:
            if _is_left(path):
                _remove(path, target)


def remove_stale(folder: Path, pattern: str) -> None:
    """Remove folders that killed processes have left, but nothing of the last day, which another may be writing."""
    for old in folder.glob(pattern):
        if old.stat().st_mtime < time.time() - _STALE_AFTER_S:
            shutil.rmtree(old, ignore_errors=True)


def _remove(path: Path, target: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif {inner.name for inner in path.iterdir()} <= {"new", "old"}:
        if Path(path, "old").exists() and not target.exists():
            Path(path, "old").rename(target)  # killed between two renames
        shutil.rmtree(path)


def _is_left(path: Path) -> bool:
    """Whether it has no writer."""
    if path.is_symlink() or path.is_dir() == (path.suffix == ".part"):
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _lock(descriptor) is True
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Take the lock; False if it is held, None where there are no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


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
