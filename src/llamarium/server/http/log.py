"""The log on stderr: one line for each request, and for each event of the server.

A line holds no key, no text of a prompt or an answer and no path of this machine. What a client sent is escaped, and
the names that the operator gave: lines cannot be forged.
"""

import json
import os
import shutil
import sys
import textwrap
import time
from contextlib import suppress
from typing import Any, Literal

from llamarium.errors import escape

_CLEAR_LINE = "\r\x1b[K"


class Log:
    """Writes lines as "text" or "json", and on a terminal a status line beneath them."""

    def __init__(self, form: Literal["text", "json"]) -> None:
        self._form = form
        self._status = ""

    @property
    def shows_status(self) -> bool:
        """Whether stderr is a terminal that can show a status line."""
        return self._form == "text" and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def event(self, text: str, **fields: Any) -> None:
        """Log an event of the server."""
        self._write({"event": text} | fields, escape(_line(text, fields), 2000))

    def request(self, fields: dict[str, Any]) -> None:
        """Log the end of a request."""
        shown = {name: escape(value, 200) if isinstance(value, str) else value for name, value in fields.items()}
        head = f"{shown.pop('client')} {shown.pop('method')} {shown.pop('path')} {shown.pop('status')}"
        self._write({"event": "request"} | fields, _line(head, shown))

    def status(self, text: str) -> None:
        """Replace the status line; an empty text removes it."""
        if text != self._status:
            _write_all(_CLEAR_LINE + text)
            self._status = text

    def _write(self, fields: dict[str, Any], text: str) -> None:
        now = time.time()
        day, clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)).split()
        stamp = f"{day}T{clock}.{int(now % 1 * 1000):03d}Z"
        line = f"{stamp} {text}" if self._form == "text" else json.dumps({"time": stamp} | fields)
        if self.shows_status:  # a terminal's lines: without the date; they break between words, never within an address
            line = textwrap.fill(
                f"{clock} {text}", max(40, shutil.get_terminal_size().columns - 1),
                subsequent_indent=" " * len(f"{clock} "), break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
        _write_all(f"{_CLEAR_LINE}{line}\n{self._status}" if self._status else f"{line}\n")


def _write_all(text: str) -> None:
    """Write to stderr; if it is closed or its disk is full, the server goes on."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _line(text: str, fields: dict[str, Any]) -> str:
    return " ".join([text, *(f"{name}={value}" for name, value in fields.items() if value is not None)])
