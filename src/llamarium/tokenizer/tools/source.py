"""Text that comes in pieces, read character by character by a coroutine.

What reads is written as if the text were there: a generator that yields where it must wait for more. So the pieces in
which a text comes cannot change what is read.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A piece of reading: yields when it needs more text, returns what it found."""

_BLANK = re.compile(r"[ \t\r\n]*")


class Source:
    """What has come and is not read yet; `has_ended` says that no more will come."""

    def __init__(self) -> None:
        self.has_ended = False
        self._text = ""
        self._at = 0
        self._held: list[str] = []

    def push(self, text: str) -> None:
        """Add a piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def peek(self) -> Reading[str]:
        """Return the next character, which stays; "" at the end."""
        while self._at == len(self._text):
            if self.has_ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int = 1) -> str:
        """Read characters that are there."""
        return self._take_to(self._at + count)

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read what matches of the text that is there, which may be nothing, and may go on in what comes."""
        found = pattern.match(self._text, self._at)
        return self._take_to(found.end()) if found else ""

    def take_until(self, character: str) -> str:
        """Read what there is before a character."""
        place = self._text.find(character, self._at)
        return self._take_to(len(self._text) if place < 0 else place)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read a run of characters to its end; `pattern` is a class of characters with a `*`."""
        found: list[str] = []
        while (yield from self.peek()):
            piece = self.take_run(pattern)
            if not piece:
                break
            found.append(piece)
        return "".join(found)

    def blanks(self) -> Reading[str]:
        """Read white space."""
        return self.run(_BLANK)

    def accept(self, *literals: str) -> Reading[str]:
        """Read one of some literals, none of which begins another; "" if none is there, and then nothing is read."""
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
        """Take back the last `count` characters that were read: whole pieces, as they were taken."""
        taken: list[str] = []
        while count > 0:
            taken.append(self._held.pop())
            count -= len(taken[-1])
        assert count == 0, "a piece that was read as one is put back as one"
        if taken:
            self._text = "".join(reversed(taken)) + self._text[self._at :]
            self._at = 0

    def held(self) -> str:
        """Return what has been read since `settle`."""
        return "".join(self._held)

    def settle(self) -> None:
        """What has been read will not be put back."""
        self._held = []

    def _take_to(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if piece:
            self._held.append(piece)
        return piece
