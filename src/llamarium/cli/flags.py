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
    chosen = names or [name for name, option in options.items() if part in (None, option.part)]
    for name in chosen:
        option = options[name]
        default = list[Any]() if option.repeats else option.default
        shown_default = option.default
        if name in (defaults or {}):
            default, shown_default = None, (defaults or {})[name]
        arguments: dict[str, Any] = {"dest": name, "default": default, "help": _help(option, shown_default)}
        if option.kind is bool and option.is_optional:
            arguments["action"] = argparse.BooleanOptionalAction
        elif option.kind is bool:
            arguments |= {"action": "store_true", "help": _help(option, None)}
        else:
            arguments |= _value(option, (parsers or {}).get(name) or _ranged(option))
        group.add_argument(*([option.short] if option.short else []), f"--{option.flag}", **arguments)


def add_overrides(group: Group, kind: type, *names: str) -> None:
    """Add a flag for each of some options that win over a file's, and are checked together with those.

    An option that is not given is no attribute of the arguments.
    """
    for option in (declared(kind)[name] for name in names):
        arguments: dict[str, Any] = {
            "dest": option.name,
            "default": argparse.SUPPRESS,
            "help": _help(option, option.default),
        }
        arguments |= {"action": argparse.BooleanOptionalAction} if option.kind is bool else _value(option, option.kind)
        group.add_argument(f"--{option.flag}", **arguments)


def given_options(args: argparse.Namespace, kind: type, part: str | None = None) -> dict[str, Any]:
    """Return the options of a dataclass, or of a part of it, that were given on the command line, by name."""
    values = {name: getattr(args, name, None) for name, option in declared(kind).items() if part in (None, option.part)}
    chosen = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}


def add_type(group: Group, flag: str, choices: Sequence[str], **arguments: Any) -> None:
    """Add an option that takes one of some types of weights, in capital letters or not."""
    group.add_argument(flag, **_any_case(flag, choices), **arguments)


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


def _help(option: Option, default: object) -> str:
    """Return an option's help text, with its default unless it is None or empty."""
    text = option.help + " (repeatable)" * option.repeats
    if default is None or default in ("", (), {}):
        return text.replace("%", "%%")
    words = ("off", "on")[default] if isinstance(default, bool) else default
    words = f"{words:g}" if isinstance(words, float) else words
    return f"{text} (default: {escape(words)})".replace("%", "%%")


def _value(option: Option, parser: Callable[[str], Any]) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a flag with a value."""
    arguments: dict[str, Any] = {"action": "append"} if option.repeats else {}
    if option.ignores_case:
        return arguments | _any_case(f"--{option.flag}", option.choices)
    if option.choices:
        return arguments | {"type": option.kind, "choices": option.choices}
    return arguments | {"type": parser, "metavar": option.metavar or _METAVARS[get_origin(option.kind) or option.kind]}


def _ranged(option: Option) -> Callable[[str], Any]:
    """Return the argparse type of an option, by its type and range."""
    if option.words and option.kind in (int, float):
        return _number(option.kind, option.words, option.accepts)
    if option.kind in (int, float):
        low, high = (
            (-math.inf if option.low is None else option.low),
            (math.inf if option.high is None else option.high),
        )
        words = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        return number(option.kind, words, option.accepts)
    return Path if Path in option.kinds else str


def _any_case(flag: str, choices: Sequence[str]) -> dict[str, Any]:
    from llamarium.quant.formats import chosen_type

    def parse(text: str) -> str:
        try:
            return chosen_type(flag, text, choices)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{flag} is ")) from None

    listed = f"{{{','.join(choices)}}}"
    return {"type": parse, "metavar": listed if len(listed) < _LONG else "TYPE"}
