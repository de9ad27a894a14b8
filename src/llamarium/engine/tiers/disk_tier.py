"""The disk tier of the prefix cache. Torch-free.

A background thread writes whole blocks soon after they are computed, directly from the KV cache: nothing is copied, and
no step waits. If a block is reused while it is written, the file is dropped. The engine's thread reads blocks into
those that a sequence would have to compute otherwise.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.errors import OptionError
from llamarium.runtime.runner import Cache, Runner

_FORMAT = "llamarium block 1"
_MOST_JOBS = 4096
_CLOSING_S = 5.0


@runtime_checkable
class _Reproducible(Protocol):
    """A runner whose keys and values have the same bits in every process with the same fingerprints."""

    def fingerprint(self) -> str: ...
    def adapter_fingerprint(self, adapter: int) -> str: ...


@runtime_checkable
class _Readable(Protocol):
    """A KV cache whose blocks are in this process's memory."""

    def parts(self, block: int) -> list[memoryview]: ...


class DiskUse(NamedTuple):
    """Disk space in use and allowed, blocks written and dropped, and why the last write failed, or ""."""

    num_bytes: int
    most_bytes: int
    num_written: int
    num_dropped: int
    failure: str = ""


class DiskTier:
    """Saves and loads blocks of an engine's KV cache.

    Raises:
        OptionError: If the runner's keys and values are not reproducible to the bit.
    """

    def __init__(self, disk: DiskCache, runner: Runner, cache: Cache, kv_dtype: str) -> None:
        if not isinstance(runner, _Reproducible) or not isinstance(cache, _Readable):
            raise OptionError(
                "a prefix cache on disk needs keys and values that are reproducible to the bit, as with the C kernels, "
                f"but this model runs on {runner.name}; leave out --cache-dir"
            )
        self._disk, self._cache = disk, cache
        self._base = f"{_FORMAT} {runner.fingerprint()} {kv_dtype} {cache.block_size}"
        self._num_written, self._num_dropped, self._failure = 0, 0, ""
        self._jobs = SimpleQueue[Callable[[], object] | None]()
        self._thread = threading.Thread(target=self._work, name="llamarium-disk", daemon=True)
        self._thread.start()

    def identity(self, runner: Runner, adapter: int) -> str:
        """Return everything that keys and values depend on besides tokens; `adapter` is an index, -1 for none."""
        assert isinstance(runner, _Reproducible)
        return f"{self._base} {runner.adapter_fingerprint(adapter)}"

    def __contains__(self, key: object) -> bool:
        return key in self._disk

    def save(self, block: int, key: bytes, parent: bytes, ids: Sequence[int], is_current: Callable[[], bool]) -> None:
        """Queue a block for writing; it is written if `is_current()`, called in any thread, still holds then."""
        if key not in self._disk:
            self._put(lambda: self._write(block, key, parent, ids, is_current))

    def load(self, block: int, key: bytes, parent: bytes, ids: Sequence[int]) -> bool:
        """Read a block into the KV cache; return False on a miss, which leaves the block's content undefined."""
        return self._disk.read(key, _head(parent, ids), self._cache.parts(block))

    def touch(self, key: bytes) -> None:
        """Queue marking a block and its ancestors as recently used."""
        self._put(lambda: self._disk.touch(key))

    def use(self) -> DiskUse:
        """Return the current usage."""
        disk = self._disk
        return DiskUse(disk.num_bytes, disk.most_bytes, self._num_written, self._num_dropped, self._failure)

    def close(self) -> None:
        """Write the queued blocks, for at most a few seconds."""
        self._jobs.put(None)
        self._thread.join(_CLOSING_S)

    def _put(self, job: Callable[[], object]) -> None:
        if self._jobs.qsize() < _MOST_JOBS:
            self._jobs.put(job)
        else:
            self._num_dropped += 1

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, block: int, *arguments: Any) -> None:
        key, parent, ids, is_current = arguments
        try:
            is_written = self._disk.write(key, parent, _head(parent, ids), self._cache.parts(block), is_current)
            self._failure = "" if is_written else self._failure
        except (OSError, OptionError) as error:  # such as a full disk
            is_written, self._failure = False, getattr(error, "strerror", "") or "another process uses the directory"
        self._num_written += is_written
        self._num_dropped += not is_written


def _head(parent: bytes, ids: Sequence[int]) -> bytes:
    """Return a block's header: everything that its key is a hash of."""
    return _FORMAT.encode() + parent + np.array(ids, np.int64).tobytes()
