"""Make a course for others: which steps, and which texts their functions are
checked on. Learners begin with `llamarium build --course FILE`; with
`llamarium build check --all --folder ...` you get a table of their results.

  llamarium build pack course.json --steps rms_norm rotate attend
  llamarium build pack course.json --texts sentences.txt
"""

import argparse
from pathlib import Path

from llamarium.cli.output import note
from llamarium.cli.text import read_file
from llamarium.errors import counted, escape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("out", metavar="FILE", help="the course to write, JSON")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="names or numbers (default: all)")
    parser.add_argument("--texts", metavar="FILE", help="one text a line; - is standard input (default: the library's)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> int:
    """Write the course."""
    from llamarium.course.outline import Course

    complete = Course()
    lines = complete.texts if args.texts is None else read_file(args.texts).splitlines()
    texts = [line.strip() for line in lines if line.strip()]
    steps = complete.steps if args.steps is None else args.steps
    source = "standard input" if args.texts == "-" else args.texts or "the course"
    course = Course.of(steps, texts, source=source)
    course.write(Path(args.out), force=args.force)
    count = len(course.steps)
    contents = f"{counted(count, 'step')}, {counted(len(course.texts), 'text')}"
    note(f"wrote {escape(args.out)}: {contents}; learners begin with `llamarium build --course {escape(args.out)}`")
    return 0
