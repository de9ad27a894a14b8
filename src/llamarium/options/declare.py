"""Declaration of options as fields of frozen dataclasses, with help text, range and choices.

    @dataclass(frozen=True, kw_only=True)
    class ServingOptions(Options):
        max_queue: int = option(256, "maximum number of waiting answers", low=0)

`declared` returns the declarations. From them are derived: the check of a value, the flag `--max-queue` and its help
(`cli/flags.py`), the keyword argument of Python functions (`tools/options.py`) and its `help()` (`keywords.py`), and
the argument of a Ray Serve application (`server/ray_serve/options.py`). A field declared without `option` is internal
and not available to users.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from llamarium.errors import LlamariumError, OptionError, show_value

_LARGEST = 2**63  # bound of numbers without a declared one


def option(
    default: Any = MISSING,
    text: str = "",
    low: float | None = None,
    high: float | None = None,
    *,
    choices: Sequence[Any] = (),
    metavar: str = "",
    flag: str = "",
    short: str = "",
    part: str = "",
    is_free: bool = False,
    ignores_case: bool = False,
    repeats: bool = False,
    words: str = "",
    condition: Callable[[Any], bool] | None = None,
) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        default: Default value; without one the option is required.
        text: Help text: a noun phrase, then the values. The default is appended where the help is shown.
        low: Minimum of a number.
        high: Maximum of a number.
        choices: Allowed values; for a `Literal` they are taken from the annotation.
        metavar: Placeholder for the value in help.
        flag: Name on the command line and in Ray Serve, if it differs from the field's, such as "max-queue".
        short: Second flag of one letter, such as "-n".
        part: Group of flags on the command line, such as "limits".
        is_free: True if a training run may be resumed with another value.
        ignores_case: True if values ignore case.
        repeats: True if the flag may be given several times.
        words: Description of the expected values, if type and bounds are not enough.
        condition: Further condition on a value within its bounds; `words` says which.
    """
    metadata = {"help": text, "low": low, "high": high, "words": words, "condition": condition}
    metadata |= {
        "choices": tuple(choices),
        "metavar": metavar,
        "flag": flag,
        "short": short,
        "part": part,
        "is_free": is_free,
        "ignores_case": ignores_case,
        "repeats": repeats,
    }
    return field(default=default, metadata={"option": metadata})


def with_default(kind: type, name: str, default: Any) -> Any:
    """Declare the option `name` of another class with a different default."""
    before = next(item for item in dataclasses.fields(kind) if item.name == name)
    return field(default=default, metadata=before.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of an option; for other attributes see the arguments of `option`.

    Attributes:
        name: Name of the field.
        hint: Annotated type.
        kinds: Types of its values, without None; for a `Literal`, the type of its values.
        is_optional: True if None is allowed.
        help: Help text.
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
    short: str
    part: str
    is_free: bool
    ignores_case: bool
    repeats: bool
    words: str
    condition: Callable[[Any], bool] | None

    @property
    def public_name(self) -> str:
        """Name for users: the flag's name with underscores."""
        return self.flag.replace("-", "_")

    @property
    def kind(self) -> Any:
        """Type of its values; the first one if there are several."""
        return self.kinds[0]

    @property
    def expected(self) -> str:
        """Description of the expected values, for messages."""
        if self.words:
            return self.words
        if self.choices:
            return ", ".join(map(str, self.choices))
        if self.kind in (int, float):
            words = "a whole number" if self.kind is int else "a number"
            words += "" if self.low is None else f" from {self.low:g}"
            return words + (" to 2^63" if self.high is None else f" to {self.high:g}")
        descriptions = {bool: "true or false", str: "a text", Path: "a path", tuple: "a tuple"}
        return " or ".join(descriptions.get(get_origin(kind) or kind, "a mapping") for kind in self.kinds)

    def accepts(self, value: object) -> bool:
        """Return whether a value has the right type and is in range."""
        if value is None:
            return self.is_optional
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        return any(self._fits(kind, value) for kind in self.kinds) and (not self.condition or self.condition(value))

    def check(self, value: object, error: type[LlamariumError] = OptionError) -> None:
        """Raise `error`, with the option's name and the expected values, if a value has the wrong type or range."""
        if not self.accepts(value):
            raise error(f"{self.public_name} is {show_value(value)}; expected {self.expected}")

    def _fits(self, kind: Any, value: object) -> bool:
        if kind in (int, float):
            low = -_LARGEST if self.low is None else self.low
            high = _LARGEST if self.high is None else self.high
            return isinstance(value, int | kind) and not isinstance(value, bool) and low <= value <= high  # not NaN
        return isinstance(value, get_origin(kind) or kind)


@functools.cache
def declared(kind: type) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by name, in the order of declaration."""
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
        default=item.default if item.default_factory is MISSING else item.default_factory(),
        **metadata,
    )


def check_options(values: Any, error: type[LlamariumError] = OptionError) -> None:
    """Check the options of an instance; values that ignore case are replaced by the declared spelling."""
    for name, declaration in declared(type(values)).items():
        value = getattr(values, name)
        if declaration.ignores_case and isinstance(value, str):
            value = next((choice for choice in declaration.choices if choice.lower() == value.lower()), value)
            object.__setattr__(values, name, value)
        declaration.check(value, error)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group of options; OptionError if a value is invalid."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_options(self)
