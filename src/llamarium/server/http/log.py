"""What is written down: one line for each request and for what happens to the server, on stderr.

A line holds no key, no text of a prompt or an answer and no path of this machine, and what a client sent is escaped, so
that no line can be forged.
"""

import json
import os
import sys
import time
from contextlib import suppress
from typing import Any, Literal

from llamarium.errors import escape

_CLEAR_LINE = "\r\x1b[K"


class Log:
    """Writes lines, and on a terminal shows beneath them what is going on.

    Args:
        form: "text" for people, "json" for programs.
    """

    def __init__(self, form: Literal["text", "json"]) -> None:
        self._form = form
        self._status = ""

    @property
    def shows_status(self) -> bool:
        """Whether there is a terminal for a line that changes."""
        return self._form == "text" and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def event(self, text: str, **fields: Any) -> None:
        """Write that something happened to the server."""
        self._write({"event": text} | fields, " ".join([text, *_spelled(fields)]))

    def request(self, fields: dict[str, Any]) -> None:
        """Write that a request has ended."""
        shown = {name: escape(value, 200) if isinstance(value, str) else value for name, value in fields.items()}
        head = f"{shown.pop('client')} {shown.pop('method')} {shown.pop('path')} {shown.pop('status')}"
        self._write({"event": "request"} | fields, " ".join([head, *_spelled(shown)]))

    def status(self, text: str) -> None:
        """Show a line in place of the one before; an empty one takes it away."""
        if text != self._status:
            _say(_CLEAR_LINE + text)
            self._status = text

    def _write(self, fields: dict[str, Any], text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = f"{stamp} {text}" if self._form == "text" else json.dumps({"time": stamp} | fields)
        _say(f"{_CLEAR_LINE}{line}\n{self._status}" if self._status else f"{line}\n")


def _say(text: str) -> None:
    """Write to stderr as long as that is possible: who reads it may leave, its disk may be full; the server goes on."""
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _spelled(fields: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in fields.items() if value is not None]
