"""Run training in a folder: hold the lock, write the settings and the journal.

    run/.lock            held by this process
    run/train.toml       the settings, written once settings and data are accepted; they reproduce the run
    run/metrics.jsonl    the events, from the same moment on

A run whose settings or data are refused leaves the folder unchanged.
"""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from llamarium.errors import TrainingError
from llamarium.io import atomic_file, unwritable
from llamarium.train.config import RunConfig
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.journal import Emit, Event, Journal, is_passing
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
    """Prepare a run and train; arguments and errors as for `run`. Only rank zero writes files.

    `prepare` is called after the folder is locked and checked, and `watch` is entered after it.
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
    """Return whether an event is the first of a run, which reports that settings and data are accepted."""
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
    """Yield the process group of `torchrun`, or a single process.

    TrainingError if the number of processes does not fit the settings, or if a process is lost.
    """
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
