"""A run's settings as options: one flag for each field of a `RunConfig`, whose help and range stand there."""

import argparse
from pathlib import Path
from typing import Any

from llamarium.cli.flags import add_overrides
from llamarium.cli.options import named_folder
from llamarium.options.declare import declared
from llamarium.train.config import RunConfig
from llamarium.train.trackers import TRACKERS


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the short name of `--model`, which other commands have."""
    parser.add_argument("-m", dest="model", default=argparse.SUPPRESS, metavar="NAME", help="the same as --model")


def add_run(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add where a run lives, and how it begins and ends."""
    text = "the run's folder (default: %(default)s)"
    parser.add_argument("--out", type=named_folder, default=folder, metavar="FOLDER", help=text)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, or begin")
    parser.add_argument("--allow-changes", action="store_true", help="resume with other settings or data")
    add_report_to(parser)


def add_report_to(parser: argparse.ArgumentParser) -> None:
    """Add `--report-to`."""
    text = "follow the run there (repeatable)"
    parser.add_argument("--report-to", action="append", default=[], choices=tuple(TRACKERS), help=text)


def add_settings(parser: argparse.ArgumentParser, kind: type[RunConfig]) -> None:
    """Add `--config FILE` and a flag for every setting of a kind of run: its own first, then what every run has."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings from a TOML file; flags win over it")
    own_group, shared_group = (
        parser.add_argument_group("what is learned"),
        parser.add_argument_group("how it is learned"),
    )
    for name in declared(kind):
        add_overrides(shared_group if name in declared(RunConfig) else own_group, kind, name)


def settings_file(args: argparse.Namespace, own_file: Path | None = None) -> Path | None:
    """Return the file that was named, or `own`, the run's (`train.toml`, if not given), where it is to be resumed."""
    file: Path = own_file or args.out / "train.toml"
    return args.config or (file if args.resume and file.exists() else None)


def given_settings(args: argparse.Namespace, kind: type[RunConfig]) -> dict[str, Any]:
    """Return the settings that stand on the command line."""
    settings = {name: getattr(args, name) for name in declared(kind) if hasattr(args, name)}
    return {name: ",".join(value) if name == "data" else value for name, value in settings.items()}
