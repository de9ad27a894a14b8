"""A run in its folder: alone there, with its settings and its journal written down.

    run/.lock            held by this process
    run/train.toml       the settings, once the run is accepted; they start the same run again
    run/metrics.jsonl    what happens, once the run is accepted

A run that is refused leaves all of it as it was.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from llamarium.io import atomic_file, unwritable
from llamarium.train.config import RunConfig
from llamarium.train.distributed.process_group import ProcessGroup
from llamarium.train.report.journal import Journal
from llamarium.train.run import Ending, check_start, run
from llamarium.train.setup import Emit, Event, Setup, is_passing
from llamarium.train.state.checkpoint import remove_leftovers
from llamarium.train.state.lock import RunLock


def conduct(
    prepare: Callable[[], Setup],
    out: Path,
    *,
    resume: bool,
    allow_changes: bool = False,
    watch: AbstractContextManager[Emit],
) -> Ending:
    """Prepare and train.

    Args:
        prepare: Makes what the run works with, when it is known that the folder is free.
        out: The run's folder; made if missing.
        resume: As for `run`.
        allow_changes: As for `run`.
        watch: Shows what happens; it is entered when everything is prepared.

    Raises:
        LlamariumError: Whatever `prepare` and `run` raise.
        OutputError: If the folder cannot be written.
    """
    with RunLock(out):
        check_start(out, resume)
        setup, journal = prepare(), Journal(out)
        with watch as show:

            def emit(event: Event) -> None:
                if is_acceptance(event):
                    remove_leftovers(out, event["step"])
                    save_settings(setup.config, out / "train.toml")
                if not is_passing(event):
                    journal(event)
                show(event)

            return run(setup, out, resume=resume, allow_changes=allow_changes, emit=emit)


def take_part(
    process_group: ProcessGroup,
    prepare: Callable[[ProcessGroup], Setup],
    out: Path,
    *,
    resume: bool,
    allow_changes: bool = False,
    watch: AbstractContextManager[Emit],
) -> Ending:
    """Train as one of several processes: rank zero conducts the run, the others go in step with it and write nothing.

    Args:
        process_group: The processes.
        prepare: Makes what this one works with.
        out: As for `conduct`, as are the others.
        resume: As for `run`.
        allow_changes: As for `run`.
        watch: Of rank zero.

    Raises:
        LlamariumError: As `conduct`.
    """

    def make() -> Setup:
        return process_group.rank_zero_first(lambda: prepare(process_group))

    if process_group.is_rank_zero:
        return conduct(make, out, resume=resume, allow_changes=allow_changes, watch=watch)
    return run(make(), out, resume=resume, allow_changes=allow_changes, emit=lambda event: None)


def is_acceptance(event: Event) -> bool:
    """Tell whether an event says that a run's settings and data have been accepted; it is the first of them."""
    return event["event"] in ("start", "resume")


def save_settings(config: RunConfig, path: Path) -> None:
    """Write the settings as TOML.

    Raises:
        OutputError: If the file cannot be written.
    """
    try:
        with atomic_file(path) as file:
            file.write(config.to_toml().encode())
    except OSError as error:
        raise unwritable(path, error) from None
