"""Write a Llama yourself: a folder with one file a step, each with the text of
the step and an empty function. Fill them in the order of a pass; a check runs
your function inside a real model, in place of the right one, and says where
it parts first. Use NumPy or PyTorch, as you like.

  llamarium build                 write my_llama/, or show how far it is
  llamarium build check           check the next step that is open
  llamarium build check rotate    check a step, by its name or number
  llamarium build check mine      check what `llamarium build mine` wrote
  llamarium build check --all     all steps, and the whole model
  llamarium build hint            a hint for that step; again for the next one
  llamarium build pack            make a course of some steps, for others

When all steps stand, the folder is a model: llamarium chat -m my_llama
"""

import argparse
import shlex
from pathlib import Path

from llamarium.cli.output import note, show, table
from llamarium.errors import counted, escape
from llamarium.hub.folders import COURSE

FOLDER = "my_llama"


def default_folder() -> str:
    """Return the folder that is meant where none is named: this one, if it is a learner's."""
    return "." if Path(COURSE).is_file() and any(Path().glob("step[0-9]*_*.py")) else FOLDER


def option(folder: str) -> str:
    """Return what a command needs to mean this folder."""
    return "" if folder == default_folder() else f" --folder {shlex.quote(folder)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", nargs="?", default=default_folder(), help=f"to write to (default: {FOLDER})")
    parser.add_argument("--course", metavar="FILE", help="of `build pack`; else all steps")


def run(args: argparse.Namespace) -> int:
    """Write the folder and show how far it is."""
    from llamarium.course.folder.source import start
    from llamarium.course.outline import Course

    folder = Path(args.folder)
    written = start(folder, None if args.course is None else Course.read(Path(args.course)))
    if written:
        files = counted(len(written), "file")
        note(f"wrote {files} to {escape(folder)}; begin with {written[0].name}")
    show_progress(folder)
    note(f"\n{_next(folder, option(args.folder))}")
    return 0


def _next(folder: Path, option: str) -> str:
    """Say what to do next: the first function that is open, or the model that they are."""
    from llamarium.course.folder.progress import progress
    from llamarium.course.outline import course_of, file_of, step_named
    from llamarium.course.steps import STEPS

    steps, reached = course_of(folder).steps, progress(folder)
    still_open = next((name for name in steps if not reached[name].is_right), None)
    if still_open is not None:
        return f"Next: {still_open} in {file_of(step_named(still_open))}, then `llamarium build check{option}`"
    if len(steps) < len(STEPS):
        return "All steps of this course are right."
    return f"All are right: `llamarium build check --all{option}`, `llamarium chat -m {shlex.quote(str(folder))}`"


def show_progress(folder: Path) -> None:
    """Print a table of the steps and what was reached."""
    from llamarium.course.folder.progress import progress
    from llamarium.course.outline import course_of, number_of, step_named

    reached = progress(folder)
    result = table("", "step", "about", "state", "tries", "hints", right=("", "tries", "hints"))
    for step in map(step_named, course_of(folder).steps):
        entry = reached[step.name]
        state = "right" if entry.is_right else "open"
        counts = (str(count or "") for count in (entry.tries, entry.hints))
        result.add_row(str(number_of(step)), step.name, step.title, state, *counts)
    show(result)
