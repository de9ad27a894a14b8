"""Stop on a signal: a run notes it, and ends after its step with a checkpoint."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def stop_signals() -> Generator[list[int]]:
    """Yield the list of SIGTERM and SIGINT that arrive, instead of dying; a second SIGINT interrupts at once."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # others may set no handlers
        yield came
        return

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in came:
            signal.default_int_handler(number, None)
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
