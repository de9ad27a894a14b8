"""A run's settings as options: one flag for each field of a `RunConfig`, whose help and range stand there."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from llamarium.cli.options import add_type, named_folder
from llamarium.errors import escape
from llamarium.train.config import RunConfig
from llamarium.train.report.trackers import TRACKERS
from llamarium.train.setting_checks import kind_of


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the short name of `--model`, which other commands have."""
    parser.add_argument("-m", dest="model", default=argparse.SUPPRESS, metavar="NAME", help="the same as --model")


def add_run(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add where a run lives, and how it begins and ends."""
    text = "the run's folder (default: %(default)s)"
    parser.add_argument("--out", type=named_folder, default=folder, metavar="FOLDER", help=text)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, or begin")
    parser.add_argument("--allow-changes", action="store_true", help="resume with other settings or data")
    parser.add_argument("--report", action="store_true", help="write report.html there at the end; --resume renews it")
    add_report_to(parser)


def add_report_to(parser: argparse.ArgumentParser) -> None:
    """Add `--report-to`."""
    text = "follow the run there (repeatable)"
    parser.add_argument("--report-to", action="append", default=[], choices=tuple(TRACKERS), help=text)


def add_settings(parser: argparse.ArgumentParser, kind: type[RunConfig]) -> None:
    """Add `--config FILE` and a flag for every setting of a kind of run: its own first, then what every run has."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings from a TOML file; flags win over it")
    own, shared = parser.add_argument_group("what is learned"), parser.add_argument_group("how it is learned")
    common, hints = {item.name for item in dataclasses.fields(RunConfig)}, get_type_hints(kind)
    for item in dataclasses.fields(kind):
        _add(shared if item.name in common else own, item, hints[item.name])


def settings_file(args: argparse.Namespace, own: Path | None = None) -> Path | None:
    """Return the file that was named, or `own`, the run's (`train.toml`, if not given), where it is to be resumed."""
    file: Path = own or args.out / "train.toml"
    return args.config or (file if args.resume and file.exists() else None)


def given_settings(args: argparse.Namespace, kind: type[RunConfig]) -> dict[str, Any]:
    """Return the settings that stand on the command line."""
    found = {item.name: getattr(args, item.name) for item in dataclasses.fields(kind) if hasattr(args, item.name)}
    return {name: ",".join(value) if name == "data" else value for name, value in found.items()}


def _add(group: Any, item: dataclasses.Field[Any], hint: Any) -> None:
    kind = kind_of(hint)
    default = ("off", "on")[item.default] if isinstance(item.default, bool) else item.default
    shown = "" if item.default in (None, "") else f" (default: {escape(default)})"
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": (item.metadata["help"] + shown).replace("%", "%%")}
    if item.name == "quantize":
        add_type(group, "--quantize", get_args(kind), **how)
        return
    if kind is bool:
        how["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is Literal:
        how["choices"] = get_args(kind)
    else:
        how |= {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}
    if item.name in ("data", "reward"):  # each source with its weight, as in one --data with commas
        how["action"] = "append"
    group.add_argument(f"--{item.name.replace('_', '-')}", **how)
