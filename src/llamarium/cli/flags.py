"""Command-line flags generated from the options of a dataclass (`options/declare.py`)."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, get_origin

from llamarium.errors import OptionError, escape
from llamarium.options.declare import Option, declared

Group: TypeAlias = argparse._ActionsContainer  # pyright: ignore[reportPrivateUsage]
"""A parser, or a group of it."""

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", tuple: "TEXT"}
_LONG = 40  # characters of choices that are not listed as the metavar


def add_flags(
    group: Group,
    kind: type,
    *names: str,
    part: str | None = None,
    parsers: Mapping[str, Callable[[str], Any]] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Add a flag for each option of a dataclass, for those of a part of it, or for those that are named.

    Args:
        group: A parser, or a group of it.
        kind: The dataclass.
        names: The options; none are all, or those of `part`.
        part: As `option` declares it.
        parsers: What reads a value's text, by option; the others are read by their types.
        defaults: What help calls the default of an option, where the command decides it; the value is None then.
    """
    options = declared(kind)
    chosen = names or [name for name, one in options.items() if part in (None, one.part)]
    for name in chosen:
        one = options[name]
        default = list[Any]() if one.repeats else one.default
        shown = one.default
        if name in (defaults or {}):
            default, shown = None, (defaults or {})[name]
        how: dict[str, Any] = {"dest": name, "default": default, "help": _help(one, shown)}
        if one.kind is bool and one.is_optional:
            how["action"] = argparse.BooleanOptionalAction
        elif one.kind is bool:
            how |= {"action": "store_true", "help": _help(one, None)}
        else:
            how |= _value(one, (parsers or {}).get(name) or _ranged(one))
        group.add_argument(*([one.short] if one.short else []), f"--{one.flag}", **how)


def add_overrides(group: Group, kind: type, *names: str) -> None:
    """Add a flag for each of some options that win over a file's, and are checked together with those.

    An option that is not given is no attribute of the arguments.
    """
    for one in (declared(kind)[name] for name in names):
        how: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS, "help": _help(one, one.default)}
        how |= {"action": argparse.BooleanOptionalAction} if one.kind is bool else _value(one, one.kind)
        group.add_argument(f"--{one.flag}", **how)


def given_options(args: argparse.Namespace, kind: type, part: str | None = None) -> dict[str, Any]:
    """Return the options of a dataclass, or of a part of it, that were given on the command line, by name."""
    values = {name: getattr(args, name, None) for name, one in declared(kind).items() if part in (None, one.part)}
    given = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def add_type(group: Group, flag: str, choices: Sequence[str], **how: Any) -> None:
    """Add an option that takes one of some types of weights, in capital letters or not."""
    group.add_argument(flag, **_any_case(flag, choices), **how)


def number(kind: type[int] | type[float], expected: str, accepts: Callable[[Any], bool]) -> Callable[[str], Any]:
    """Return an argparse type for a number that `accepts` allows; `expected` describes the range."""
    return _number(kind, f"{'a whole number' if kind is int else 'a number'}, {expected}", accepts)


def _number(kind: type[int] | type[float], words: str, accepts: Callable[[Any], bool]) -> Callable[[str], Any]:
    def parse(text: str) -> float:
        with suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"expected {words}, found {text!r}")

    return parse


def _help(one: Option, default: object) -> str:
    """Return an option's help text, with its default unless it is None or empty."""
    text = one.help + " (repeatable)" * one.repeats
    if default is None or default in ("", (), {}):
        return text.replace("%", "%%")
    words = ("off", "on")[default] if isinstance(default, bool) else default
    words = f"{words:g}" if isinstance(words, float) else words
    return f"{text} (default: {escape(words)})".replace("%", "%%")


def _value(one: Option, parser: Callable[[str], Any]) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a flag with a value."""
    how: dict[str, Any] = {"action": "append"} if one.repeats else {}
    if one.ignores_case:
        return how | _any_case(f"--{one.flag}", one.choices)
    if one.choices:
        return how | {"type": one.kind, "choices": one.choices}
    return how | {"type": parser, "metavar": one.metavar or _METAVARS[get_origin(one.kind) or one.kind]}


def _ranged(one: Option) -> Callable[[str], Any]:
    """Return the argparse type of an option, by its type and range."""
    if one.words and one.kind in (int, float):
        return _number(one.kind, one.words, one.accepts)
    if one.kind in (int, float):
        low, high = (-math.inf if one.low is None else one.low), (math.inf if one.high is None else one.high)
        words = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        return number(one.kind, words, one.accepts)
    return Path if Path in one.kinds else str


def _any_case(flag: str, choices: Sequence[str]) -> dict[str, Any]:
    from llamarium.quant.formats import chosen_type

    def parse(text: str) -> str:
        try:
            return chosen_type(flag, text, choices)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{flag} is ")) from None

    listed = f"{{{','.join(choices)}}}"
    return {"type": parse, "metavar": listed if len(listed) < _LONG else "TYPE"}
