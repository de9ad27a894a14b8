"""A bounded directory of KV cache blocks with least-recently-used eviction. Torch-free.

A block is a file, `KEY-PARENT.kv`: a header, the content and a checksum. It is written to a temporary file and renamed.
A damaged file is a miss and is deleted. A block is useless without its parent (the previous block of the sequence), so
using a block also marks its ancestors as used.
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
from llamarium.system import open_file, read_parts, write_parts

DEFAULT_BYTES = 4 * 2**30
"""Default maximum size of the directory."""

MARK = "llamarium-prefix-cache"
"""Name of the file that identifies the directory; the process that uses it holds a lock on it."""

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})\.kv")
_PAGE = 4096  # files occupy whole pages on the disk

Parts = Sequence[memoryview]


class _Entry(NamedTuple):
    parent: bytes
    num_bytes: int


class DiskCache:
    """A directory of KV cache blocks of up to `most_bytes`, for one process at a time.

    One thread may write while another one reads. Close it after the engine that uses it.

    >>> cache = llamarium.DiskCache("cache", most_bytes=2**20)
    >>> with llama.engine(disk_cache=cache) as engine:
    ...     len(engine.submit("To be", temperature=0, max_tokens=3).result().completions[0].token_ids)
    3
    >>> cache.close()

    Raises:
        OptionError: If the directory contains something else, is not writable, or is used by another process.

    Attributes:
        num_bytes: Disk space of the blocks, in bytes.
    """

    def __init__(self, folder: str | Path, most_bytes: int = DEFAULT_BYTES) -> None:
        if type(most_bytes) is not int or most_bytes < 1:
            raise OptionError(f"the disk cache's size is {show_value(most_bytes)}; expected at least 1 byte")
        self._folder, self.most_bytes = Path(folder), most_bytes
        self._partial = self._folder / "block.part"
        self._files = threading.Lock()  # Windows removes no file that is being read
        self._lock, self._entries, self.num_bytes = threading.Lock(), OrderedDict[bytes, _Entry](), 0
        try:
            self._open()
            self._make_room(0)
            self._write_aside([memoryview(b"")])  # so that a read-only directory is an error now
            self._partial.unlink()
        except OSError as error:
            raise OptionError(
                f"{escape(folder)}: cannot be used for a prefix cache: {escape(error.strerror or error)}; choose a "
                "writable directory"
            ) from None

    def _open(self) -> None:
        """Lock the directory, creating it if necessary, and index its blocks."""
        self._mark = _locked(self._folder)
        self._let_go = weakref.finalize(self, os.close, self._mark)
        with self._lock:
            self._entries.clear()
            self._find()

    def close(self) -> None:
        """Release the directory; its contents stay."""
        self._let_go()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def read(self, key: bytes, head: bytes, parts: Parts) -> bool:
        """Read a block's content into `parts`; return whether it was written with the header `head` and is intact.

        If not, the content of `parts` is undefined, and the block is deleted.
        """
        entry = self._entries.get(key)
        if entry is None:
            return False
        head_and_checksum = bytearray(len(head) + 4)
        view = memoryview(head_and_checksum)
        with self._files, suppress(OSError):
            is_whole = _read(self._path(key, entry), [view[:-4], *parts, view[-4:]])
            if is_whole and bytes(head_and_checksum) == head + _checksum([view[:-4], *parts]):
                return True
        with suppress(OSError):
            self._path(key, entry).unlink()
        self._forget(key)
        return False

    def write(self, key: bytes, parent: bytes, head: bytes, parts: Parts, is_current: Callable[[], bool]) -> bool:
        """Write a block if `is_current()` holds before and after its content is read; return whether it is stored.

        A directory that was removed or moved meanwhile is created again.

        Raises:
            OSError or OptionError: If the directory or the block cannot be written; existing blocks stay.
        """
        mark = self._folder / MARK
        if not (mark.exists() and os.path.samestat(os.fstat(self._mark), mark.stat())):  # removed or replaced
            release_old = self._let_go
            self._open()
            release_old()
        if key in self._entries:  # an earlier job has written it since this one was queued
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
            self._partial.replace(self._path(key, entry))
        finally:
            self._partial.unlink(missing_ok=True)
        with self._lock:
            self._entries[key] = entry
            self.num_bytes += entry.num_bytes
            self._move_up(key)
        return True

    def touch(self, key: bytes) -> None:
        """Mark a block and its ancestors as recently used, also for later processes."""
        with self._lock, suppress(OSError, KeyError):
            self._move_up(key)
            os.utime(self._path(key, self._entries[key]))

    def _path(self, key: bytes, entry: _Entry) -> Path:
        return self._folder / f"{key.hex()}-{entry.parent.hex()}.kv"

    def _find(self) -> None:
        """Index the blocks in the directory by last use; a block counts as used when a descendant was."""
        blocks: list[tuple[int, bytes, _Entry]] = []
        for path in self._folder.iterdir():
            name, status = _NAME.fullmatch(path.name), path.lstat()
            if name is not None and stat.S_ISREG(status.st_mode):
                key, parent = map(bytes.fromhex, name.groups())
                blocks.append((status.st_mtime_ns, key, _Entry(parent, _on_disk(status.st_size))))
        remaining, newest_first = {key: entry for _, key, entry in sorted(blocks)}, list[tuple[bytes, _Entry]]()
        while remaining:  # removes at least one block per round, whatever parents the file names claim
            path_to_root = [remaining.popitem()]
            while (entry := remaining.pop(parent := path_to_root[-1][1].parent, None)) is not None:
                path_to_root.append((parent, entry))
            if parent in dict(path_to_root):  # a cycle, so this is no block of ours
                self._path(*path_to_root.pop()).unlink()
            newest_first += reversed(path_to_root)
        self._entries.update(reversed(newest_first))
        self.num_bytes = sum(entry.num_bytes for entry in self._entries.values())

    def _move_up(self, key: bytes) -> None:
        """Make a block the most recently used one, then its parent, and so on, so that ancestors are evicted last."""
        while (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            key = entry.parent

    def _make_room(self, num_bytes: int) -> None:
        """Evict blocks until `num_bytes` more fit; OSError if a file cannot be deleted."""
        while True:
            with self._lock:
                if self.num_bytes + num_bytes <= self.most_bytes:
                    return
                key, entry = next(iter(self._entries.items()))
            with self._files:
                self._path(key, entry).unlink(missing_ok=True)
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            if (entry := self._entries.pop(key, None)) is not None:
                self.num_bytes -= entry.num_bytes

    def _write_aside(self, content: Parts) -> None:
        """Write the temporary file; OSError if not all of it was written, as on a full disk."""
        self._partial.unlink(missing_ok=True)
        descriptor = open_file(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, follows_links=False)
        try:
            if write_parts(descriptor, content) != _size(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _locked(folder: Path) -> int:
    """Return the locked descriptor of the directory's mark; a new or empty directory gets one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = folder / MARK
    if not mark.exists() and (other := next(folder.iterdir(), None)) is not None:
        raise OptionError(
            f"{escape(folder)}: contains {escape(other.name)} and is not a prefix cache; "
            "choose an empty or new directory"
        )
    descriptor = open_file(mark, os.O_RDWR | os.O_CREAT, 0o600, follows_links=False)
    if take(descriptor):
        return descriptor
    os.close(descriptor)
    raise OptionError(f"{escape(folder)}: is used by another process; choose another directory, or stop that process")


def _read(path: Path, content: Parts) -> bool:
    """Read a file into `content`; return whether it is a regular file of exactly that size."""
    descriptor = open_file(path, os.O_RDONLY, follows_links=False, waits=False)
    try:
        status, size = os.fstat(descriptor), _size(content)
        return stat.S_ISREG(status.st_mode) and status.st_size == size == read_parts(descriptor, content)
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
