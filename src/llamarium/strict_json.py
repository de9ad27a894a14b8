"""Strict JSON: the one parser of everything that comes from outside as JSON.

Python's own parser takes the last of two equal keys, reads NaN and infinities, which JSON lacks, and accepts values of
any number and depth. Here these are faults. Callers turn `NotJson` into the error of their own format.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, cast

from llamarium.errors import show_value

_LONGEST_INTEGER = 308  # digits: any such integer is a float64, too
_BLANKS = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class NotJson(ValueError):
    """A text that is not strict JSON, with the reason."""


class BrokenListError(NotJson):
    """A list that is not strict JSON, with the place of the fault in the text."""

    def __init__(self, reason: str, place: int) -> None:
        super().__init__(reason)
        self.place = place


class TooDeepJson(NotJson):
    """A text whose objects and lists are nested too deeply."""


def parse_json(
    text: str | bytes, *, max_values: int | None = None, max_levels: int | None = None, portable: bool = False
) -> Any:
    """Return the value of a JSON text; NotJson if it is not strict JSON, TooDeepJson if nested too deeply.

    Args:
        text: The text; bytes are UTF-8.
        max_values: Largest number of values, bounded before anything is parsed: an empty list takes two bytes in a text
            and sixty in memory.
        max_levels: Deepest nesting of objects and lists.
        portable: Refuse what other programs cannot hold: integers and other numbers beyond float64, and halves of
            surrogate pairs.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise NotJson(f"it is not in UTF-8 at byte {error.start}") from None

    if max_values is not None and sum(map(text.count, ",[{")) > max_values:
        raise NotJson(f"it has more than {max_values:,} values")

    numbers: dict[str, Any] = {"parse_int": _integer, "parse_float": _number} if portable else {}
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, **numbers)
    except json.JSONDecodeError as error:
        raise NotJson(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise TooDeepJson("it is nested too deeply") from None
    except NotJson:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise NotJson(str(error)) from None

    if max_levels is not None and text.count("[") + text.count("{") > max_levels:
        _check_levels(value, max_levels)
    if portable and _SURROGATE.search(text):
        _check_surrogates(value)
    return value


def parse_json_list(text: str, start: int) -> Iterator[tuple[int, Any]]:
    """Yield the place and the value of each element of a JSON list, one at a time.

    `start` is the place of its "["; the last pair is the place after its "]", and None. NotJson, with the place, if the
    list is not strict JSON.
    """
    place = _BLANKS.match(text, start + 1).end()  # pyright: ignore[reportOptionalMemberAccess] - it matches nothing, too
    if text[place : place + 1] != "]":
        while True:
            value, end = _parse_at(text, place)
            yield place, value
            place = _BLANKS.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]
            if (mark := text[place : place + 1]) != ",":
                break
            place = _BLANKS.match(text, place + 1).end()  # pyright: ignore[reportOptionalMemberAccess]
        if mark != "]":
            raise BrokenListError("Expecting ',' delimiter" if mark else "the text ends within the list", place)
    yield place + 1, None


def _parse_at(text: str, place: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise BrokenListError(error.msg, error.pos) from None
    except RecursionError:
        raise BrokenListError("it is nested too deeply", place) from None
    except ValueError as error:  # NotJson of the hooks, and an integer of thousands of digits
        raise BrokenListError(str(error), place) from None


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the fields that are null, at any depth; null means left out."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in cast("dict[str, Any]", value).items() if item is not None}
    return [without_nulls(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = set[str]()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise NotJson(f"an object has the key {show_value(twice)} twice")
    return value


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > _LONGEST_INTEGER:
        raise NotJson(f"a whole number has more than {_LONGEST_INTEGER} digits")
    return int(digits)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NotJson("a number is too large")
    return value


def _constant(name: str) -> float:
    raise NotJson(f"{name} is not JSON")


def _check_levels(value: Any, max_levels: int) -> None:
    level = [value]
    for _ in range(max_levels):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise TooDeepJson(f"it is nested deeper than {max_levels} levels")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotJson("a text holds half of a surrogate pair, which is not Unicode") from None


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
