"""Incremental text input for parsers written as coroutines.

A parser is a generator that yields whenever it needs more text, and otherwise reads as if the whole text were there. So
its result cannot depend on how the text is split into pieces.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A coroutine that yields when it needs more text, and returns its result."""

_BLANK = re.compile(r"[ \t\r\n]*")


class Source:
    """The text that has arrived but has not been read; `has_ended` means that no more will arrive."""

    def __init__(self) -> None:
        self.has_ended = False
        self._text = ""
        self._at = 0
        self._held: list[str] = []

    def push(self, text: str) -> None:
        """Add a piece of text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._text):
            if self.has_ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int = 1) -> str:
        """Read `count` characters, which must have arrived."""
        return self._take_to(self._at + count)

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches in the text that has arrived; the match may be empty, and may continue in later text."""
        match = pattern.match(self._text, self._at)
        return self._take_to(match.end()) if match else ""

    def take_until(self, character: str) -> str:
        """Read the text that has arrived, up to a character."""
        place = self._text.find(character, self._at)
        return self._take_to(len(self._text) if place < 0 else place)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read a run of characters to its end; `pattern` is a character class with a `*`."""
        pieces: list[str] = []
        while (yield from self.peek()):
            piece = self.take_run(pattern)
            if not piece:
                break
            pieces.append(piece)
        return "".join(pieces)

    def blanks(self) -> Reading[str]:
        """Read white space."""
        return self.run(_BLANK)

    def accept(self, *literals: str) -> Reading[str]:
        """Read one of the literals, none of which may be a prefix of another; if none is next, read nothing."""
        seen = ""
        while True:
            if seen in literals:
                return seen
            character = yield from self.peek()
            if not character or not any(literal.startswith(seen + character) for literal in literals):
                self.put_back(len(seen))
                return ""
            seen += self.take()

    def put_back(self, count: int) -> None:
        """Unread the last `count` characters, which must be whole pieces as they were read."""
        pieces: list[str] = []
        while count > 0:
            pieces.append(self._held.pop())
            count -= len(pieces[-1])
        assert count == 0, "only whole pieces can be put back"
        if pieces:
            self._text = "".join(reversed(pieces)) + self._text[self._at :]
            self._at = 0

    def held(self) -> str:
        """Return what has been read since the last `settle`."""
        return "".join(self._held)

    def settle(self) -> None:
        """Discard what has been read, which can no longer be put back."""
        self._held = []

    def _take_to(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if piece:
            self._held.append(piece)
        return piece
