"""Sends requests in a closed loop of clients, or in an open loop at arrival times.

In a closed loop each client waits for its answer before the next request, so the load falls when the server is slow. In
an open loop it does not: latency counts from when a request was due, so an overloaded server shows.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from llamarium.load_test.client import Client
from llamarium.load_test.exchange import Exchange
from llamarium.load_test.workload import LoadRequest


@dataclass(slots=True)
class LoadRun:
    """The exchanges of a run in the order of their ends, and what it took.

    Attributes:
        start: Seconds of `time.perf_counter`, as `end`.
        cpu_s: Processor time of this process in between.
        was_interrupted: Whether the run was cancelled, with the requests under way.
    """

    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    start: float = 0.0
    end: float = 0.0
    cpu_s: float = 0.0
    num_started: int = 0
    was_interrupted: bool = False

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last answer."""
        return self.end - self.start


Progress = Callable[[LoadRun], None]


def poisson(requests: Iterable[LoadRequest], rate: float, *, seed: int = 0) -> Iterator[tuple[float, LoadRequest]]:
    """Yield seconds from the start and requests: independent arrivals, `rate` a second on average, the first at 0."""
    source, due = random.Random(f"arrivals {seed}"), 0.0
    for request in requests:
        yield due, request
        due += source.expovariate(rate)


async def closed_loop(
    client: Client,
    requests: Iterable[LoadRequest],
    *,
    num_clients: int,
    think_s: float = 0.0,
    duration_s: float = math.inf,
    progress: Progress | None = None,
) -> LoadRun:
    """Send requests with `num_clients` clients, each of which takes the next one `think_s` after its answer.

    No request is sent after `duration_s`, and `progress` is called after each answer. A cancelled loop returns
    its run so far.
    """
    run, waiting = LoadRun(), iter(requests)

    async def send_all() -> None:
        pause_s = 0.0
        for request in waiting:
            await asyncio.sleep(pause_s)
            if time.perf_counter() - run.start >= duration_s:
                return
            await _send(client, run, request, progress)
            pause_s = think_s

    with _timed(run):
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(send_all())
    return run


async def open_loop(
    client: Client,
    timetable: Iterable[tuple[float, LoadRequest]],
    *,
    duration_s: float = math.inf,
    progress: Progress | None = None,
) -> LoadRun:
    """Send each request at its time in seconds from the start, independent of those before it; see `closed_loop`."""
    run = LoadRun()
    with _timed(run):
        async with asyncio.TaskGroup() as group:
            for offset_s, request in timetable:
                if offset_s >= duration_s:
                    break
                due = run.start + offset_s
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(_send(client, run, request, progress, due))
    return run


async def _send(
    client: Client, run: LoadRun, request: LoadRequest, progress: Progress | None, due: float | None = None
) -> None:
    run.num_started += 1
    run.exchanges.append(await client.send(request, due))
    if progress is not None:
        progress(run)


@contextmanager
def _timed(run: LoadRun) -> Generator[None]:
    """Time the body; a cancellation ends it early and is recorded."""
    run.start, cpu_start = time.perf_counter(), time.process_time()
    try:
        yield
    except asyncio.CancelledError:
        run.was_interrupted = True
    finally:
        run.end, run.cpu_s = time.perf_counter(), time.process_time() - cpu_start
