"""Conduct a run in its folder: hold the lock, write the settings and the journal.

    run/.lock            held by this process
    run/train.toml       the settings, once the run is accepted; they start the same run again
    run/metrics.jsonl    the events, once the run is accepted

A refused run leaves the folder unchanged.
"""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from llamarium.errors import TrainingError
from llamarium.io import atomic_file, unwritable
from llamarium.train.config import RunConfig
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.report.journal import Emit, Event, Journal, is_passing
from llamarium.train.run import TrainingResult, check_start, run
from llamarium.train.setup import Setup
from llamarium.train.state.checkpoint import remove_leftovers
from llamarium.train.state.lock import run_lock


def conduct(
    prepare: Callable[[], Setup],
    out: Path,
    *,
    process_group: ProcessGroup = SINGLE_PROCESS,
    resume: bool,
    allow_changes: bool = False,
    watch: AbstractContextManager[Emit],
) -> TrainingResult:
    """Prepare and train; arguments and errors as for `run`. Only rank zero writes; other processes keep in step.

    `prepare` is called once the folder is known to be free, and `watch` is entered after it.
    """
    if not process_group.is_rank_zero:
        setup = process_group.rank_zero_first(prepare)
        return run(setup, out, resume=resume, allow_changes=allow_changes, emit=lambda event: None)
    with run_lock(out):
        check_start(out, resume)
        setup, journal = process_group.rank_zero_first(prepare), Journal(out)
        with watch as show:

            def emit(event: Event) -> None:
                if is_acceptance(event):
                    remove_leftovers(out, event["step"])
                    save_settings(setup.config, out / "train.toml")
                if not is_passing(event):
                    journal(event)
                show(event)

            return run(setup, out, resume=resume, allow_changes=allow_changes, emit=emit)


def is_acceptance(event: Event) -> bool:
    """Whether an event, the first of a run, reports that settings and data are accepted."""
    return event["event"] in ("start", "resume")


def save_settings(config: RunConfig, path: Path) -> None:
    """Write the settings as TOML; OutputError if that fails."""
    try:
        with atomic_file(path) as file:
            file.write(config.to_toml().encode())
    except OSError as error:
        raise unwritable(path, error) from None


@contextmanager
def init_process_group(config: RunConfig) -> Generator[ProcessGroup]:
    """Yield the processes of `torchrun`, or this one alone; TrainingError if they do not fit, or one is lost."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        from llamarium.train.distributed.parallel import init_distributed

        with init_distributed(config, world_size) as process_group:
            yield process_group
    elif config.tensor_parallel > 1:
        raise TrainingError(
            f"tensor_parallel is {config.tensor_parallel}, and there is one process; start several: "
            f"torchrun --nproc-per-node {config.tensor_parallel} -m llamarium pretrain ..., "
            "or give --tensor-parallel 1"
        )
    else:
        yield SINGLE_PROCESS
