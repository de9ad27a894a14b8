"""Options for sampling and for the grammar of an answer, shared by several commands."""

import argparse
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarium.cli.errors import UsageError
from llamarium.cli.flags import Group, add_flags
from llamarium.cli.options import a_text, count
from llamarium.errors import GrammarError, InputError
from llamarium.options.declare import declared
from llamarium.sampling.grammar.description import MAX_BYTES, FormOptions, Grammar, warn_unenforced
from llamarium.sampling.params import SamplingParams, parameters_of


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """Add flags for how tokens are chosen and when an answer ends; help shows the default of `--max-tokens`."""
    group = parser.add_argument_group(
        "sampling (defaults come from the model's generation_config.json, then from the values below)"
    )
    _add(group, "max_tokens", max_tokens=f"{max_tokens:,}")
    add_choosing(group)
    _add(group, *_ENDS)


def add_choosing(group: Group, temperature: str = "1") -> None:
    """Add flags for how a token is chosen; help shows the default `temperature`."""
    _add(group, *_CHOOSING, temperature=temperature)


def _add(group: Group, *names: str, **defaults: object) -> None:
    """Add flags whose value is None unless given; help shows `defaults`, or else the declared ones."""
    declared_defaults = {name: _OPTIONS[name].default for name in names}
    add_flags(group, SamplingParams, *names, parsers=_PARSERS, defaults=declared_defaults | defaults)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of `add_sampling` under the API's names."""
    options = choosing(args) | _given(args, "max_tokens", *_ENDS)
    if options.get("min_tokens", 0) > options.get("max_tokens", math.inf):
        raise UsageError(f"argument --min-tokens: {options['min_tokens']} are more than -n/--max-tokens allows")
    return options


def choosing(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of `add_choosing` under the API's names."""
    options = _given(args, *_CHOOSING)
    if args.logit_bias is not None:
        options["logit_bias"] = dict(args.logit_bias)
        if len(options["logit_bias"]) < len(args.logit_bias):
            raise UsageError("argument --logit-bias: the same token is given twice")
    return options


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in names}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None
    }


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    with suppress(ValueError):
        pair = int(token_id), float(bias if equals else "")
        if pair[0] >= 0 and -100 <= pair[1] <= 100:
            return pair
    raise argparse.ArgumentTypeError(f"expected ID=BIAS, as in 50256=-100, with a bias of -100 to 100, found {text!r}")


_OPTIONS = declared(SamplingParams)
_CHOOSING = (*(option.name for option in parameters_of("cli")), "logit_bias")
_ENDS = "stop", "stop_token_ids"
_PARSERS = {"logit_bias": _bias, "stop": a_text, "stop_token_ids": count}

_WRITTEN = {".lark": "lark", ".gbnf": "gbnf"}


def add_grammar(parser: argparse.ArgumentParser) -> None:
    """Add the flags that constrain an answer's text."""
    group = parser.add_argument_group("form of an answer (one of these; needs the extra `serve`)")
    add_flags(group, FormOptions, parsers={"json_schema": Path, "choice": a_text}, defaults={"choice": None})
    group.add_argument("--grammar", type=Path, metavar="FILE", help="grammar: FILE.lark, or llama.cpp's FILE.gbnf")


def grammar(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of `add_grammar`'s options, as a `Grammar` by the API's name."""
    flags = ("json_schema", "json_object", "regex", "choice", "grammar")
    chosen = [name for name in flags if getattr(args, name) not in (None, False)]
    if not chosen:
        return {}
    if len(chosen) > 1:
        raise UsageError(f"argument --{chosen[1].replace('_', '-')}: an answer has one form, see --{chosen[0]}")
    for name in ("stop", "min_tokens"):
        if getattr(args, name):
            flag, form = (name.replace("_", "-") for name in (name, chosen[0]))
            raise UsageError(f"argument --{flag}: not allowed with argument --{form}, which ends the answer itself")
    value = getattr(args, chosen[0])
    if chosen[0] == "json_object":
        return {"grammar": Grammar.json_object()}
    if not isinstance(value, Path):
        return {"grammar": getattr(Grammar, chosen[0])(value)}
    kind = "json_schema" if chosen[0] == "json_schema" else _WRITTEN.get(value.suffix)
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
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no UTF-8 text") from None
