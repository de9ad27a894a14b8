"""Choose a run's number of CPU threads: the fewest that are nearly the fastest, as measured at its start.

Threads that share every product wait for each other, many hundred times a step. On free cores that costs little; if
another program uses one of the cores, all wait for that one. So before the first step a forward and backward pass is
timed with all threads, half of them, and so on to one. With `torch.compile` each number would take minutes to compile:
such a run takes all threads.

PyTorch does not promise that sums have the same bits on another number of threads. So a run keeps its number: a
checkpoint holds it, and a resumed run uses it, whatever would be faster now.
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

_ROUNDS = 3  # that each number is timed, in turn with the others; the median counts
_PASS_S = 1.0  # a pass is of as many rows as take about so long
_LONGEST_S = 10.0  # after which no further round is begun
_NEARLY = 1.05  # fewer threads are taken where they take at most this times as long


@dataclass(frozen=True, slots=True)
class Threads:
    """A run's number of threads, why it is that, and the seconds of a pass over `rows` rows by number, if it was timed.

    The reason is "all" if there was no choice, and "compiled" if the step is.
    """

    count: int
    why: Literal["fastest", "given", "as before", "as the first", "all", "compiled"]
    seconds: dict[int, float] = field(default_factory=dict[int, float])
    rows: int = 0

    def describe(self) -> dict[str, Any]:
        """Return it as JSON values for the run's first event."""
        seconds = {str(count): round(value, 4) for count, value in self.seconds.items()}
        return {"threads": self.count, "threads_why": self.why, "threads_seconds": seconds, "threads_rows": self.rows}


@contextmanager
def computing(setup: Setup, saved: int | None, *, resumed: bool) -> Generator[Threads | None]:
    """Set the run's number of threads in the body; on a GPU or with several processes, change nothing and yield None.

    `saved` is the number in the checkpoint that is resumed, if any.
    """
    if not _ours(setup):
        yield None
        return
    found = choose(setup, saved, resumed=resumed)
    with computing_with(None if found.count == torch.get_num_threads() else found.count):
        yield found


def _ours(setup: Setup) -> bool:
    return setup.model.device.type == "cpu" and setup.process_group.world_size == 1


def choose(setup: Setup, saved: int | None, *, resumed: bool, clock: Clock = time.perf_counter) -> Threads:
    """Return the number of threads to use; arguments as for `computing`."""
    given = setup.config.threads or _wanted()
    before = (saved or torch.get_num_threads()) if resumed else None
    if given is None and setup.threads in (None, before) and before is not None and before <= allowed_cpus():
        return Threads(before, "as before")
    if given is not None:
        found = Threads(given, "given")
    elif setup.threads is not None:
        found = Threads(setup.threads, "as the first")
    else:
        found = _measured(setup, halves(num_threads()), clock)
    if before not in (None, found.count):
        warn_caller(
            f"threads: {before} -> {found.count}: from here on sums may have other last bits than those of a run that "
            f"was not interrupted; --threads {before} goes on as before"
        )
    return found


def _wanted() -> int | None:
    """Return the number set from outside of Llamarium, or None for PyTorch's default."""
    now = torch.get_num_threads()
    return now if "OMP_NUM_THREADS" in os.environ or now != default_threads() else None


def halves(most: int) -> list[int]:
    """Return a number, half of it, and so on to one."""
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
    """Return the median seconds of some work by number of threads, measured in turn."""
    before, begin = torch.get_num_threads(), clock()
    found: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for _ in range(_ROUNDS):
            for count in counts:
                torch.set_num_threads(count)
                start = clock()
                work()
                found[count].append(clock() - start)
            if clock() - begin > _LONGEST_S:
                break
    finally:
        torch.set_num_threads(before)
    return {count: statistics.median(values) for count, values in found.items()}


def fewest_of_the_fastest(seconds: dict[int, float]) -> int:
    """Return the fewest threads that take hardly longer than the fastest number."""
    return min(count for count, value in seconds.items() if value <= _NEARLY * min(seconds.values()))


def _pass(setup: Setup, rows: int) -> None:
    """Compute gradients of the first rows, and discard them."""
    batch = setup.train.batch(0, range(rows)).to(setup.model.device)
    setup.model.train()
    with torch.random.fork_rng([]), computing_in(setup.model.device, setup.config.chosen_precision):
        loss, _ = setup.objective.loss_sum(setup.model, batch, setup.trunk)
    loss.backward()
    setup.model.zero_grad(set_to_none=True)
