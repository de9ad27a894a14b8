"""Write a run's report: one HTML page with its curves, its samples over time,
and how the embedding rows moved. The run may be going on, or have been killed.
Several runs are compared on one plot.

  llamarium report runs/story
  llamarium report runs/small runs/large --out compared.html
"""

import argparse
from pathlib import Path

from llamarium.cli.options import UsageError, importing_torch
from llamarium.cli.output import write_text
from llamarium.extras import need_torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder; up to five are compared")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="a comparison's page; one run's is in its folder")


def run(args: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    runs: list[Path] = args.runs
    if (len(runs) > 1) != (args.out is not None):
        raise UsageError("argument --out: several runs need it, and one has its page in its folder")
    if len({path.name for path in runs}) < len(runs):
        raise UsageError("the runs' folders need different names: they name the curves")
    need_torch("llamarium report", "train")
    with importing_torch():
        from llamarium.train.report.write import compare, write_report
    if len(runs) == 1:
        page = write_report(runs[0])
    else:
        page = compare({path.name: path for path in runs}, args.out, " against ".join(path.name for path in runs))
    write_text(f"{page}\n")
    return 0
