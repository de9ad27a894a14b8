"""Limits of what a learner's code computes, in processor time: a busy machine makes no function slower.

A function that computes for longer than its limit is interrupted by a signal of the processor's clock, and one that
waits for something, by ticks in which nothing was computed. A process that is not scheduled, or stopped, has no ticks.
"""

import math
import resource
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

CALL_S = 15.0
"""How long one call may compute: loops over single numbers need some 3 s for the largest call that a check makes."""

INSIDE_S = 4.0
"""How long all calls inside the model may compute together; what was not reached by then is said."""

_TICK_S = 1.0
_IDLE_S = 1e-3
"""A tick in which a process computes for less was spent waiting; handling the tick itself takes 0.05 ms."""

_AGAIN_S = 0.1
"""A function that catches everything is interrupted again after this time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a learner's code may compute.

    Attributes:
        call_s: Processor time of one call, or of the import of its file.
        inside_s: Processor time of all calls inside the model; afterwards what was compared counts.
        kills: Whether the system ends this process where a call goes on after it was interrupted, as C code does.
    """

    call_s: float = CALL_S
    inside_s: float = INSIDE_S
    kills: bool = False


LIMITS = Limits()


class OvertimeError(BaseException):
    """A learner's code computes for longer than it may, or waits; the words say which."""


@contextmanager
def limited(limits: Limits) -> Generator[None]:
    """Raise `OvertimeError` where the code inside computes for longer than a call may, or waits as long."""
    with (
        _interrupted(signal.SIGPROF, signal.ITIMER_PROF, limits.call_s, _AGAIN_S, _computes_too_long(limits)),
        _interrupted(signal.SIGALRM, signal.ITIMER_REAL, *_ticks(limits), _waits_too_long(limits)),
        _ended_by_the_system(limits),
    ):
        yield


def _computes_too_long(limits: Limits) -> Callable[..., None]:
    def stop(*_: object) -> None:
        raise OvertimeError(f"takes longer than {limits.call_s:g} s of CPU time")

    return stop


def _ticks(limits: Limits) -> tuple[float, float]:
    tick_s = min(_TICK_S, limits.call_s / 4)
    return tick_s, tick_s


def _waits_too_long(limits: Limits) -> Callable[..., None]:
    """Return a handler of ticks, which raises after as many idle ones as make up the limit of a call."""
    most_idle = math.ceil(limits.call_s / _ticks(limits)[0])
    num_idle, before = 0, time.process_time()

    def tick(*_: object) -> None:
        nonlocal num_idle, before
        now = time.process_time()
        num_idle = num_idle + 1 if now - before < _IDLE_S else 0
        before = now
        if num_idle >= most_idle:
            raise OvertimeError("waits for time, a lock or input; a step only computes")

    return tick


@contextmanager
def _interrupted(
    number: signal.Signals, timer: int, first_s: float, again_s: float, handler: Callable[..., None]
) -> Generator[None]:
    """Call a handler when a timer is over, and again, until the code inside has ended."""
    before = signal.signal(number, handler)
    signal.setitimer(timer, max(first_s, 1e-3), again_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@contextmanager
def _ended_by_the_system(limits: Limits) -> Generator[None]:
    """Let the system end this process (SIGXCPU) some time after the code inside should have been interrupted."""
    if not limits.kills:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + limits.call_s) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
