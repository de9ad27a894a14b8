"""Values of keywords: which are invalid, and which numbers a grammar enforces.

llguidance reads numbers as doubles, ranges of whole numbers within 64 bits, and those of others to 15 digits. A limit
between two of its numbers moves inwards, so that nothing outside is accepted.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, cast

from llamarium.errors import show_value

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

_LARGEST_WHOLE = 2**63 - 1
_LEAST_WHOLE = -(2**63) + 1024  # the next double: llguidance 1.9.1 negates limits within 64 bits
_EXACT_WHOLE = 2**53
_EXACT_DIGITS = 15
_LARGEST_MULTIPLE = 2**32 - 1


class ValueFault(ValueError):
    """Why a value of a keyword is invalid, as the rest of a sentence that begins with the keyword."""


class NotEnforceable(ValueError):
    """Why a grammar does not enforce a keyword, as the rest of a sentence that begins with its name."""


def checked(kind: type, value: Any, expected: str) -> Any:
    """Return a value of a kind, or raise ValueFault."""
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ValueFault(f"is {show_value(value)}; expected {expected}")
    return value


def types_of(value: Any) -> list[str]:
    """Return the names of `type`; "integer" only without "number"."""
    names: list[Any] = value if isinstance(value, list) else [value]
    if not names or any(name not in TYPES for name in names):
        raise ValueFault(f"is {show_value(value)}; expected one or a list of {', '.join(TYPES)}")
    return [name for name in dict.fromkeys(names) if not (name == "integer" and "number" in names)]


def count(value: Any) -> int:
    """Return a whole number that is not negative."""
    number = _number(value)
    if number < 0 or number != math.floor(number):
        raise ValueFault(f"is {show_value(value)}; expected a whole number, at least 0")
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueFault(f"is {show_value(value)}; expected a number")
    return value


def limit(key: str, value: Any, *, whole: bool) -> tuple[str, float]:
    """Return the keyword and value that enforce a limit of numbers, or of integers if `whole`.

    ValueFault if it is not a number, NotEnforceable if a grammar cannot have it as a limit.
    """
    number, is_upper = _number(value), key in UPPER
    inclusive, exclusive = UPPER if is_upper else LOWER
    if not math.isfinite(number):
        raise ValueFault(f"is {show_value(value)}; expected a number")
    if whole:
        return inclusive, _whole_limit(number, is_upper, key == exclusive)
    if key == exclusive and number != math.floor(number):
        return exclusive, _decimal_limit(number, is_upper, False)
    return inclusive, _decimal_limit(number, is_upper, key == exclusive)


def _whole_limit(value: float, is_upper: bool, excluded: bool) -> int:
    """Return the nearest inclusive limit that a double has."""
    nearest = math.floor(value) if is_upper else math.ceil(value)
    if excluded and nearest == value:
        nearest += -1 if is_upper else 1
    if nearest == _LARGEST_WHOLE or abs(nearest) <= _EXACT_WHOLE:
        return nearest
    if not is_upper and -(2**63) <= nearest < _LEAST_WHOLE:
        return _LEAST_WHOLE
    if not _LEAST_WHOLE <= nearest <= _LARGEST_WHOLE:
        raise NotEnforceable(f"is {show_value(value)}: grammars enforce limits of whole numbers within 64 bits")
    rounded = float(nearest)
    if rounded != nearest and (rounded > nearest) is is_upper:
        rounded = math.nextafter(rounded, -math.inf if is_upper else math.inf)
    return int(rounded)


def _decimal_limit(value: float, is_upper: bool, excluded: bool) -> float:
    """Return the nearest limit of 15 digits."""
    exact = Decimal(value if isinstance(value, int) else repr(value))
    if abs(exact) > 10**_EXACT_DIGITS and not (isinstance(value, int) and abs(value) <= _EXACT_WHOLE):
        raise NotEnforceable(f"is {show_value(value)}: grammars enforce limits of numbers up to 1e15")
    if exact == exact.to_integral_value() and not excluded:
        return int(exact)
    if exact == exact.to_integral_value():  # llguidance 1.9.1 accepts 0 between an exclusive 0 and 0.5
        places = max(0, _EXACT_DIGITS - 1 - len(str(abs(int(exact)))))
        step = Decimal(1).scaleb(-places)
        return _plain(exact - step if is_upper else exact + step)
    places = min(_EXACT_DIGITS, _EXACT_DIGITS - 1 - exact.adjusted())
    return _plain(exact.quantize(Decimal(1).scaleb(-places), ROUND_FLOOR if is_upper else ROUND_CEILING))


def _plain(number: Decimal) -> float:
    return int(number) if number == number.to_integral_value() else float(number)


def multiple(value: Any) -> float:
    """Return a divisor of few digits; ValueFault, or NotEnforceable for another."""
    number = _number(value)
    if number <= 0 or not math.isfinite(number):
        raise ValueFault(f"is {show_value(value)}; expected a number above 0")
    read, places = float(number) if number <= _LARGEST_MULTIPLE else math.inf, 0
    while math.isfinite(read) and read <= _LARGEST_MULTIPLE and read != math.floor(read):  # as llguidance reads it
        read, places = read * 10, places + 1
    if read > _LARGEST_MULTIPLE or Decimal(int(read)).scaleb(-places) != Decimal(str(number)):
        raise NotEnforceable(f"is {show_value(value)}: grammars enforce divisors of few digits")
    return int(read) if not places else number


def is_exact(value: Any) -> bool:
    """Return whether a constant's numbers are read exactly."""
    if isinstance(value, list):
        return all(map(is_exact, cast("list[Any]", value)))
    if isinstance(value, dict):
        return all(map(is_exact, cast("dict[str, Any]", value).values()))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    if isinstance(value, int) or value.is_integer():
        return abs(value) <= _EXACT_WHOLE
    digits = repr(value).partition("e")[0].strip("-0.").replace(".", "")
    return len(digits) <= _EXACT_DIGITS and 1e-15 <= abs(value) <= 1e15


def plain_constant(value: Any) -> Any:
    """Return a constant with whole numbers as integers, as llguidance compares them."""
    if isinstance(value, list):
        return [plain_constant(inner) for inner in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: plain_constant(inner) for name, inner in cast("dict[str, Any]", value).items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
