"""Parse JSON or Python values incrementally and emit them as JSON.

Emitted text is final. A bracket, comma or key is held back until the value after it has started, so that an error
before that is noticed in time.
"""

import json
import math
import re
from collections.abc import Callable
from typing import NoReturn

from llamarium.tokenizer.tools.definition import MAX_DEPTH
from llamarium.tokenizer.tools.source import Reading, Source


class NotACall(Exception):
    """The text is not a call, or not a valid one from here on."""


class Dialect:
    """The differences between JSON and Python values; `digits` is the number of hex digits of each escape letter."""

    def __init__(self, *, is_python: bool) -> None:
        self.is_python = is_python
        self.quotes = "\"'" if is_python else '"'
        self.constants = {"True": "true", "False": "false", "None": "null"} if is_python else {}
        self.constants |= {"true": "true", "false": "false", "null": "null"}
        self.may_end_with_comma = is_python
        self.number = _PYTHON_NUMBER if is_python else _JSON_NUMBER
        self.escapes = _PYTHON_ESCAPES if is_python else _JSON_ESCAPES
        self.digits = {"x": 2, "u": 4, "U": 8} if is_python else {"u": 4}


_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_WHOLE = r"(?:0(?:_?0)*|[1-9](?:_?\d)*)"
_DIGITS = r"\d(?:_?\d)*"
_PYTHON_NUMBER = re.compile(
    rf"[+-]?(?:{_WHOLE}|(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?{_DIGITS})?|{_DIGITS}[eE][+-]?{_DIGITS})",
    re.ASCII,
)
_JSON_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PYTHON_ESCAPES = {"'": "'", '"': '"', "\\": "\\", "\n": "", **dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True))}
_OCTAL, _HEX = re.compile("[0-7]{1,3}"), re.compile("[0-9a-fA-F]*")
_SCALAR = re.compile(r"[\w.+-]*", re.ASCII)
_MAX_SCALAR = 4096  # characters of a number
_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
JSON, PYTHON = Dialect(is_python=False), Dialect(is_python=True)


class ValueReader:
    """Parses values of one dialect and emits them as JSON."""

    def __init__(self, source: Source, dialect: Dialect, write: Callable[[str], None]) -> None:
        """Read from `source`; `write` is called with fragments, each of which starts or ends a value."""
        self._source = source
        self._dialect = dialect
        self._write = write
        self._pending = ""

    def fail(self) -> NoReturn:
        """Raise NotACall."""
        raise NotACall

    def later(self, text: str) -> None:
        """Emit `text` together with the next value."""
        self._pending += text

    def now(self, text: str) -> None:
        """Emit `text`, after what was held back."""
        pending, self._pending = self._pending, ""
        self._write(pending + text)

    def expect(self, *characters: str) -> Reading[str]:
        """Read white space and one of some characters."""
        yield from self._source.blanks()
        character = yield from self._source.accept(*characters)
        return character or self.fail()

    def value(self, depth: int = 0) -> Reading[None]:
        """Read any value."""
        yield from self._source.blanks()
        character = yield from self._source.peek()
        if not character or depth > MAX_DEPTH:
            self.fail()
        elif character in self._dialect.quotes:
            yield from self._text(self.now)
        elif character == "{":
            yield from self.object(depth)
        elif character == "[":
            yield from self._list(depth)
        else:
            yield from self._scalar()

    def object(self, depth: int = 0) -> Reading[None]:
        """Read an object, whose keys must be distinct strings."""
        yield from self.expect("{")
        self.later("{")
        keys: set[str] = set()
        while not (yield from self.is_at_end("}", bool(keys))):
            self.later(", " if keys else "")
            written = yield from self.text()
            if (key := json.loads(written)) in keys:
                self.fail()
            keys.add(key)
            yield from self.expect(":")
            self.later(f"{written}: ")
            yield from self.value(depth + 1)
        self.now("}")

    def text(self) -> Reading[str]:
        """Read a whole string and return it as JSON."""
        yield from self._source.blanks()
        if (yield from self._source.peek()) not in set(self._dialect.quotes):
            self.fail()
        pieces: list[str] = []
        yield from self._text(pieces.append)
        return "".join(pieces)

    def _list(self, depth: int) -> Reading[None]:
        yield from self.expect("[")
        self.later("[")
        has_items = False
        while not (yield from self.is_at_end("]", has_items)):
            self.later(", " if has_items else "")
            yield from self.value(depth + 1)
            has_items = True
        self.now("]")

    def is_at_end(self, end: str, has_items: bool) -> Reading[bool]:
        """Read the end of a list, or the comma before its next item; return whether it ended."""
        end_found = ""
        if has_items and (yield from self.expect(",", end)) == end:
            return True
        if not has_items or self._dialect.may_end_with_comma:
            yield from self._source.blanks()
            end_found = yield from self._source.accept(end)
        return bool(end_found)

    def _scalar(self) -> Reading[None]:
        word = yield from self._source.run(_SCALAR)
        if constant := self._dialect.constants.get(word):
            self.now(constant)
            return
        if len(word) > _MAX_SCALAR or not self._dialect.number.fullmatch(word):
            self.fail()
        number = _json_number(word)
        if math.isinf(float(number)):
            self.fail()
        self.now(number)

    def _text(self, write: Callable[[str], None]) -> Reading[None]:
        """Read a quoted string and emit it as JSON piece by piece."""
        quote = self._source.take()
        end = quote
        if self._dialect.is_python and (yield from self._source.accept(quote)):
            if not (yield from self._source.accept(quote)):
                write('""')
                return
            end = quote * 3
        write('"')
        while not (yield from self._source.accept(end)):
            yield from self._text_piece(quote, write)
        write('"')

    def _text_piece(self, quote: str, write: Callable[[str], None]) -> Reading[None]:
        character = yield from self._source.peek()
        if not character:
            self.fail()
        if character == "\\":
            write((yield from self._escape()))
        else:
            write(in_json(self._source.take_run(_PLAIN[quote]) or self._source.take()))

    def _escape(self) -> Reading[str]:
        r"""Read an escape: `\n`, `\u00e4`, in Python also `\x41`, `\101`, and `\d`, which stays as it is."""
        source, dialect = self._source, self._dialect
        source.take()
        letter = yield from source.peek()
        if letter in dialect.digits:
            source.take()
            return (yield from self._character(dialect.digits[letter]))
        if letter in dialect.escapes:
            return in_json(dialect.escapes[source.take()])
        if not dialect.is_python or letter in ("", "N"):
            self.fail()
        if letter in set("01234567"):
            return (yield from self._octal())
        return in_json("\\")

    def _octal(self) -> Reading[str]:
        digits = ""
        while len(digits) < 3 and (yield from self._source.peek()) in set("01234567"):
            digits += self._source.take()
        return in_json(chr(int(digits, 8)))

    def _character(self, count: int) -> Reading[str]:
        """Read `count` hexadecimal digits and return their character, with surrogates escaped."""
        digits = ""
        while len(digits) < count:
            if (yield from self._source.peek()) not in set("0123456789abcdefABCDEF"):
                self.fail()
            digits += self._source.take()
        code = int(digits, 16)
        if code > 0x10FFFF:
            self.fail()
        return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else in_json(chr(code))


def in_json(text: str) -> str:
    """Return a text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_number(word: str) -> str:
    """Return a number in JSON syntax: no plus sign, no underscores, digits on both sides of the point."""
    sign = "-" if word.startswith("-") else ""
    digits, mark, exponent = word.lstrip("+-").replace("_", "").lower().partition("e")
    whole, point, fraction = digits.partition(".")
    return f"{sign}{whole.lstrip('0') or '0'}{point and '.' + (fraction or '0')}{mark}{exponent}"
