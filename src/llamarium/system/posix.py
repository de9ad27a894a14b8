"""Linux and macOS."""

import fcntl
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

STOP_SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a program to end."""

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # Python names MAP_NORESERVE in later versions only


def open_file(path: Path, flags: int, mode: int = 0o666, *, follows_links: bool = True, waits: bool = True) -> int:
    """Return a descriptor of a file, which is read and written as bytes.

    Args:
        path: The file.
        flags: `os.O_RDWR`, `os.O_CREAT` and so on.
        mode: Permissions of a new file.
        follows_links: Whether the path may be a symbolic link.
        waits: Whether to wait for the other end if the path is a named pipe.
    """
    flags |= 0 if follows_links else os.O_NOFOLLOW
    return os.open(path, flags | (0 if waits else os.O_NONBLOCK), mode)


def lock(descriptor: int) -> bool | None:
    """Lock an open file or directory until it is closed, or the process ends.

    Returns:
        False if another process holds the lock, None if the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def lock_path(path: Path) -> Path:
    """Return what is opened to lock a temporary file or folder: itself."""
    return path


def hide_from_others(descriptor: int) -> None:
    """Let only the owner read and write a file."""
    os.fchmod(descriptor, 0o600)


def read_at(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Read up to `num_bytes` at an offset."""
    return os.pread(descriptor, num_bytes, offset)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write bytes at an offset."""
    os.pwrite(descriptor, data, offset)


def read_parts(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Read a file from its beginning into several buffers; return the number of bytes."""
    return os.preadv(descriptor, parts, 0)


def write_parts(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Write several buffers one after the other; return the number of bytes written, fewer on a full disk."""
    return os.writev(descriptor, parts)


def remove_open(path: Path, descriptor: int) -> None:
    """Remove a file that is open and locked, and close it. Nobody else can lock it in between."""
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_number(descriptor: int) -> int:
    """Return what C code reads an open file by: its descriptor."""
    return descriptor


def reserve(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory, whose pages are allocated when they are written.

    Raises:
        OSError, OverflowError or ValueError: If the address space has no room for it.
    """
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def memory() -> tuple[int | None, int]:
    """Return the available and the total memory in bytes; macOS does not say what is available."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total
    except (OSError, StopIteration, ValueError):
        return None, total


def usable_cpus() -> int:
    """Return on how many logical processors this process may run."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def physical_cores() -> int:
    """Return on how many physical cores this process may run; logical processors if the system does not say."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    siblings = (Path(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list") for i in cpus)
    try:
        return len({file.read_text(encoding="ascii") for file in siblings})
    except OSError:
        return len(cpus)


def processor_name() -> str | None:
    """Return the processor's name as Linux knows it, or None."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((name.strip() for key, _, name in pairs if key.strip() == "model name"), None)


def prepare_streams() -> None:
    """Do nothing: the locale says how text is encoded, and terminals understand escape sequences."""
