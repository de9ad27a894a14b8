"""The form of an answer, as options that several commands share, and what is made of them."""

import argparse
from pathlib import Path
from typing import Any

from llamarium.cli.options import UsageError
from llamarium.errors import GrammarError, InputError

_WRITTEN = {".lark": "lark", ".gbnf": "gbnf"}


def add_grammar(parser: argparse.ArgumentParser) -> None:
    """Add what an answer's text may be."""
    group = parser.add_argument_group("form of an answer (one of these; needs the extra `serve`)")
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that this JSON Schema allows")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="REGEX", help="what this matches from end to end (Rust's syntax)")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts (repeatable)")
    group.add_argument(
        "--grammar", type=Path, metavar="FILE", help="what this grammar accepts: FILE.lark, or llama.cpp's FILE.gbnf"
    )


def grammar(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of `add_grammar`'s options, as a `Grammar` by the API's name."""
    flags = ("json_schema", "json_object", "regex", "choice", "grammar")
    given = [name for name in flags if getattr(args, name) not in (None, False)]
    if not given:
        return {}
    if len(given) > 1:
        raise UsageError(f"argument --{given[1].replace('_', '-')}: an answer has one form, see --{given[0]}")
    from llamarium.sampling.grammar.description import Grammar

    value = getattr(args, given[0])
    if given[0] == "json_object":
        return {"grammar": Grammar.json_object()}
    if not isinstance(value, Path):
        return {"grammar": getattr(Grammar, given[0])(value)}
    kind = "json_schema" if given[0] == "json_schema" else _WRITTEN.get(value.suffix)
    if kind is None:
        raise UsageError(f"argument --grammar: {value} is neither FILE.lark nor FILE.gbnf")
    text = _read(value)
    try:
        return {"grammar": getattr(Grammar, kind)(text)}
    except GrammarError as error:
        raise type(error)(f"{value}: {error}") from None


def _read(path: Path) -> str:
    """Return a file's text, as far as any grammar may be long."""
    from llamarium.sampling.grammar.description import MAX_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no UTF-8 text") from None
