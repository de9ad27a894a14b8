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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.build import FOLDER, default_folder, option
from llamarium.cli.options import UsageError, add_json, whole_number
from llamarium.cli.output import emit, say, show, status, table

if TYPE_CHECKING:
    from llamarium.course import Result, Whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("step", nargs="?", help="its name or number (default: the next that is open); or a folder")
    parser.add_argument("--all", action="store_true", help="check all steps, and the whole model when all are right")
    text = f"whose code is run (default: {FOLDER})"
    parser.add_argument("--folder", nargs="+", default=[default_folder()], help=text)
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="of texts and shapes (default: 0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check, print what was found, keep the progress."""
    from llamarium.course.outline import COURSE, step_named

    if args.step is not None and args.folder == [default_folder()] and Path(args.step, COURSE).is_file():
        args.step, args.folder = None, [args.step]
    if args.step is not None:
        step_named(args.step)
        if args.all:
            raise UsageError("name a step or give --all, not both")
    rows: list[tuple[str, list[Result], Whole | None]] = []
    for folder in args.folder:
        with status(f"checking {folder}"):
            rows.append((folder, *_check(args, folder)))
    if len(rows) > 1 and not args.json:
        _show_table(rows)
    findings = [finding for _, results, whole in rows for finding in (*results, whole) if finding is not None]
    return 0 if all(finding.passed for finding in findings) else 1


def _check(args: argparse.Namespace, folder: str) -> "tuple[list[Result], Whole | None]":
    """Check a folder and print each finding as it comes; return those of steps, and that of the whole model."""
    from llamarium.course import STEPS, check_step, check_steps, check_whole

    path = Path(folder)
    results: list[Result] = []
    findings = check_steps(path, seed=args.seed) if args.all else (check_step(path, args.step, seed=args.seed),)
    for result in findings:
        results.append(result)
        if args.json:
            emit({"folder": folder, **asdict(result)})
        elif len(args.folder) == 1:
            _say(result, folder)
    if len(results) < len(STEPS) or not all(result.passed for result in results):
        return results, None
    whole = check_whole(path)
    if args.json:
        emit({"folder": folder, "whole": {**asdict(whole), "passed": whole.passed}})
    elif len(args.folder) == 1:
        _say_whole(whole)
    return results, whole


def _say(result: "Result", folder: str) -> None:
    from llamarium.course.folder.page import link_to_section
    from llamarium.course.folder.source import section_words
    from llamarium.course.outline import number_of, step_named

    if result.printed:
        first, num_others = result.printed.rstrip().splitlines()[:5], result.printed.rstrip().count("\n") - 4
        say("printed: " + "\n".join(first) + (f"\n... and {num_others} more lines" if num_others > 0 else ""))
    name = f"step {number_of(step_named(result.step))}, {result.step}"
    if result.passed:
        say(f"{name}: right ({result.checked}; {result.seconds:.1f} s)")
        return
    say(f"{name}: {result.message}")
    if result.cause:
        say(f"  {result.cause}")
    say(f"  Next hint: `llamarium build hint {result.step}{option(folder)}`")
    say(f"  See {section_words(result.section)}")
    if (link := link_to_section(Path(folder), result.section)) is not None:
        say(f"  {link}")


def _say_whole(whole: "Whole") -> None:
    from llamarium.course.whole import PROMPT

    if whole.error:
        say(f"the whole model: {whole.error}")
        return
    say(f"\nYour Llama continues {PROMPT!r} with {whole.text!r};")
    say(f"the library's with {whole.library_text!r}.")
    own, library = whole.tokens_per_second, whole.library_tokens_per_second
    say(f"{own:.1f} tokens/s (the library's: {library:.0f}), {_apart(whole)}.")
    if whole.is_slow:
        say("Two layers and a part of the vocabulary were compared, beside the right functions: these are slow.")


def _apart(whole: "Whole") -> str:
    from llamarium.course.whole import MAX_NATS

    if whole.passed:
        return f"{whole.nats:.1g} nats a token apart"
    return f"{whole.nats:.1g} nats a token apart at {whole.prompt!r}; right is at most {MAX_NATS:g}"


def _show_table(rows: "list[tuple[str, list[Result], Whole | None]]") -> None:
    last = ("whole model",) if any(whole for _, _, whole in rows) else ()
    overview = table("folder", "right", "first that is not", *last, right=("right",))
    for folder, results, whole in rows:
        first_wrong = next((result for result in results if not result.passed), None)
        why = "" if first_wrong is None else f"{first_wrong.step}: {first_wrong.cause or first_wrong.message}"
        together = "" if whole is None else "right" if whole.passed else whole.error or _apart(whole)
        num_right = sum(result.passed for result in results)
        overview.add_row(folder, f"{num_right} of {len(results)}", why, *(together for _ in last))
    show(overview)
