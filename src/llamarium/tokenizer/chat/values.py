"""The input of chat templates: validated copies of JSON values, with spellings of control tokens broken up."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from llamarium.errors import ChatFormatError, escape, show_value
from llamarium.tokenizer.special import check_text

_MAX_DEPTH = 32
_MAX_INTEGER_BITS = 1024  # as far as floating-point numbers go
_TYPES = {"function", "object", "array", "string", "number", "integer", "boolean", "null", "text"}
_FIELD_NAME = re.compile(r"[\w .:$@/-]{1,256}")


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """Return a validated copy of a JSON value of a message or a tool; `where` is its path, for messages."""
    if depth > _MAX_DEPTH:
        raise ChatFormatError(f"{where} is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise ChatFormatError(
            f"{where} is an integer of {value.bit_length()} bits; expected at most {_MAX_INTEGER_BITS}"
        )
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_text(value)
        return value
    if isinstance(value, Mapping):
        return {
            _key(key, where): plain_value(item, f"{where}.{escape(key, 40)}", depth + 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ChatFormatError(f"{where} is {escape(type(value).__name__)}; expected text, a number, a list or an object")


def _key(key: object, where: str) -> str:
    """Validate a field's name: templates may write it (a tool's arguments), so it must not spell control tokens."""
    if not isinstance(key, str) or not _FIELD_NAME.fullmatch(key):
        raise ChatFormatError(f"{where} has the key {show_value(key)}; expected letters, digits, spaces and _.:$@/-")
    return key


def map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with `change` applied to all texts, except field names and known type names.

    Templates compare types (`part.type == 'text'`, `schema.type == 'string'`), so these must stay unchanged.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key: item if key == "type" and _is_type(item) else map_text(item, change) for key, item in value.items()
        }
    return [map_text(item, change) for item in value] if isinstance(value, list) else value


def _is_type(value: Any) -> bool:
    """Return whether a value is a known type name of a part, a tool or a schema, or a list of them."""
    words = value if isinstance(value, list) else [value]
    return all(isinstance(word, str) and word in _TYPES for word in words)


class Spellings:
    """Finds spellings of control tokens in texts, and text that could become one."""

    def __init__(self, spellings: Mapping[str, int]) -> None:
        self._whole = list(spellings)
        self._heads = {text[:i] for text in spellings for i in range(1, len(text))}
        self._tails = {text[i:] for text in spellings for i in range(1, len(text))}
        self._longest = max(map(len, spellings), default=0)
        alternatives = "|".join(map(re.escape, spellings)) or "(?!)"
        self._begin = re.compile(f"(?={alternatives})(.)", re.DOTALL)
        ends = re.escape("".join({text[0] for text in spellings} | {text[-1] for text in spellings}))
        self._ends = re.compile(f"[{ends}]" if ends else "(?!)")

    def mark(self, text: str, mark: str) -> str:
        """Insert `mark` into every spelling in `text`, and into partial spellings at its edges."""
        body = text.strip()
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        if not body:
            return text
        begins = {match.start() for match in self._begin.finditer(body)}
        begins |= {i for i in range(max(0, len(body) - self._longest), len(body)) if body[i:] in self._heads}
        broken = "".join(c + mark if i in begins else c for i, c in enumerate(body)) if begins else body
        return left + (mark if self._may_continue(body) else "") + broken + right

    def _may_continue(self, body: str) -> bool:
        """Return whether a spelling that starts before the text could continue in it."""
        heads = (body[:i] for i in range(1, min(len(body), self._longest) + 1))
        inside = len(body) < self._longest and any(body in spelling[1:] for spelling in self._whole)
        return inside or any(head in self._tails for head in heads)

    def swap_ends(self, text: str, mark: str) -> str:
        """Replace the first and last characters of control tokens wherever they occur."""
        return self._ends.sub(mark, text)
