"""The file of answers: written line by line, so that whatever ends the process, what it holds whole is kept.

Answers come in the order in which they are complete. A run that goes on where another was ended reads which requests
are answered, and cuts off a last line that was not written to its end.
"""

import json
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, cast

from llamarium.errors import OutputError, escape
from llamarium.io import unwritable
from llamarium.leftovers import take
from llamarium.server.batch.lines import Line


@dataclass(slots=True)
class Kept:
    """What an earlier run has answered.

    Attributes:
        named: The answers' ids by the custom_id of their lines.
        nameless: Those of lines without one.
        num_failed: Those that are no success.
        models: Which have answered.
        end: Bytes of the file up to the end of its last whole line.
    """

    named: dict[str, str] = field(default_factory=dict[str, str])
    nameless: set[str] = field(default_factory=set[str])
    num_failed: int = 0
    models: set[str] = field(default_factory=set[str])
    end: int = 0

    @property
    def num_answers(self) -> int:
        """All of them."""
        return len(self.named) + len(self.nameless)

    def has(self, line: Line) -> bool:
        """Whether a line was answered."""
        return line.id in self.nameless if line.custom_id is None else line.custom_id in self.named


class Output(Protocol):
    """Where answers go; used in a `with`.

    Attributes:
        kept: What an earlier run has answered.
    """

    kept: Kept

    def begin(self) -> None:
        """Make room for the first answer: what was there before is cut off, but for what is kept."""
        ...

    def write(self, line: bytes) -> None:
        """Append an answer.

        Raises:
            OutputError: If it cannot be written.
        """
        ...

    def __enter__(self) -> Self:
        """Return this."""
        ...

    def __exit__(self, *_: object) -> None:
        """End."""
        ...


class StandardOutput:
    """Answers go to who reads on.

    Attributes:
        kept: Nothing.
    """

    def __init__(self) -> None:
        self.kept = Kept()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def write(self, line: bytes) -> None:
        """Write an answer at once."""
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


class OutputFile:
    """A file of answers, held for this process alone until it is closed.

    Args:
        path: The file; it is made if it is not there, and removed again if nothing is written into it.
        resumes: Keep the whole answers that are there.
        replaces: Answers that are there may be lost.

    Raises:
        OutputError: If there are answers and neither is said, if what is to be kept are none, or if the file cannot be
            written or is being written by another process.

    Attributes:
        kept: What an earlier run has answered.
    """

    def __init__(self, path: Path, *, resumes: bool = False, replaces: bool = False) -> None:
        self._path, self._is_new = path, not path.exists()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            self._size = self._check(resumes, replaces)
            self.kept = self._read() if resumes else Kept()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _check(self, resumes: bool, replaces: bool) -> int:
        """Return how many bytes it has."""
        if not take(self._descriptor):
            raise OutputError(f"{escape(self._path)}: is being written by another process; choose another file")
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            if resumes:
                raise OutputError(f"{escape(self._path)}: is no regular file, so there is nothing to resume")
            return 0
        if status.st_size and not (resumes or replaces):
            raise OutputError(
                f"{escape(self._path)}: is there already; --resume asks what it does not answer yet, --force replaces "
                "it"
            )
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
        """Cut off what is not kept."""
        try:
            if self._size > self.kept.end:
                os.ftruncate(self._descriptor, self.kept.end)
        except OSError as error:
            raise unwritable(self._path, error) from None

    def write(self, line: bytes) -> None:
        """Append an answer.

        Raises:
            OutputError: If it cannot be written; what was written of it is cut off when a run goes on.
        """
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise unwritable(self._path, error) from None

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all is on the disk, and give the file back."""
        with suppress(OSError):  # a pipe or a device has no disk
            os.fsync(self._descriptor)
        if self._is_new and os.fstat(self._descriptor).st_size == 0:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _keep(kept: Kept, line: bytes, where: str) -> None:
    """Note an answer.

    Raises:
        OutputError: If the line is none.
    """
    try:
        value = json.loads(line)
        name, found_id, response = value["custom_id"], value["id"], value["response"]
        status = None if response is None else response["status_code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        name = found_id = response = status = None
    if not isinstance(found_id, str) or not isinstance(name, str | None):
        raise OutputError(f"{where}: is no answer of a batch, so there is nothing to resume; --force replaces the file")
    if name is None:
        kept.nameless.add(found_id)
    elif name in kept.named:
        raise OutputError(f"{where}: custom_id {escape(name)} is answered twice; remove one of both lines")
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
