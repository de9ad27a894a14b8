"""A process that computes for this one, and whatever it may do: raise, hang, crash, end. Never torch.

It ends with this process, however that ends: its standard input is a pipe, and the system signals it when the other
end is closed.
"""

import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from llamarium.errors import FunctionError, escape
from llamarium.kernels.threads import num_threads
from llamarium.kernels.turns import pause
from llamarium.runtime.process.cache import unnamed_file
from llamarium.runtime.process.frames import read_header, read_into, send

BEGIN_S = 60.0
"""How long the process may take until it begins: it loads a model and a folder's code."""

STEP_S, TOKEN_S = 60.0, 1.0
"""How long a request may take, and how much longer for each token: functions of plain loops are slow, and welcome."""


@dataclass(slots=True)
class EndedError(Exception):
    """A process gave no answer, and was ended.

    Attributes:
        code: Its exit code, None if it went on.
        is_late: Whether its time was over.
        place: What it had noted last, -1 for nothing.
        said: The end of what it wrote to standard error.
    """

    code: int | None
    is_late: bool
    place: int
    said: str

    def words(self) -> str:
        """Say how the process ended."""
        if self.code is None:
            return "answers what it may not"
        if self.code == -signal.SIGKILL:
            return "was ended from outside, for the memory that it took, say"
        if self.code < 0:
            return f"crashes the process ({signal.Signals(-self.code).name})"
        last = "".join(f"; {escape(line)}" for line in self.said.strip().splitlines()[-1:])
        return f"ends the process (exit code {self.code}{last})"


class Process:
    """What runs, the connection to it, and the file of what it writes to standard error; ended with this object.

    Args:
        command: What to start; appended are the number of its end of the connection, and that of a file of 8 bytes, in
            which it notes where it computes, -1 for nowhere.
        num_threads: Of its products.
    """

    def __init__(self, command: Sequence[str], num_threads: int) -> None:
        self._channel, theirs = socket.socketpair()
        self._place = place = unnamed_file()
        os.write(place, (-1).to_bytes(8, "little", signed=True))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
        with theirs:
            passed = theirs.fileno(), place
            self.popen = subprocess.Popen(
                [*command, *map(str, passed)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said,
                pass_fds=passed, start_new_session=True, env=os.environ | threads,
            )  # fmt: skip
        self.end = weakref.finalize(self, _end, self.popen, self._channel, self._said, place)

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return self.end.alive and self.popen.poll() is None

    def begin(self) -> dict[str, Any]:
        """Return what it says once it has begun; with an "error" it has ended. EndedError as of `ask`."""
        with self._watched():
            answer = read_header(self._channel, time.monotonic() + BEGIN_S)
        if "error" in answer:
            self.end()
        return answer

    def ask(
        self,
        header: Mapping[str, Any],
        limit_s: float,
        arrays: Sequence[NDArray[Any]] = (),
        answers: Sequence[NDArray[Any]] = (),
        descriptor: int | None = None,
    ) -> dict[str, Any]:
        """Send a request, fill `answers` unless it is answered by an "error", and return the answer's header.

        EndedError if there is no answer in time; the process has been ended.
        """
        with self._watched():
            deadline = time.monotonic() + limit_s
            self._channel.settimeout(limit_s)
            send(self._channel, header, arrays, descriptor)
            answer = read_header(self._channel, deadline)
            for array in () if "error" in answer else answers:
                read_into(self._channel, array, deadline)
        return answer

    @contextmanager
    def _watched(self) -> Generator[None]:
        """End the process if an exchange fails: its answer may still come, and would be taken for the next one's."""
        try:
            yield
        except TimeoutError:
            raise self._ended(is_late=True) from None
        except (OSError, EOFError, ValueError, RecursionError):
            raise self._ended(is_late=False) from None
        except BaseException:  # Ctrl-C, say
            self.end()
            raise

    def _ended(self, *, is_late: bool) -> EndedError:
        """End it and return what is known of it; one that is running says first where it is."""
        if is_late:
            self.popen.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(1)
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - (1 << 16)))
        place = int.from_bytes(os.pread(self._place, 8, 0), "little", signed=True)
        ended = EndedError(self.popen.poll(), is_late, place, self._said.read().decode("utf-8", "replace"))
        self.end()
        return ended


def _end(popen: subprocess.Popen[bytes], channel: socket.socket, said: IO[bytes], place: int) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
    assert popen.stdin is not None
    for file in (popen.stdin, channel, said):
        file.close()
    os.close(place)


class Child:
    """A process that answers requests, one at a time; started anew after one that failed.

    Args:
        command: As of `Process`; it notes the layer that it computes.
        folder: Whose code it runs: errors name lines of files in it.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        self._lock = threading.Lock()
        self._process: Process | None = None

    def start(self) -> None:
        """Start the process; FunctionError if it cannot begin."""
        with self._lock:
            self._running()

    def ask(
        self,
        header: Mapping[str, Any],
        arrays: Sequence[NDArray[Any]] = (),
        answers: Sequence[NDArray[Any]] = (),
        descriptor: int | None = None,
        *,
        num_tokens: int = 0,
    ) -> None:
        """Send a request and fill `answers` with what comes back.

        FunctionError says what was done instead of answering; the next request works again.
        """
        limit_s = STEP_S + TOKEN_S * num_tokens
        pause()
        with self._lock:
            process = self._running()
            asked = partial(process.ask, header, limit_s, arrays, answers, descriptor)
            self._exchange(asked, f"does not end within {limit_s:.0f} s")

    def _running(self) -> Process:
        """Return the process, started if there is none that runs."""
        if self._process is not None and self._process.is_running:
            return self._process
        if self._process is not None:
            self._process.end()
        self._process = Process(self._command, num_threads())
        self._exchange(self._process.begin, f"does not begin within {BEGIN_S:.0f} s")
        return self._process

    def _exchange(self, asked: Callable[[], Mapping[str, Any]], too_late: str) -> None:
        """Make a FunctionError of what was done instead of answering, and where, as far as that is known."""
        name = escape(self._folder.name)
        try:
            answer = asked()
        except EndedError as ended:
            place = f"layer {ended.place}, " if ended.place >= 0 else ""
            found = re.search(rf'{re.escape(self._folder.name)}/([^/"]+)", line (\d+)', ended.said)
            place += f"{escape(found[1])}, line {found[2]}: " if found else ""
            raise FunctionError(f"{name}: {place}{too_late if ended.is_late else ended.words()}") from None
        if "error" in answer:
            raise FunctionError(f"{name}: {escape(answer['error'], 500)}")
