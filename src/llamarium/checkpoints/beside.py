"""A function that runs in a background thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Self, TypeVar

from llamarium.errors import collect_warnings, warn_caller

T = TypeVar("T")


class Beside(Generic[T]):
    """A function running in a background thread; leaving the context waits for it.

    Its warnings are issued by `result`, in the caller's thread.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        """Start the thread."""
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(collect_warnings, work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def check(self) -> None:
        """Raise the function's error if it has already failed."""
        if self._future.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the function to finish; raise its error if it fails."""
        self._future.result()

    def result(self) -> T:
        """Wait for the function and return its result; raise its error if it fails."""
        result, messages = self._future.result()
        for message in messages:
            warn_caller(message)
        return result
