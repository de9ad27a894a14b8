"""Blocks of bytes in a folder, bounded, least recently used out first. Never torch.

A block is a file, `KEY-PARENT.kv`: its head, its content, and a checksum. It is written aside and renamed. Whatever is
not as it was written is a miss, and dropped. A block is of no use without its parent, the block before it, so a parent
counts as used whenever its child is.
"""

import errno
import os
import re
import stat
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from llamarium.errors import OptionError, escape, show_value
from llamarium.leftovers import take

DEFAULT_BYTES = 4 * 2**30
"""How large a folder may become, where nothing else is said."""

MARK = "llamarium-prefix-cache"
"""The file that shows what the folder is, and that its only process has locked."""

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.kv")
_PAGE = 4096  # a file takes whole pages of the disk
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)

Parts = Sequence[memoryview]


class _Entry(NamedTuple):
    parent: bytes
    num_bytes: int


class DiskCache:
    """A folder of blocks, `most_bytes` large at most, for one process at a time.

    One thread may write, and another one read meanwhile. Close it after the engine that uses it.

    >>> cache = llamarium.DiskCache("cache", most_bytes=2**20)
    >>> with llama.engine(disk_cache=cache) as engine:
    ...     len(engine.submit("To be", temperature=0, max_tokens=3).result().completions[0].token_ids)
    3
    >>> cache.close()

    Raises:
        OptionError: If the folder holds something else, cannot be written, or is used by another process.

    Attributes:
        num_bytes: What the blocks take on the disk.
    """

    def __init__(self, folder: str | Path, most_bytes: int = DEFAULT_BYTES) -> None:
        if type(most_bytes) is not int or most_bytes < 1:
            raise OptionError(f"the disk cache's size is {show_value(most_bytes)}; expected bytes, at least 1")
        self._folder, self.most_bytes = Path(folder), most_bytes
        self._partial = self._folder / "block.part"
        self._lock, self._entries, self.num_bytes = threading.Lock(), OrderedDict[bytes, _Entry](), 0
        try:
            self._open()
            self._make_room(0)
            self._write_aside([memoryview(b"")])  # what cannot be written is refused now
            self._partial.unlink()
        except OSError as error:
            raise OptionError(
                f"{escape(folder)}: cannot be used for a prefix cache: {escape(error.strerror or error)}; choose a "
                "folder that can be written"
            ) from None

    def _open(self) -> None:
        """Lock the folder, a new one where there is none, and take in the blocks that are there."""
        self._mark = _locked(self._folder)
        self._let_go = weakref.finalize(self, os.close, self._mark)
        with self._lock:
            self._entries.clear()
            self._find()

    def close(self) -> None:
        """Give the folder back; what is in it stays."""
        self._let_go()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def read(self, key: bytes, head: bytes, parts: Parts) -> bool:
        """Read a block's content into memory; return whether it is what was written after `head`.

        If it is not, the memory holds anything, and the block is dropped.
        """
        entry = self._entries.get(key)
        if entry is None:
            return False
        found = bytearray(len(head) + 4)
        ends = memoryview(found)
        with suppress(OSError):
            is_whole = _read(self._path(key, entry), [ends[:-4], *parts, ends[-4:]])
            if is_whole and bytes(found) == head + _checksum([ends[:-4], *parts]):
                return True
        with suppress(OSError):
            self._path(key, entry).unlink()
        self._forget(key)
        return False

    def write(self, key: bytes, parent: bytes, head: bytes, parts: Parts, is_current: Callable[[], bool]) -> bool:
        """Write a block, if `is_current` says so before and after its content is read; return whether it is there.

        A folder that was removed or moved is made again. OSError or OptionError if that or the block cannot be written;
        what was there stays.
        """
        mark = self._folder / MARK
        if not (mark.exists() and os.path.samestat(os.fstat(self._mark), mark.stat())):  # removed, or exchanged
            let_go = self._let_go
            self._open()
            let_go()
        if key in self._entries:  # it was written while it was asked for once more
            return True
        content = [memoryview(head), *parts]
        content.append(memoryview(_checksum(content)))
        entry = _Entry(parent, _on_disk(_size(content)))
        if entry.num_bytes > self.most_bytes or not is_current():
            return False
        self._make_room(entry.num_bytes)
        try:
            self._write_aside(content)
            if not is_current():
                return False
            self._partial.rename(self._path(key, entry))
        finally:
            self._partial.unlink(missing_ok=True)
        with self._lock:
            self._entries[key] = entry
            self.num_bytes += entry.num_bytes
            self._move_up(key)
        return True

    def touch(self, key: bytes) -> None:
        """Note that a block, and all before it, were used; also for the next process."""
        with self._lock, suppress(OSError, KeyError):
            self._move_up(key)
            os.utime(self._path(key, self._entries[key]))

    def _path(self, key: bytes, entry: _Entry) -> Path:
        return self._folder / f"{key.hex()}-{entry.parent.hex()}.kv"

    def _find(self) -> None:
        """Take in the blocks that are there, by the time of their last use; a block also by that of its children."""
        found: list[tuple[int, bytes, _Entry]] = []
        for path in self._folder.iterdir():
            name, status = _NAME.fullmatch(path.name), path.lstat()
            if name is not None and stat.S_ISREG(status.st_mode):
                key, parent = map(bytes.fromhex, name.groups())
                found.append((status.st_mtime_ns, key, _Entry(parent, _on_disk(status.st_size))))
        left, newest_first = {key: entry for _, key, entry in sorted(found)}, list[tuple[bytes, _Entry]]()
        while left:  # each block once, whatever the files' names say
            path_to_root = [left.popitem()]
            while (entry := left.pop(parent := path_to_root[-1][1].parent, None)) is not None:
                path_to_root.append((parent, entry))
            if parent in dict(path_to_root):  # no block comes before itself: it is none
                self._path(*path_to_root.pop()).unlink()
            newest_first += reversed(path_to_root)
        self._entries.update(reversed(newest_first))
        self.num_bytes = sum(entry.num_bytes for entry in self._entries.values())

    def _move_up(self, key: bytes) -> None:
        """Make a block the most recently used one, its parent even more so, and so on."""
        while (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            key = entry.parent

    def _make_room(self, num_bytes: int) -> None:
        """Remove blocks until so many bytes more are within the bound; OSError if one cannot be removed."""
        while True:
            with self._lock:
                if self.num_bytes + num_bytes <= self.most_bytes:
                    return
                key, entry = next(iter(self._entries.items()))
            self._path(key, entry).unlink(missing_ok=True)
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            if (entry := self._entries.pop(key, None)) is not None:
                self.num_bytes -= entry.num_bytes

    def _write_aside(self, content: Parts) -> None:
        """Write a file that is no block yet; OSError if not all of it is there, as on a full disk."""
        self._partial.unlink(missing_ok=True)
        descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
        try:
            if os.writev(descriptor, content) != _size(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _locked(folder: Path) -> int:
    """Return the locked file that marks a folder as one of a prefix cache; a new or empty one becomes one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = folder / MARK
    if not mark.exists() and (other := next(folder.iterdir(), None)) is not None:
        raise OptionError(
            f"{escape(folder)}: holds {escape(other.name)} and is no prefix cache; choose an empty folder, or a new one"
        )
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
    if take(descriptor):
        return descriptor
    os.close(descriptor)
    raise OptionError(f"{escape(folder)}: is used by another process; choose another folder, or stop that one first")


def _read(path: Path, content: Parts) -> bool:
    """Read a file; return whether it is a regular one, with as many bytes as the parts have."""
    descriptor = os.open(path, os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0))  # a pipe would be waited for
    try:
        status, size = os.fstat(descriptor), _size(content)
        return stat.S_ISREG(status.st_mode) and status.st_size == size == os.preadv(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _checksum(content: Parts) -> bytes:
    value = 0
    for part in content:
        value = zlib.crc32(part, value)
    return value.to_bytes(4, "little")


def _size(content: Parts) -> int:
    return sum(part.nbytes for part in content)


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
