"""Limits of a learner's code in CPU time, so that a busy machine does not make a function fail.

A function that computes for too long is interrupted by the CPU timer. A function that waits (for a lock, time or input)
is interrupted after a number of idle ticks. A process that is not scheduled, or is stopped, gets no ticks.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

if sys.platform != "win32":
    import resource

CALL_S = 15.0
"""Default CPU time limit of one call. Plain Python loops take about 3 s for the largest call of a check."""

INSIDE_S = 4.0
"""Default CPU time limit of all calls inside the model; the result reports how far the check got."""

_TICK_S = 1.0
_IDLE_S = 1e-3
"""A tick with less CPU time than this counts as idle; handling the tick itself takes 0.05 ms."""

_AGAIN_S = 0.1
"""Interval of further interrupts, for a function that catches all exceptions."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a learner's code.

    Attributes:
        call_s: Maximum CPU time of one call, or of importing the file.
        inside_s: Maximum CPU time of all calls inside the model; the result is then based on the calls so far.
        kills: Whether the system kills this process if a call continues after the interrupt, as C code does.
    """

    call_s: float = CALL_S
    inside_s: float = INSIDE_S
    kills: bool = False


LIMITS = Limits()


class OvertimeError(BaseException):
    """A learner's code exceeds its CPU time or waits; the message says which."""


@contextmanager
def limited(limits: Limits) -> Generator[None]:
    """Raise OvertimeError in the body if it computes or waits for longer than `limits.call_s`."""
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
    """Return a tick handler that raises after consecutive idle ticks for the time limit of a call."""
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
    """Call a signal handler after `first_s` seconds of a timer and then every `again_s` while the body runs."""
    before = signal.signal(number, handler)
    signal.setitimer(timer, max(first_s, 1e-3), again_s)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


@contextmanager
def _ended_by_the_system(limits: Limits) -> Generator[None]:
    """Let the system kill this process (SIGXCPU) if the body continues after it should have been interrupted."""
    if not limits.kills:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + limits.call_s) + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
