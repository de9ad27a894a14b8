"""Loads a model in a thread, while the server imports its modules and answers `/health`.

Imports nothing heavy: the thread is started before the server's own modules are imported.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes read, total bytes)."""


class ModelLoader(Generic[T]):
    """Loads a model and its engine in a daemon thread, which starts at once.

    Args:
        load: Loads the model and reports its progress.

    Attributes:
        progress: (bytes read, total bytes).
        result: The result of `load`, once it has returned.
        failure: The error of `load`, if it has failed.
        seconds: How long `load` took.
    """

    def __init__(self, load: Callable[[Progress], T]) -> None:
        self.progress = (0, 0)
        self.result: T | None = None
        self.failure: Exception | None = None
        self.seconds = 0.0
        self._load = load
        self._thread = threading.Thread(target=self._run, name="llamarium-load", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until `load` has returned or failed."""
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            result = self._load(self._report)
            self.seconds = time.monotonic() - began
            self.result = result
        except Exception as error:  # noqa: BLE001 - the server reports any error and exits
            self.failure = error

    def _report(self, done: int, total: int) -> None:
        self.progress = (done, total)
