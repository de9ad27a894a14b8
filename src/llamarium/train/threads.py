"""Choose a run's number of CPU threads: the smallest that is close to the fastest, measured at the start.

Threads synchronize many hundred times per step. On idle cores that costs little, but if another program uses one of the
cores, all threads wait for that one. Before the first step a forward and backward pass is therefore timed with all
threads, half of them, and so on down to one. With `torch.compile` each measurement would take minutes to compile, so
all threads are used.

PyTorch does not guarantee bit-identical sums for different numbers of threads. The number is therefore stored in the
checkpoint, and a resumed run uses it even if another would be faster now.
"""

import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from llamarium.errors import warn_caller
from llamarium.kernels.threads import allowed_cpus, computing_with, default_threads, num_threads
from llamarium.train.setup import Setup
from llamarium.train.step import computing_in

Clock = Callable[[], float]

_ROUNDS = 3  # timings per number of threads, interleaved; the median is used
_PASS_S = 1.0  # target duration of a timed pass, which sets its number of rows
_LONGEST_S = 10.0  # no further round starts after this time
_NEARLY = 1.05  # fewer threads are preferred if they are at most this factor slower


@dataclass(frozen=True, slots=True)
class Threads:
    """A run's number of threads.

    Attributes:
        count: Number of threads.
        why: Reason for this number; "all" if there was no choice, "compiled" with `torch.compile`.
        seconds: Seconds per pass by number of threads; empty if nothing was timed.
        rows: Rows of the timed pass.
    """

    count: int
    why: Literal["fastest", "given", "as before", "as the first", "all", "compiled"]
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    rows: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values for the run's first event."""
        seconds = {str(count): round(value, 4) for count, value in self.seconds.items()}
        return {"threads": self.count, "threads_why": self.why, "threads_seconds": seconds, "threads_rows": self.rows}


@contextmanager
def computing(setup: Setup, saved: int | None, *, resumed: bool) -> Generator[Threads | None]:
    """Set the number of threads within the body; on a GPU or with several processes, yield None and change nothing.

    `saved` is the number in the resumed checkpoint, or None.
    """
    if not _ours(setup):
        yield None
        return
    threads = choose(setup, saved, resumed=resumed)
    with computing_with(None if threads.count == torch.get_num_threads() else threads.count):
        yield threads


def _ours(setup: Setup) -> bool:
    return setup.model.device.type == "cpu" and setup.process_group.world_size == 1


def choose(setup: Setup, saved: int | None, *, resumed: bool, clock: Clock = time.perf_counter) -> Threads:
    """Return the number of threads to use; arguments as for `computing`."""
    count = setup.config.threads or _wanted()
    before = (saved or torch.get_num_threads()) if resumed else None
    if count is None and setup.threads in (None, before) and before is not None and before <= allowed_cpus():
        return Threads(before, "as before")
    if count is not None:
        threads = Threads(count, "given")
    elif setup.threads is not None:
        threads = Threads(setup.threads, "as the first")
    else:
        threads = _measured(setup, halves(num_threads()), clock)
    if before not in (None, threads.count):
        warn_caller(
            f"threads: {before} -> {threads.count}: from here on sums may have other last bits than those of a run "
            f"that was not interrupted; --threads {before} goes on as before"
        )
    return threads


def _wanted() -> int | None:
    """Return the number of threads that the user set outside of Llamarium, or None for PyTorch's default."""
    now = torch.get_num_threads()
    return now if "OMP_NUM_THREADS" in os.environ or now != default_threads() else None


def halves(most: int) -> list[int]:
    """Return a number, half of it, and so on down to one."""
    return [most] if most == 1 else [most, *halves(most // 2)]


def _measured(setup: Setup, counts: Sequence[int], clock: Clock) -> Threads:
    if len(counts) == 1 or setup.config.compile:
        return Threads(counts[0], "all" if len(counts) == 1 else "compiled")
    begin = clock()
    _pass(setup, 1)
    most = min(setup.config.batch_rows, setup.train.num_rows(0))
    rows = max(1, min(most, int(_PASS_S / max(clock() - begin, 1e-9))))
    seconds = time_each(lambda: _pass(setup, rows), counts, clock)
    return Threads(fewest_of_the_fastest(seconds), "fastest", seconds, rows)


def time_each(work: Callable[[], None], counts: Sequence[int], clock: Clock) -> dict[int, float]:
    """Return the median seconds of some work by number of threads, with interleaved measurements."""
    before, begin = torch.get_num_threads(), clock()
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for _ in range(_ROUNDS):
            for count in counts:
                torch.set_num_threads(count)
                start = clock()
                work()
                seconds[count].append(clock() - start)
            if clock() - begin > _LONGEST_S:
                break
    finally:
        torch.set_num_threads(before)
    return {count: statistics.median(values) for count, values in seconds.items()}


def fewest_of_the_fastest(seconds: dict[int, float]) -> int:
    """Return the smallest number of threads whose time is within `_NEARLY` of the fastest."""
    return min(count for count, value in seconds.items() if value <= _NEARLY * min(seconds.values()))


def _pass(setup: Setup, rows: int) -> None:
    """Compute and discard the gradients of the first rows."""
    batch = setup.train.batch(0, range(rows)).to(setup.model.device)
    setup.model.train()
    with torch.random.fork_rng([]), computing_in(setup.model.device, setup.config.chosen_precision):
        loss, _ = setup.objective.loss_sum(setup.model, batch, setup.trunk)
    loss.backward()
    setup.model.zero_grad(set_to_none=True)
