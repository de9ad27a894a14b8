"""Check steps of your own Llama. Your function runs inside a real model, in
place of the right one, in a process of its own; every result is compared in
float32, and the first place that parts is shown, with what is often done
wrong. The code of the folders that you name is run, and no other.

  llamarium build check                    the next step that is open
  llamarium build check rotate             a step, by its name or number
  llamarium build check --all              all steps, then the whole model
  llamarium build check --all --folder anna ben   a table of several folders

The exit code is 0 if all that was checked is right.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.cli.build import FOLDER, option
from llamarium.cli.options import UsageError, add_json, whole_number
from llamarium.cli.output import emit, note, printable, show, status
from llamarium.cli.tables import table

if TYPE_CHECKING:
    from llamarium.build.check import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("step", nargs="?", help="a step's name or number (default: the next that is open)")
    parser.add_argument("--all", action="store_true", help="check all steps, and the whole model when all are right")
    parser.add_argument("--folder", nargs="+", default=[FOLDER], help=f"whose code is run (default: {FOLDER})")
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="of sentences and shapes (default: 0)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check, print what was found, keep the progress."""
    from llamarium.build import check_folder

    if args.step is not None and args.all:
        raise UsageError("name a step or give --all, not both")
    folders = [Path(folder) for folder in args.folder]
    rows: list[tuple[Path, list[Result]]] = []
    for folder in folders:
        with status(f"Checking {folder} ..."):
            found = check_folder(folder, args.step, every=args.all, seed=args.seed)
            rows.append((folder, list(_shown(args, folder, found))))
    if len(folders) > 1 and not args.json:
        _show_table(rows)
    return 0 if all(result.passed for _, results in rows for result in results) else 1


def _shown(args: argparse.Namespace, folder: Path, found: "Iterator[Result | dict[str, Any]]") -> "Iterator[Result]":
    """Print each finding as it comes; yield those of steps."""
    from llamarium.build.check import Result

    for one in found:
        if args.json:
            emit({"folder": str(folder), **(asdict(one) if isinstance(one, Result) else {"whole": one})})
        elif len(args.folder) == 1:
            _say(one, str(folder))
        if isinstance(one, Result):
            yield one


def _say(found: "Result | dict[str, Any]", folder: str) -> None:
    """Print what was found in words."""
    from llamarium.build.folder import number_of, section_words, step_named

    if isinstance(found, dict):
        _say_whole(found)
        return
    if found.printed:
        note(f"printed: {found.printed.rstrip()}")
    name = f"step {number_of(step_named(found.step))}, {found.step}"
    if found.passed:
        print(printable(f"{name}: right ({found.checked}; {found.seconds:.1f} s)"))
        return
    print(printable(f"{name}: {found.words}"))
    if found.cause:
        print(printable(f"  {found.cause}"))
    print(f"  See {section_words(found.section)}; `llamarium build hint {found.step}{option(folder)}`")


def _say_whole(found: dict[str, Any]) -> None:
    if "error" in found:
        print(printable(f"the whole model: {found['error']}"))
        return
    from llamarium.build.whole import PROMPT

    print(printable(f"\nYour Llama continues {PROMPT!r} with {found['text']!r};"))
    print(printable(f"the library's with {found['library_text']!r}."))
    mine, library = found["tokens_per_second"], found["library_tokens_per_second"]
    print(f"{mine:.1f} tokens/s (the library's: {library:.0f}), {found['nats']:.1g} nats a token apart.")


def _show_table(rows: "list[tuple[Path, list[Result]]]") -> None:
    shown = table("folder", "right", "first that is not", right=("right",))
    for folder, results in rows:
        wrong = next((result for result in results if not result.passed), None)
        why = "" if wrong is None else f"{wrong.step}: {wrong.cause or wrong.words}"
        shown.add_row(str(folder), f"{sum(result.passed for result in results)} of {len(results)}", why)
    show(shown)
