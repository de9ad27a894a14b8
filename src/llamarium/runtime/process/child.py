"""A worker process, and the handling of everything that it may do: raise, hang, crash or exit. Torch-free.

It ends with this process in any case: its standard input is a pipe, which the system closes when this process ends.
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
from llamarium.kernels.step_priority import pause
from llamarium.kernels.threads import num_threads
from llamarium.runtime.process.cache import unnamed_file
from llamarium.runtime.process.frames import read_header, read_into, send

BEGIN_S = 60.0
"""Time limit for starting the process, which loads a model and a directory's code."""

STEP_S, TOKEN_S = 60.0, 1.0
"""Time limit of a request, plus so much per token. Generous, because plain Python loops are slow but allowed."""


@dataclass(slots=True)
class EndedError(Exception):
    """The worker process did not answer, and was ended.

    Attributes:
        code: Its exit code, None if it was still running.
        is_late: Whether it exceeded its time limit.
        layer: The layer that it was computing, -1 for none.
        stderr: The end of its standard error.
    """

    code: int | None
    is_late: bool
    layer: int
    stderr: str

    def words(self) -> str:
        """Describe how the process ended, as the predicate of a sentence about the learner's code."""
        if self.code is None:
            return "sends an invalid answer"
        if self.code == -signal.SIGKILL:
            return "was killed from outside, possibly because it used too much memory"
        if self.code < 0:
            return f"crashes the process ({signal.Signals(-self.code).name})"
        last_line = "".join(f"; {escape(line)}" for line in self.stderr.strip().splitlines()[-1:])
        return f"ends the process (exit code {self.code}{last_line})"


class Process:
    """A running worker process with its connection and its standard error; ended with this object.

    Args:
        command: The command; two descriptors are appended as arguments: its end of the connection, and a file of 8
            bytes in which it writes the layer that it is computing, -1 for none.
        num_threads: Threads of its matrix products.
    """

    def __init__(self, command: Sequence[str], num_threads: int) -> None:
        self._channel, other_end = socket.socketpair()
        self._layer_file = layer_file = unnamed_file()
        os.write(layer_file, (-1).to_bytes(8, "little", signed=True))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))
        with other_end:
            descriptors = other_end.fileno(), layer_file
            self.popen = subprocess.Popen(
                [*command, *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=descriptors,
                start_new_session=True,
                env=os.environ | threads,
            )
        self.end = weakref.finalize(self, _end, self.popen, self._channel, self._stderr, layer_file)

    @property
    def is_running(self) -> bool:
        """Whether it accepts requests."""
        return self.end.alive and self.popen.poll() is None

    def begin(self) -> dict[str, Any]:
        """Return its first message once it has started; one with an "error" means that it has ended.

        Raises:
            EndedError: As `ask`.
        """
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
        """Send a request, fill `answers` unless the reply is an "error", and return the reply's header.

        Raises:
            EndedError: If there is no reply in time; the process has been ended.
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
        """End the process if an exchange fails: a late reply would be taken for that of the next request."""
        try:
            yield
        except TimeoutError:
            raise self._ended(is_late=True) from None
        except (OSError, EOFError, ValueError, RecursionError):
            raise self._ended(is_late=False) from None
        except BaseException:  # such as Ctrl-C
            self.end()
            raise

    def _ended(self, *, is_late: bool) -> EndedError:
        """End the process and return the error that describes it."""
        if is_late:
            self.popen.send_signal(signal.SIGABRT)  # makes it write a traceback to standard error
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(1)
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - (1 << 16)))
        layer = int.from_bytes(os.pread(self._layer_file, 8, 0), "little", signed=True)
        ended = EndedError(self.popen.poll(), is_late, layer, self._stderr.read().decode("utf-8", "replace"))
        self.end()
        return ended


def _end(popen: subprocess.Popen[bytes], channel: socket.socket, stderr: IO[bytes], layer_file: int) -> None:
    """Kill a process and everything that it started, and close its files."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
    assert popen.stdin is not None
    for file in (popen.stdin, channel, stderr):
        file.close()
    os.close(layer_file)


class Child:
    """A worker process that answers requests one at a time, and is restarted after a failure.

    Args:
        command: As in `Process`.
        folder: Directory of the code that it runs; errors name lines of its files.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        self._lock = threading.Lock()
        self._process: Process | None = None

    def start(self) -> None:
        """Start the process; FunctionError if it fails to start."""
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
        """Send a request and fill `answers` with the reply.

        Raises:
            FunctionError: If there is no valid reply, with the reason; the next request uses a new process.
        """
        limit_s = STEP_S + TOKEN_S * num_tokens
        pause()
        with self._lock:
            process = self._running()
            exchange = partial(process.ask, header, limit_s, arrays, answers, descriptor)
            self._exchange(exchange, f"does not end within {limit_s:.0f} s")

    def _running(self) -> Process:
        """Return the running process, starting one if necessary."""
        if self._process is not None and self._process.is_running:
            return self._process
        if self._process is not None:
            self._process.end()
        self._process = Process(self._command, num_threads())
        self._exchange(self._process.begin, f"does not start within {BEGIN_S:.0f} s")
        return self._process

    def _exchange(self, exchange: Callable[[], Mapping[str, Any]], too_late: str) -> None:
        """Run an exchange; FunctionError with the layer and the line, as far as they are known, if it fails."""
        name = escape(self._folder.name)
        try:
            answer = exchange()
        except EndedError as ended:
            prefix = f"layer {ended.layer}, " if ended.layer >= 0 else ""
            traceback_line = re.search(rf'{re.escape(self._folder.name)}/([^/"]+)", line (\d+)', ended.stderr)
            prefix += f"{escape(traceback_line[1])}, line {traceback_line[2]}: " if traceback_line else ""
            raise FunctionError(f"{name}: {prefix}{too_late if ended.is_late else ended.words()}") from None
        if "error" in answer:
            raise FunctionError(f"{name}: {escape(answer['error'], 500)}")
