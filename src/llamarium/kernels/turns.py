"""Turns between an engine's steps and longer work on the same cores: the steps go first. Never torch.

Two computations that share the cores wait for each other's threads at every product, so each takes many times as long
as one after the other. Longer work (a pass for the page, a grammar that is compiled) is therefore done in pieces. It
calls `pause` between two of them; no piece begins while a step runs. While requests run, pieces have a share of the
time, so that they come to an end too.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

SHARE = 0.5
"""Seconds that steps wait for pieces, for each second of steps."""

MOST_PIECE_S = 0.05
"""A step waits for a piece for so long at most; then both run, as when a piece cannot be cut."""

_PIECE_TOKENS = 64  # small enough for a step to wait for, large enough for the kernels: 512 tokens take a fifth longer
_BEGINNING_S = 0.005  # for the thread of a piece to wake up

_this_thread = threading.local()


class Turns:
    """Whose turn it is; for one engine, and any number of threads with longer work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._changed = clock, threading.Condition()
        self._is_busy = self._is_stepping = False
        self._pieces = dict[int, float]()  # when each thread's piece began
        self._num_waiting = 0
        self._left_s = 0.0  # that steps may wait for pieces
        self._busy_since = 0.0

    @contextmanager
    def step(self) -> Generator[None]:
        """Run a step of the engine in the body, once no piece is running."""
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

    def rest(self) -> None:
        """Give the cores away: the engine has nothing to do."""
        if self._is_busy:
            with self._changed:
                self._is_busy, self._left_s = False, 0.0
                self._changed.notify_all()

    @contextmanager
    def working(self) -> Generator[None]:
        """Do longer work in the body, in pieces: `pause` in this thread ends one and waits for the next."""
        self._begin()
        _this_thread.turns = self
        try:
            yield
        finally:
            _this_thread.turns = None
            self._end()

    def give_way(self) -> None:
        """End this thread's piece, and begin the next one when it is its turn."""
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
                self._left_s = max(self._left_s - took_s, -MOST_PIECE_S)  # what it took longer was not waited for
            self._changed.notify_all()

    def _wait_for_pieces(self) -> None:
        """Wait for pieces that run, and for one whose turn it is."""
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
    """Let an engine's steps go first, between two pieces of a thread's longer work; nothing in other threads."""
    turns: Turns | None = getattr(_this_thread, "turns", None)
    if turns is not None:
        turns.give_way()


def piece_tokens(most: int) -> int:
    """Return how many tokens of a pass to run between two pauses: fewer than `most` in a thread of longer work."""
    return most if getattr(_this_thread, "turns", None) is None else min(most, _PIECE_TOKENS)
