"""The output of a batch: a line per answer, in order of completion, written immediately so that a crash loses nothing.

A resumed run reads which requests are answered, and cuts off an incomplete last line.
"""

import json
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from llamarium.errors import OutputError, escape
from llamarium.io import unwritable
from llamarium.leftovers import take
from llamarium.server.batch.lines import Line
from llamarium.system import open_file, remove_open


@dataclass(slots=True)
class Kept:
    """The answers of an earlier run.

    Attributes:
        named: Ids of answers by custom_id.
        nameless: Ids of answers to lines without custom_id.
        num_failed: Number of answers that are errors.
        models: Names of the models in the answers.
        end: Offset of the end of the last complete line, in bytes.
    """

    named: dict[str, str] = field(default_factory=dict[str, str])
    nameless: set[str] = field(default_factory=set[str])
    num_failed: int = 0
    models: set[str] = field(default_factory=set[str])
    end: int = 0

    @property
    def num_answers(self) -> int:
        """Number of answers."""
        return len(self.named) + len(self.nameless)

    def has(self, line: Line) -> bool:
        """Whether a line was answered."""
        return line.id in self.nameless if line.custom_id is None else line.custom_id in self.named


class Output:
    """The output of a batch, as a context manager. This class writes to standard output.

    Attributes:
        kept: Answers of the earlier run.
    """

    def __init__(self) -> None:
        self.kept = Kept()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the output."""

    def begin(self) -> None:
        """Prepare for the first answer by removing previous content that is not kept."""

    def write(self, line: bytes) -> None:
        """Append an answer and flush it."""
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


class OutputFile(Output):
    """A file of answers, locked by this process until it is closed.

    Args:
        path: The file; a new file is removed again if nothing is written.
        resumes: Whether to keep the file's complete answers.
        replaces: Whether the file's answers may be overwritten.

    Raises:
        OutputError: If the file cannot be written, is in use, exists although neither option is set, or cannot be
            resumed.
    """

    def __init__(self, path: Path, *, resumes: bool = False, replaces: bool = False) -> None:
        super().__init__()
        self._path, self._is_new = path, not path.exists()
        try:
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            self._size = self._check(resumes, replaces)
            self.kept = self._read() if resumes else self.kept
        except BaseException:
            os.close(self._descriptor)
            raise

    def _check(self, resumes: bool, replaces: bool) -> int:
        """Lock and validate the file, and return its size in bytes."""
        if not take(self._descriptor):
            raise OutputError(f"{escape(self._path)}: is being written by another process; choose another file")
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            if resumes:
                raise OutputError(f"{escape(self._path)}: is not a regular file, so the run cannot be resumed")
            return 0
        if status.st_size and not (resumes or replaces):
            advice = "use --resume to run the remaining requests, or --force to replace it"
            raise OutputError(f"{escape(self._path)}: already exists; {advice}")
        return status.st_size

    def _read(self) -> Kept:
        kept = Kept()
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                _keep(kept, line, f"{escape(self._path)}, line {number}")
                kept.end += len(line)
        return kept

    def begin(self) -> None:
        """Cut off content after the kept answers."""
        try:
            if self._size > self.kept.end:
                os.ftruncate(self._descriptor, self.kept.end)
        except OSError as error:
            raise unwritable(self._path, error) from None

    def write(self, line: bytes) -> None:
        """Append an answer; if the process ends midway, a resumed run cuts off the incomplete line."""
        unwritten = memoryview(line)
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._descriptor, unwritten) :]
        except OSError as error:
            raise unwritable(self._path, error) from None

    def __exit__(self, *_: object) -> None:
        """Flush the file to disk and close it."""
        with suppress(OSError):  # pipes and devices cannot be synced
            os.fsync(self._descriptor)
        if self._is_new and os.fstat(self._descriptor).st_size == 0:
            remove_open(self._path, self._descriptor)
        else:
            os.close(self._descriptor)


def _keep(kept: Kept, line: bytes, where: str) -> None:
    """Add a line's answer to `kept`; OutputError if the line is not a batch result."""
    try:
        value = json.loads(line)
        name, found_id, response = value["custom_id"], value["id"], value["response"]
        status = None if response is None else response["status_code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        name = found_id = response = status = None
    if not isinstance(found_id, str) or not isinstance(name, str | None):
        reason = "is not a batch result, so the run cannot be resumed"
        raise OutputError(f"{where}: {reason}; use --force to replace the file")
    if name is None:
        kept.nameless.add(found_id)
    elif name in kept.named:
        raise OutputError(f"{where}: custom_id {escape(name)} appears twice; remove one of the two lines")
    else:
        kept.named[name] = found_id
    kept.num_failed += status != 200
    model = _model(response)
    if model is not None:
        kept.models.add(model)


def _model(response: Any) -> str | None:
    body = response.get("body") if isinstance(response, Mapping) else None
    model = cast(Mapping[str, Any], body).get("model") if isinstance(body, Mapping) else None
    return model if isinstance(model, str) else None
