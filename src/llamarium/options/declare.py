"""How an option is declared: a field of a frozen dataclass, with its help text, its range and its choices.

    @dataclass(frozen=True, kw_only=True)
    class ServingOptions(Options):
        max_queue: int = option(256, "maximum number of waiting answers", low=0)

The rest is read from the field, through `declared`: the check of a value, the flag `--max-queue` and its help
(`cli/flags.py`), the keyword of a function of Python (`tools/options.py`) and what `help()` says of it
(`keywords.py`), and the argument of an application of Ray Serve (`server/ray_serve/options.py`). A field that is
declared without `option` is internal: nobody can give it.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from llamarium.errors import LlamariumError, OptionError, show_value

_LARGEST = 2**63  # of numbers without a bound of their own


def option(
    default: Any = MISSING,
    text: str = "",
    low: float | None = None,
    high: float | None = None,
    *,
    choices: Sequence[Any] = (),
    metavar: str = "",
    flag: str = "",
    part: str = "",
    is_free: bool = False,
    ignores_case: bool = False,
    repeats: bool = False,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        default: Its default; without one it has to be given.
        text: Its help text: a noun phrase, then the values. The default is added by what shows it.
        low: The least value of a number.
        high: The largest value of a number.
        choices: Its values, if they are few; those of a `Literal` need no mention.
        metavar: What stands for its value in help.
        flag: Its name on the command line and in Ray Serve, if that is not the field's, as in "max-queue".
        part: Which flags of its dataclass stand together on the command line, as in "limits".
        is_free: A training run may be resumed with another value.
        ignores_case: Capital and small letters are the same in a value.
        repeats: The flag may be given several times.
    """
    metadata = {
        "help": text,
        "low": low,
        "high": high,
        "choices": tuple(choices),
        "metavar": metavar,
        "flag": flag,
        "part": part,
        "is_free": is_free,
        "ignores_case": ignores_case,
        "repeats": repeats,
    }
    return field(default=default, metadata={"option": metadata})


def with_default(kind: type, name: str, default: Any) -> Any:
    """Declare an option of another class again, with another default."""
    before = next(item for item in dataclasses.fields(kind) if item.name == name)
    return field(default=default, metadata=before.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option, as its field declares it; the other attributes are arguments of `option`.

    Attributes:
        hint: The type of its values, as it is annotated.
        kinds: The types of its values, without None; `Literal` is the type of its values.
        is_optional: None is a value, too.
    """

    name: str
    hint: Any
    kinds: tuple[Any, ...]
    is_optional: bool
    default: Any
    help: str
    low: float | None
    high: float | None
    choices: tuple[Any, ...]
    metavar: str
    flag: str
    part: str
    is_free: bool
    ignores_case: bool
    repeats: bool

    @property
    def public_name(self) -> str:
        """Its name for users: the flag's, as Python spells names."""
        return self.flag.replace("-", "_")

    @property
    def kind(self) -> Any:
        """The type of a value, the first one if there are several."""
        return self.kinds[0]

    @property
    def expected(self) -> str:
        """What a value is, in words."""
        if self.choices:
            return ", ".join(map(str, self.choices))
        if self.kind in (int, float):
            words = "a whole number" if self.kind is int else "a number"
            words += "" if self.low is None else f" from {self.low:g}"
            return words + (" to 2^63" if self.high is None else f" to {self.high:g}")
        named = {bool: "true or false", str: "a text", Path: "a path", tuple: "a tuple"}
        return " or ".join(named.get(get_origin(kind) or kind, "a mapping") for kind in self.kinds)

    def accepts(self, value: object) -> bool:
        """Whether it has the right type, and is in range."""
        if value is None:
            return self.is_optional
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        return any(self._fits(kind, value) for kind in self.kinds)

    def check(self, value: object, error: type[LlamariumError] = OptionError) -> None:
        """Refuse a value of another type or out of range, by an error that names the option and what was expected."""
        if not self.accepts(value):
            raise error(f"{self.public_name} is {show_value(value)}; expected {self.expected}")

    def _fits(self, kind: Any, value: object) -> bool:
        if kind in (int, float):
            least = -_LARGEST if self.low is None else self.low
            most = _LARGEST if self.high is None else self.high
            return isinstance(value, int | kind) and not isinstance(value, bool) and least <= value <= most  # not NaN
        return isinstance(value, get_origin(kind) or kind)


@functools.cache
def declared(kind: type) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by name, in their order."""
    return {item.name: _option(item) for item in dataclasses.fields(kind) if "option" in item.metadata}


def _option(item: "dataclasses.Field[Any]") -> Option:
    hint: Any = item.type
    is_union = get_origin(hint) in (Union, types.UnionType)
    hints = get_args(hint) if is_union else (hint,)
    kinds = tuple(kind for kind in hints if kind is not types.NoneType)
    literals = tuple(value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))
    metadata = dict(item.metadata["option"])
    metadata["choices"] = metadata["choices"] or literals
    metadata["flag"] = metadata["flag"] or item.name.replace("_", "-")
    return Option(
        name=item.name,
        hint=hint,
        kinds=tuple(type(literals[0]) if get_origin(kind) is Literal else kind for kind in kinds),
        is_optional=len(kinds) < len(hints),
        default=item.default,
        **metadata,
    )


def check_options(values: Any, error: type[LlamariumError] = OptionError) -> None:
    """Check the options of an instance; those that ignore case are spelled as declared from here on."""
    for name, one in declared(type(values)).items():
        value = getattr(values, name)
        if one.ignores_case and isinstance(value, str):
            value = next((choice for choice in one.choices if choice.lower() == value.lower()), value)
            object.__setattr__(values, name, value)
        one.check(value, error)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options, whose values are checked when it is made; OptionError."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_options(self)
