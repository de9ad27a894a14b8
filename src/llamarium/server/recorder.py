"""Records answers for `llamarium replay`, line by line, in a file that only its owner can read."""

import errno
import os
import stat
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.errors import OptionError, escape
from llamarium.generation.record import RecordedStart, prompt_line, shape_of, start_line
from llamarium.system import hide_from_others, open_file, read_at

if TYPE_CHECKING:
    from llamarium.generation.answers import Answers
    from llamarium.generation.text_engine import TextEngine
    from llamarium.generation.text_model import TextModel

MAX_BYTES = 2**30
"""Default maximum size of a record: about 150 million tokens."""

_BEGINNING = b'{"llamarium_record":'


class _RecordFullError(Exception):
    """A line would exceed the record's maximum size."""


class Recorder:
    """Appends answers to a record file.

    Recording stops before the first line that would exceed `max_bytes`. If the disk is full, lines are lost, but
    clients still get their answers.

    Args:
        file: The record; created if it does not exist.
        max_bytes: Maximum size of the record.

    Attributes:
        is_full: Whether recording has stopped because of `max_bytes`.

    Raises:
        OptionError: If the file cannot be written or is not a record.
    """

    def __init__(self, file: Path, max_bytes: int = MAX_BYTES) -> None:
        self._lock, self._has_start = threading.Lock(), False
        self._max_bytes, self.is_full = max_bytes, False
        try:
            self._descriptor = open_file(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600, waits=False)
            weakref.finalize(self, os.close, self._descriptor)
            status = os.fstat(self._descriptor)
            beginning = read_at(self._descriptor, len(_BEGINNING), 0) if stat.S_ISREG(status.st_mode) else None
            if beginning not in (b"", _BEGINNING):
                raise OptionError(f"{escape(file)}: is not a record of earlier answers; name another file (--record)")
            hide_from_others(self._descriptor)
        except OSError as error:
            why = escape(error.strerror)
            raise OptionError(f"{escape(file)}: cannot record answers: {why}; name another file (--record)") from None
        self._ends_line = status.st_size == 0 or read_at(self._descriptor, 1, status.st_size - 1) == b"\n"

    def write(self, name: str, answers: "Answers", model: "TextModel", engine: "TextEngine") -> str:
        """Append a prompt and its answers.

        Args:
            name: The request's id.
            answers: The prompt's answers.
            model: The served model.
            engine: The model's engine.

        Returns:
            An error message if the line could not be written, else "".
        """
        if self.is_full or (line := prompt_line(name, answers)) is None:
            return ""
        with self._lock:
            try:
                if not self._has_start:
                    shape, runner = shape_of(model.config), engine.runner.name
                    self._append(start_line(RecordedStart(shape, runner, engine.kv_cache_dtype)))
                    self._has_start = True
                self._append(line)
            except _RecordFullError:
                self.is_full = True
            except OSError as error:
                return error.strerror or "unknown"
        return ""

    def _append(self, line: bytes) -> None:
        data = line if self._ends_line else b"\n" + line
        if os.fstat(self._descriptor).st_size + len(data) > self._max_bytes:
            raise _RecordFullError
        written = os.write(self._descriptor, data)
        self._ends_line = written == len(data)
        if not self._ends_line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
