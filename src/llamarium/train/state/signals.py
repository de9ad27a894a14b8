"""Handle signals that stop a run between two steps, or while a reward is computed."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from llamarium.system import STOP_SIGNALS
from llamarium.train.rewards.functions import Rewards, StoppedError


@contextmanager
def stop_signals(
    rewards: Rewards | None = None, first: Callable[[int], object] = lambda _: None
) -> Generator[list[int]]:
    """Collect `STOP_SIGNALS` in the yielded list instead of terminating; a second SIGINT interrupts immediately.

    A signal during a reward function raises StoppedError there. `first` is called with the first signal.
    """
    received: list[int] = []
    if rewards is not None:
        rewards.listen_to(received)
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield received
        return

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in received:
            signal.signal(number, signal.SIG_DFL)  # a third one kills, even if this KeyboardInterrupt is caught
            signal.default_int_handler(number, None)
        received.append(number)
        if len(received) == 1:
            first(number)
        if rewards is not None and rewards.is_running:
            raise StoppedError

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
