"""How tokens are chosen, and the form of an answer, as options that several commands share."""

import argparse
from pathlib import Path
from typing import Any

from llamarium.cli.options import UsageError
from llamarium.errors import GrammarError, InputError
from llamarium.sampling.params import parameters_of


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """Add what decides how tokens are chosen and when an answer ends; help names the default of `--max-tokens`."""
    group = parser.add_argument_group(
        "sampling (what is left out is what the model's generation_config.json says, else the default named here)"
    )
    group.add_argument(
        "-n", "--max-tokens", type=int, metavar="N", help=f"tokens of an answer at most (default: {max_tokens:,})"
    )
    add_choosing(group)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--stop-id", type=int, action="append", metavar="ID", help="end at this token (repeatable)")


def add_choosing(group: "argparse._ActionsContainer", temperature: str = "1") -> None:  # pyright: ignore[reportPrivateUsage]
    """Add what decides which token is chosen; help names the default `temperature`."""
    for one in parameters_of("cli"):
        flag, text = f"--{one.name.replace('_', '-')}", one.help.format(temperature=temperature)
        group.add_argument(flag, type=one.kind, metavar=one.metavar, help=text)
    group.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=BIAS", help="added to a token's logit (repeatable)"
    )


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of `add_sampling`'s options, by the API's names."""
    given = choosing(args)
    if args.max_tokens is not None:
        given["max_tokens"] = args.max_tokens
    if args.stop is not None:
        given["stop"] = tuple(args.stop)
    if args.stop_id is not None:
        given["stop_token_ids"] = tuple(args.stop_id)
    return given


def choosing(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of `add_choosing`'s options, by the API's names."""
    given = {one.name: value for one in parameters_of("cli") if (value := getattr(args, one.name)) is not None}
    if args.logit_bias is not None:
        given["logit_bias"] = dict(args.logit_bias)
        if len(given["logit_bias"]) < len(args.logit_bias):
            raise UsageError("argument --logit-bias: the same token is given twice")
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    try:
        return int(token_id), float(bias if equals else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=BIAS, as in 50256=-100, found {text!r}") from None


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
    from llamarium.sampling.grammar.description import MAX_BYTES

    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no UTF-8 text") from None
