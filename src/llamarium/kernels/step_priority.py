"""Alternate an engine's steps with longer work on the same cores; steps have priority. Torch-free.

Two computations that share the cores wait for each other's threads at every matrix product, so running them at once
takes many times as long as one after the other. So longer work (a pass for the page, compiling a grammar) is split into
pieces by calls of `pause`, and no piece starts while a step runs. While requests run, pieces get a fixed share of the
time, so that they finish eventually.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

SHARE = 0.5
"""Seconds that steps may wait for pieces, per second of steps."""

MOST_PIECE_S = 0.05
"""Maximum time that a step waits for a piece; then both run at once, for example if a piece cannot be split."""

_PIECE_TOKENS = 64  # short enough for a step to wait, long enough for efficiency: 512 tokens take a fifth longer so
_BEGINNING_S = 0.005  # time for a piece's thread to wake up

_this_thread = threading.local()


class StepPriority:
    """Coordinates one engine and any number of threads with longer work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._changed = clock, threading.Condition()
        self._is_busy = self._is_stepping = False
        self._pieces = dict[int, float]()  # start time of each running piece, by thread
        self._num_waiting = 0  # threads that wait to start a piece
        self._left_s = 0.0  # time budget that steps may still spend waiting for pieces
        self._busy_since = 0.0

    @contextmanager
    def step(self) -> Generator[None]:
        """Run a step of the engine within the block, after waiting for running pieces."""
        with self._changed:
            if not self._is_busy:
                self._is_busy, self._busy_since = True, self._clock()
            if self._pieces or self._num_waiting:
                self._wait_for_pieces()
            self._is_stepping, began = True, self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._is_stepping = False
                self._left_s = min(MOST_PIECE_S, self._left_s + SHARE * (self._clock() - began))
                self._changed.notify_all()

    def release(self) -> None:
        """Release the cores while the engine is idle."""
        if self._is_busy:
            with self._changed:
                self._is_busy, self._left_s = False, 0.0
                self._changed.notify_all()

    @contextmanager
    def working(self, check: Callable[[], None] | None = None) -> Generator[None]:
        """Do longer work within the block, in pieces; `pause` in this thread ends one and waits to start the next.

        It calls `check` before the next one; an exception from it ends the work.
        """
        self._begin()
        _this_thread.step_priority, _this_thread.check = self, check
        try:
            yield
        finally:
            _this_thread.step_priority = _this_thread.check = None
            self._end()

    def yield_cores(self) -> None:
        """End this thread's piece and start the next one when steps allow it."""
        self._end()
        self._begin()

    def _begin(self) -> None:
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not self._is_stepping and (not self._is_busy or self._left_s > 0))
            self._num_waiting -= 1
            self._pieces[threading.get_ident()] = self._clock()
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            began = self._pieces.pop(threading.get_ident())
            if self._is_busy:
                took_s = self._clock() - max(began, self._busy_since)
                self._left_s = max(self._left_s - took_s, -MOST_PIECE_S)  # steps did not wait for longer than that
            self._changed.notify_all()

    def _wait_for_pieces(self) -> None:
        """Wait for running pieces, and for a waiting one if the budget allows it to start."""
        while True:
            now = self._clock()
            running_s = max((began + MOST_PIECE_S - now for began in self._pieces.values()), default=0.0)
            if running_s > 0:
                self._changed.wait(running_s)
            elif self._num_waiting and self._left_s > 0:
                begins_s = min(self._left_s, _BEGINNING_S)
                if not self._changed.wait(begins_s):
                    self._left_s -= begins_s
            else:
                return


def pause() -> None:
    """Let waiting engine steps run, if this thread does longer work (`StepPriority.working`); else do nothing.

    It raises what the `check` of that work raises.
    """
    step_priority: StepPriority | None = getattr(_this_thread, "step_priority", None)
    if step_priority is not None:
        step_priority.yield_cores()
        check: Callable[[], None] | None = _this_thread.check
        if check is not None:
            check()


def piece_tokens(max_tokens: int) -> int:
    """Return how many tokens of a pass to run between two pauses: `max_tokens`, or fewer in a thread of longer work."""
    return max_tokens if getattr(_this_thread, "step_priority", None) is None else min(max_tokens, _PIECE_TOKENS)
