"""Work in a thread beside its caller's."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Self, TypeVar

from llamarium.errors import collect_warnings, warn_caller

T = TypeVar("T")


class Beside(Generic[T]):
    """Work that has begun in a thread of its own; leaving the context waits for it.

    What it would warn of is warned of by `result`, in the caller's thread.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        """Begin the work."""
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(collect_warnings, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def check(self) -> None:
        """Raise the work's error, if it has failed already."""
        if self._future.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the work, or raise its error."""
        self._future.result()

    def result(self) -> T:
        """Wait for the work and return its result, or raise its error."""
        result, messages = self._future.result()
        for message in messages:
            warn_caller(message)
        return result
