"""Sends requests in a closed loop of clients, or in an open loop at arrival times.

In a closed loop, each client waits for its answer before it sends the next request, so a slow server gets less load. In
an open loop, requests arrive independently, and latency counts from when a request was due, which reveals overload.
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
    """The exchanges and the duration of a run.

    Attributes:
        exchanges: Finished exchanges, in order of completion.
        start: Start of the run (`time.perf_counter`), in seconds.
        end: End of the run.
        cpu_s: CPU time of this process during the run, in seconds.
        num_started: Number of requests sent.
        was_interrupted: Whether the run was cancelled, together with its running requests.
    """

    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    start: float = 0.0
    end: float = 0.0
    cpu_s: float = 0.0
    num_started: int = 0
    was_interrupted: bool = False

    @property
    def duration_s(self) -> float:
        """Duration of the run, in seconds."""
        return self.end - self.start


Progress = Callable[[LoadRun], None]


def poisson(requests: Iterable[LoadRequest], rate: float, *, seed: int = 0) -> Iterator[tuple[float, LoadRequest]]:
    """Yield (arrival time, request) of a Poisson process.

    Args:
        requests: The requests.
        rate: Mean number of requests per second.
        seed: Seed of the arrival times.

    Yields:
        Seconds from the start of the run, 0 for the first request, and the request.
    """
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
    """Send requests from a fixed number of clients, each with one request at a time.

    A cancelled loop returns the run so far.

    Args:
        client: The client of the server.
        requests: The requests, shared by all clients.
        num_clients: Number of concurrent clients.
        think_s: Pause of a client between an answer and its next request, in seconds.
        duration_s: Time after which no more requests are sent, in seconds.
        progress: Called after each answer.
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
    """Send each request at its arrival time, whether or not earlier ones are complete.

    A cancelled loop returns the run so far.

    Args:
        client: The client of the server.
        timetable: (Seconds from the start, request), in order of time.
        duration_s: Time after which no more requests are sent, in seconds.
        progress: Called after each answer.
    """
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
    """Measure the duration and CPU time of the body; suppress and record a cancellation."""
    run.start, cpu_start = time.perf_counter(), time.process_time()
    try:
        yield
    except asyncio.CancelledError:
        run.was_interrupted = True
    finally:
        run.end, run.cpu_s = time.perf_counter(), time.process_time() - cpu_start
