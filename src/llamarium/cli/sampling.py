"""Options for sampling and for the grammar of an answer, shared by several commands."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarium.cli.errors import UsageError
from llamarium.cli.flags import Group, number
from llamarium.cli.options import a_text, count
from llamarium.errors import GrammarError, InputError
from llamarium.sampling.params import PARAMETERS, parameters_of


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """Add what decides how tokens are chosen and when an answer ends; help names the default of `--max-tokens`."""
    group = parser.add_argument_group(
        "sampling (what is left out is what the model's generation_config.json says, else the default named here)"
    )
    kind, text = setting("max_tokens"), f"tokens of an answer at most (default: {max_tokens:,})"
    group.add_argument("-n", "--max-tokens", type=kind, metavar="N", help=text)
    add_choosing(group)
    group.add_argument("--stop", type=a_text, action="append", metavar="TEXT", help="end before this text (repeatable)")
    text = "end at this token (repeatable)"
    group.add_argument("--stop-id", dest="stop_token_ids", type=count, action="append", metavar="ID", help=text)


def add_choosing(group: Group, temperature: str = "1") -> None:
    """Add what decides which token is chosen; help names the default `temperature`."""
    for one in parameters_of("cli"):
        flag, text = f"--{one.name.replace('_', '-')}", one.help.format(temperature=temperature)
        group.add_argument(flag, type=setting(one.name), metavar=one.metavar, help=text)
    text = "added to a token's logit (repeatable)"
    group.add_argument("--logit-bias", type=_bias, action="append", metavar="ID=BIAS", help=text)


def setting(name: str) -> Callable[[str], Any]:
    """Return an argparse type for a sampling parameter, with the parameter's range."""
    one = PARAMETERS[name]
    return number(one.kind, one.expected, one.accepts)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of `add_sampling` under the API's names."""
    given = choosing(args)
    for name in ("max_tokens", "stop", "stop_token_ids"):
        if (value := getattr(args, name)) is not None:
            given[name] = tuple(value) if isinstance(value, list) else value
    if given.get("min_tokens", 0) > given.get("max_tokens", math.inf):
        raise UsageError(f"argument --min-tokens: {given['min_tokens']} are more than -n/--max-tokens allows")
    return given


def choosing(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of `add_choosing` under the API's names."""
    given = {one.name: value for one in parameters_of("cli") if (value := getattr(args, one.name)) is not None}
    if args.logit_bias is not None:
        given["logit_bias"] = dict(args.logit_bias)
        if len(given["logit_bias"]) < len(args.logit_bias):
            raise UsageError("argument --logit-bias: the same token is given twice")
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    with suppress(ValueError):
        found = int(token_id), float(bias if equals else "")
        if found[0] >= 0 and -100 <= found[1] <= 100:
            return found
    raise argparse.ArgumentTypeError(f"expected ID=BIAS, as in 50256=-100, with a bias of -100 to 100, found {text!r}")


_WRITTEN = {".lark": "lark", ".gbnf": "gbnf"}


def add_grammar(parser: argparse.ArgumentParser) -> None:
    """Add what an answer's text may be."""
    group = parser.add_argument_group("form of an answer (one of these; needs the extra `serve`)")
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="JSON that this JSON Schema allows")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="REGEX", help="what this matches from end to end (Rust's syntax)")
    group.add_argument("--choice", type=a_text, action="append", metavar="TEXT", help="one of these texts (repeatable)")
    group.add_argument("--grammar", type=Path, metavar="FILE", help="what FILE.lark or llama.cpp's FILE.gbnf accepts")


def grammar(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of `add_grammar`'s options, as a `Grammar` by the API's name."""
    flags = ("json_schema", "json_object", "regex", "choice", "grammar")
    given = [name for name in flags if getattr(args, name) not in (None, False)]
    if not given:
        return {}
    if len(given) > 1:
        raise UsageError(f"argument --{given[1].replace('_', '-')}: an answer has one form, see --{given[0]}")
    for name in ("stop", "min_tokens"):
        if getattr(args, name):
            flag, form = (one.replace("_", "-") for one in (name, given[0]))
            raise UsageError(f"argument --{flag}: not allowed with argument --{form}, which ends the answer itself")
    from llamarium.sampling.grammar.description import Grammar, warn_unenforced

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
        grammar = getattr(Grammar, kind)(text)
    except GrammarError as error:
        raise type(error)(f"{value}: {error}") from None
    warn_unenforced(grammar)
    return {"grammar": grammar}


def _read(path: Path) -> str:
    from llamarium.sampling.grammar.description import MAX_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no UTF-8 text") from None
