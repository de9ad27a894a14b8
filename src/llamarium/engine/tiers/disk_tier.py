"""The prefix cache's blocks on disk: written behind a step, read before one. Never torch.

Whole blocks are written soon after they are computed, by a thread, from the cache itself: nothing is copied, and no
step waits. If a block is taken for something else meanwhile, what was written of it is dropped. The engine's thread
reads blocks into those of a sequence that would compute them otherwise.
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
    """A runner whose keys and values have the same bits in every pass of every process with the same fingerprints."""

    def fingerprint(self) -> str: ...
    def adapter_fingerprint(self, adapter: int) -> str: ...


@runtime_checkable
class _Readable(Protocol):
    """A cache whose blocks lie in this process' memory."""

    def parts(self, block: int) -> list[memoryview]: ...


class DiskUse(NamedTuple):
    """How much of its bound a folder takes, and how many blocks were written, and were not; `failure` is why, or ""."""

    num_bytes: int
    most_bytes: int
    num_written: int
    num_dropped: int
    failure: str = ""


class DiskTier:
    """Saves and loads blocks of an engine's cache.

    OptionError if the runner's keys and values have not the same bits in every pass.
    """

    def __init__(self, disk: DiskCache, runner: Runner, cache: Cache, kv_dtype: str) -> None:
        if not isinstance(runner, _Reproducible) or not isinstance(cache, _Readable):
            raise OptionError(
                "a prefix cache on disk needs keys and values that have the same bits in every pass, as those of the C "
                f"kernels have, and {runner.name} computes here; leave it out (--cache-dir)"
            )
        self._disk, self._cache = disk, cache
        self._base = f"{_FORMAT} {runner.fingerprint()} {kv_dtype} {cache.block_size}"
        self._num_written, self._num_dropped, self._failure = 0, 0, ""
        self._jobs = SimpleQueue[Callable[[], object] | None]()
        self._thread = threading.Thread(target=self._work, name="llamarium-disk", daemon=True)
        self._thread.start()

    def identity(self, runner: Runner, adapter: int) -> str:
        """Return what keys and values depend on, tokens apart; `adapter` is one of the runner's, -1 for none."""
        assert isinstance(runner, _Reproducible)
        return f"{self._base} {runner.adapter_fingerprint(adapter)}"

    def __contains__(self, key: object) -> bool:
        return key in self._disk

    def save(self, block: int, key: bytes, parent: bytes, ids: Sequence[int], is_current: Callable[[], bool]) -> None:
        """Write a block soon, if it is still what it is; `is_current` says so, in any thread."""
        if key not in self._disk:
            self._put(lambda: self._write(block, key, parent, ids, is_current))

    def load(self, block: int, key: bytes, parent: bytes, ids: Sequence[int]) -> bool:
        """Read a block, and return whether it is there; if not, the cache's block holds anything."""
        return self._disk.read(key, _head(parent, ids), self._cache.parts(block))

    def touch(self, key: bytes) -> None:
        """Note soon that a block, and all before it, were used."""
        self._put(lambda: self._disk.touch(key))

    def use(self) -> DiskUse:
        """Return how much of it is used."""
        disk = self._disk
        return DiskUse(disk.num_bytes, disk.most_bytes, self._num_written, self._num_dropped, self._failure)

    def close(self) -> None:
        """Write what is left, for some seconds at most."""
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

    def _write(self, block: int, *what: Any) -> None:
        key, parent, ids, is_current = what
        try:
            is_written = self._disk.write(key, parent, _head(parent, ids), self._cache.parts(block), is_current)
            self._failure = "" if is_written else self._failure
        except (OSError, OptionError) as error:  # a full disk, say
            is_written, self._failure = False, getattr(error, "strerror", "") or "something else uses the folder"
        self._num_written += is_written
        self._num_dropped += not is_written


def _head(parent: bytes, ids: Sequence[int]) -> bytes:
    """Return what stands before a block's content: all that its key is a hash of."""
    return _FORMAT.encode() + parent + np.array(ids, np.int64).tobytes()
