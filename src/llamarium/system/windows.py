"""Windows 10 and later."""

import ctypes
import mmap
import msvcrt
import os
import signal
import sys
import winreg
from collections.abc import Sequence
from ctypes import wintypes
from io import TextIOWrapper
from pathlib import Path

assert sys.platform == "win32"

STOP_SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK)
"""Signals that ask a program to end. SIGBREAK is Ctrl-Break, which also reaches programs without a window."""

_kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
_LOCK_EXCLUSIVE, _LOCK_AT_ONCE, _IS_LOCKED = 2, 1, 33  # LOCKFILE_..., ERROR_LOCK_VIOLATION
_LOCKED_BYTE = 2**63 - 2  # past the end of any file: other processes cannot read or write a locked byte
_KEEPS_CORE, _NO_ROOM = 0, 122  # RelationProcessorCore, ERROR_INSUFFICIENT_BUFFER
_ESCAPES = 4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING


class _Overlapped(ctypes.Structure):
    _fields_ = [
        *(("internal", ctypes.c_size_t), ("internal_high", ctypes.c_size_t)),
        *(("offset", ctypes.c_uint32), ("offset_high", ctypes.c_uint32), ("event", wintypes.HANDLE)),
    ]


class _MemoryStatus(ctypes.Structure):
    _fields_ = [
        *(("length", ctypes.c_uint32), ("load", ctypes.c_uint32)),
        *((name, ctypes.c_uint64) for name in ("total", "free", "total_page", "free_page", "total_virtual")),
        *((name, ctypes.c_uint64) for name in ("free_virtual", "free_extended")),
    ]


class _Core(ctypes.Structure):
    """SYSTEM_LOGICAL_PROCESSOR_INFORMATION."""

    _fields_ = [("cpus", ctypes.c_size_t), ("relationship", ctypes.c_int), ("rest", ctypes.c_uint64 * 2)]


def open_file(path: Path, flags: int, mode: int = 0o666, *, follows_links: bool = True, waits: bool = True) -> int:
    """Return a descriptor of a file, which is read and written as bytes.

    Args:
        path: The file.
        flags: `os.O_RDWR`, `os.O_CREAT` and so on.
        mode: Permissions of a new file.
        follows_links: Whether the path may be a symbolic link.
        waits: Without effect: named pipes are not in folders.
    """
    if not follows_links and path.is_symlink():
        raise OSError(f"{path} is a symbolic link")
    return os.open(path, flags | os.O_BINARY | os.O_NOINHERIT, mode)


def lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed, or the process ends.

    Returns:
        False if another process holds the lock, None if the file system has no locks.
    """
    at = _Overlapped(offset=_LOCKED_BYTE & 0xFFFFFFFF, offset_high=_LOCKED_BYTE >> 32)
    handle = wintypes.HANDLE(msvcrt.get_osfhandle(descriptor))
    if _kernel32.LockFileEx(handle, _LOCK_EXCLUSIVE | _LOCK_AT_ONCE, 0, 1, 0, ctypes.byref(at)):
        return True
    return False if ctypes.get_last_error() == _IS_LOCKED else None


def lock_path(path: Path) -> Path:
    """Return what is opened to lock a temporary file or folder: a file in a folder, which cannot be opened itself."""
    return path / "lock" if path.is_dir() else path


def hide_from_others(descriptor: int) -> None:
    """Do nothing: a file has the permissions of its folder, and those of a user's folder are the user's."""


def read_at(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Read up to `num_bytes` at an offset."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, num_bytes)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write bytes at an offset."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    os.write(descriptor, data)


def read_parts(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Read a file from its beginning into several buffers; return the number of bytes."""
    num_bytes = 0
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        for part in parts:
            left = part.cast("B")
            while left and (count := file.readinto(left)):
                left, num_bytes = left[count:], num_bytes + count
    return num_bytes


def write_parts(descriptor: int, parts: Sequence[memoryview]) -> int:
    """Write several buffers one after the other; return the number of bytes."""
    num_bytes = 0
    for part in parts:
        left = part.cast("B")
        while left:
            count = os.write(descriptor, left)
            left, num_bytes = left[count:], num_bytes + count
    return num_bytes


def remove_open(path: Path, descriptor: int) -> None:
    """Close a file and remove it, unless another process has opened it in between."""
    os.close(descriptor)
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return


def sync(path: Path) -> None:
    """Flush a file's content to the disk; a directory's entries need no call."""
    if path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR)  # a descriptor for reading cannot be flushed
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_number(descriptor: int) -> int:
    """Return what C code reads an open file by: its handle, which has 32 bits."""
    return msvcrt.get_osfhandle(descriptor)


def reserve(num_bytes: int) -> mmap.mmap:
    """Return zeroed memory, whose pages are allocated when they are written, but promised by the system now.

    Raises:
        OSError, OverflowError or ValueError: If memory and page file have no room for it.
    """
    return mmap.mmap(-1, num_bytes)


def memory() -> tuple[int | None, int]:
    """Return the available and the total memory in bytes."""
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not _kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise ctypes.WinError(ctypes.get_last_error())
    return status.free, status.total


def usable_cpus() -> int:
    """Return on how many logical processors this process may run."""
    return _affinity().bit_count() or os.cpu_count() or 1


def physical_cores() -> int:
    """Return on how many physical cores this process may run; logical processors if the system does not say."""
    length = ctypes.c_uint32(0)
    _kernel32.GetLogicalProcessorInformation(None, ctypes.byref(length))
    if ctypes.get_last_error() != _NO_ROOM:
        return usable_cpus()
    cores = (_Core * (length.value // ctypes.sizeof(_Core)))()
    if not _kernel32.GetLogicalProcessorInformation(cores, ctypes.byref(length)):
        return usable_cpus()
    usable = _affinity()
    count = sum(1 for core in cores if core.relationship == _KEEPS_CORE and core.cpus & usable)
    return count or usable_cpus()


def _affinity() -> int:
    """Return the logical processors of this process as bits; 0 if they are not known."""
    own, all_ = ctypes.c_size_t(), ctypes.c_size_t()
    current = wintypes.HANDLE(-1)  # GetCurrentProcess
    known = _kernel32.GetProcessAffinityMask(current, ctypes.byref(own), ctypes.byref(all_))
    return own.value if known else 0


def processor_name() -> str | None:
    """Return the processor's name as the registry has it, or None."""
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        return None


def prepare_streams() -> None:
    """Read and write files and pipes as UTF-8, and let the console understand escape sequences.

    By default Python takes the language's old code page for what is no console, which has few of Unicode's characters.
    PYTHONIOENCODING and PYTHONUTF8 are respected.
    """
    is_chosen = "PYTHONIOENCODING" in os.environ or sys.flags.utf8_mode
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if not isinstance(stream, TextIOWrapper):
            continue
        if stream.isatty():
            _understand_escapes(stream.fileno())
        elif not is_chosen:
            stream.reconfigure(encoding="utf-8", errors=stream.errors)


def _understand_escapes(descriptor: int) -> None:
    handle, mode = wintypes.HANDLE(msvcrt.get_osfhandle(descriptor)), ctypes.c_uint32()
    if _kernel32.GetConsoleMode(handle, ctypes.byref(mode)):
        _kernel32.SetConsoleMode(handle, mode.value | _ESCAPES)
