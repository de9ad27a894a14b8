"""Parses tool call arguments, including those of truncated answers."""

import json
from collections.abc import Callable
from typing import Any

from llamarium.strict_json import NotJson, parse_json

_WHITE = " \t\n\r"


def _no_constant(name: str) -> float:
    raise NotJson(f"{name} is not JSON")


_SCAN: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(parse_constant=_no_constant).raw_decode


def is_whole(text: str) -> bool:
    """Whether arguments are valid JSON, i.e. not truncated; an empty text is valid."""
    try:
        parse_json(text or "{}")
    except NotJson:
        return False
    return True


def as_object(text: str) -> str:
    """Return arguments for a prompt: unchanged if they are valid JSON, else an object with the complete members.

    Clients send an empty text or null for functions without parameters: an empty text is unchanged, and null becomes
    `{}`. Other JSON values are unchanged, so that the dialog's validation rejects those that are not objects.
    """
    try:
        value = parse_json(text or "{}")
    except NotJson:
        return json.dumps(_first_members(text), ensure_ascii=False)
    return "{}" if value is None else text


def members(text: str) -> dict[str, Any]:
    """Return the members of an answer's arguments; of truncated arguments only the complete members."""
    try:
        value = parse_json(text or "{}")
    except NotJson:
        return _first_members(text)
    return value if isinstance(value, dict) else {}


def _first_members(text: str) -> dict[str, Any]:
    complete: dict[str, Any] = {}
    place = _after(text, 0, "{")
    try:
        while place is not None:
            name, end = _SCAN(text, _skip(text, place))
            if not isinstance(name, str):
                break
            value, end = _SCAN(text, _skip(text, _after(text, end, ":") or len(text)))
            place = _after(text, end, ",")
            if place is not None or not isinstance(value, int | float):  # a number at the end may be incomplete
                complete[name] = value
    except (ValueError, RecursionError):
        pass
    return complete


def _after(text: str, place: int, mark: str) -> int | None:
    """Return the index after white space and `mark`, or None if the mark is missing."""
    place = _skip(text, place)
    return place + 1 if text.startswith(mark, place) else None


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in _WHITE:
        place += 1
    return place
