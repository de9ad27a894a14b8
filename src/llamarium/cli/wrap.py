"""An answer on a terminal: lines end between words, not at the terminal's edge."""

import shutil
import sys
import unicodedata
from collections.abc import Callable

from llamarium.cli.output import draws, printable, write_text

_FENCE = "```"
_TAB = 8  # columns


class Plain:
    """Writes every piece at once, as it is: into a pipe or a file."""

    def write(self, text: str) -> None:
        write_text(text)

    def finish(self) -> None:
        """There is nothing left."""


class Wrapped:
    """Writes whole words, and begins a new line before one that would cross the edge.

    A line of code (between lines that begin with ```) stays as it is: a break would be copied with it. Words of wide
    characters (Chinese, Japanese), which have no blanks between them, may end anywhere.
    """

    def __init__(self, columns: int, write: Callable[[str], None] = write_text) -> None:
        self._columns = columns - 1  # what is written in the last one makes some terminals begin a line of their own
        self._write = write
        self._column = 0
        self._blanks, self._word = "", ""
        self._line = ""  # the beginning of the line that the text has, for fences
        self._is_code = False

    def write(self, text: str) -> None:
        """Take a piece of any length; its last word stays back until it is complete."""
        ready = [part for character in printable(text) for part in self._take(character)]
        if ready:
            self._write("".join(ready))

    def finish(self) -> None:
        self._write("".join(self._end_word()))

    def _take(self, character: str) -> list[str]:
        if character == "\n":
            return self._end_line()
        self._line = (self._line + character)[: len(_FENCE)]
        if character in " \t":
            ready = self._end_word()
            self._blanks += character
            return ready
        self._word += character
        return self._end_word() if _width(character) == 2 else []

    def _end_line(self) -> list[str]:
        ready = [*self._end_word(), "\n"]
        if self._line == _FENCE:
            self._is_code = not self._is_code
        self._column, self._line = 0, ""
        return ready

    def _end_word(self) -> list[str]:
        blanks, word, self._blanks, self._word = self._blanks, self._word, "", ""
        for blank in blanks:
            self._column = self._column + 1 if blank == " " else (self._column // _TAB + 1) * _TAB
        width = sum(map(_width, word))
        crosses = word and self._column + width > self._columns and not self._is_code and self._line != _FENCE
        if crosses and self._column > len(blanks):  # something stands before it
            blanks, self._column = "\n", 0
        self._column += width
        return [blanks, word]


def writer() -> Plain | Wrapped:
    """Return what writes an answer to stdout."""
    return Wrapped(shutil.get_terminal_size().columns) if draws(sys.stdout) else Plain()


def _width(character: str) -> int:
    """Return the columns that a character takes: none if it is set upon the one before."""
    if unicodedata.combining(character) or character == "\u200d":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
