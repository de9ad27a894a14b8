"""Show a hint for a step of your own Llama: two hints, and then the solution.
Each call shows one more.

  llamarium build hint
  llamarium build hint rotate
  llamarium build hint rotate --depth 3
"""

import argparse
from pathlib import Path

from llamarium.cli.build import FOLDER, default_folder, option
from llamarium.cli.options import whole_number
from llamarium.cli.output import note, say
from llamarium.errors import escape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("step", nargs="?", help="a step's name or number (default: the next one that is open)")
    text = "1, 2, or 3, the solution (default: the next)"
    parser.add_argument("--depth", type=whole_number(1, 3), metavar="N", help=text)
    parser.add_argument("--folder", default=default_folder(), help=f"where it is noted (default: {FOLDER})")


def run(args: argparse.Namespace) -> int:
    """Print the hints up to a depth."""
    from llamarium.course import hint, next_step

    step = args.step
    if step is None:
        step = next_step(Path(args.folder))
        note(f"The next step is {step}.\n")
    depth, text = hint(Path(args.folder), step, args.depth)
    if depth == 3:  # with code, whose lines stay as they are
        print(text)
    else:
        say(text)
        command = f"llamarium build hint {escape(step)}{option(args.folder)}"
        note(f"\n{'One more hint' if depth == 1 else 'The solution'}: `{command}`")
    return 0
