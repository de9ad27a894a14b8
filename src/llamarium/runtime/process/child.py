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
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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


class Child:
    """A process that answers requests, one at a time; started anew after one that failed.

    Args:
        command: What to start; appended are the number of its end of the connection, and that of a file of 8 bytes, in
            which it notes the layer that it computes, -1 outside of layers.
        folder: Whose code it runs: errors name lines of files in it.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process; FunctionError if it cannot begin."""
        with self._lock, self._failing(f"does not begin within {BEGIN_S:.0f} s"):
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

        Raises:
            FunctionError: Saying what was done instead of answering. The next request works again.
        """
        limit_s = STEP_S + TOKEN_S * num_tokens
        pause()
        with self._lock, self._failing(f"does not end within {limit_s:.0f} s"):
            channel = self._running().channel
            deadline = time.monotonic() + limit_s
            channel.settimeout(limit_s)
            send(channel, header, arrays, descriptor)
            self._read(channel, answers, deadline)

    @contextmanager
    def _failing(self, too_late: str) -> Generator[None]:
        """Make a FunctionError of whatever ends the exchange, and end the process unless it has said so itself."""
        try:
            yield
        except TimeoutError:
            raise self._stopped(too_late) from None
        except (OSError, EOFError, ValueError):
            raise self._stopped("") from None
        except FunctionError:
            raise
        except BaseException:  # Ctrl-C, say: the answer still comes, and would be taken for the next one's
            self._end()
            raise

    def _running(self) -> "_Process":
        """Return the process, started if there is none that runs."""
        if self._process is not None and self._process.popen.poll() is None:
            return self._process
        self._end()
        self._process = process = _Process(self._command)
        self._finalizer = weakref.finalize(self, process.end)
        try:
            self._read(process.channel, (), time.monotonic() + BEGIN_S)
        except FunctionError:
            self._end()
            raise
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _read(self, channel: socket.socket, answers: Sequence[NDArray[Any]], deadline: float) -> None:
        answer = read_header(channel, deadline)
        if "error" in answer:
            raise FunctionError(f"{escape(self._folder.name)}: {escape(answer['error'], 500)}")
        for array in answers:
            read_into(channel, array, deadline)

    def _stopped(self, words: str) -> FunctionError:
        """End the process and say what it did, and where, as far as that is known."""
        assert self._process is not None
        code, layer, said = self._process.last_words(is_running=bool(words))
        self._end()
        place = f"layer {layer}, " if layer >= 0 else ""
        found = re.search(rf'{re.escape(self._folder.name)}/([^/"]+)", line (\d+)', said)
        place += f"{escape(found[1])}, line {found[2]}: " if found else ""
        return FunctionError(f"{escape(self._folder.name)}: {place}{words or _ending(code, said)}")


class _Process:
    """What runs, the connection to it, and the file of what it writes to standard error."""

    def __init__(self, command: Sequence[str]) -> None:
        self.channel, theirs = socket.socketpair()
        self._place = place = unnamed_file()
        os.write(place, (-1).to_bytes(8, "little", signed=True))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        with theirs:
            passed = theirs.fileno(), place
            self.popen = subprocess.Popen(
                [*command, *map(str, passed)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._said,
                pass_fds=passed, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": str(num_threads())},
            )  # fmt: skip

    def last_words(self, *, is_running: bool) -> tuple[int | None, int, str]:
        """Return the exit code, None if it goes on, its layer, -1 for none, and what it wrote.

        One that is running says first where it is.
        """
        if is_running:
            self.popen.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(1)
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - (1 << 16)))
        layer = int.from_bytes(os.pread(self._place, 8, 0), "little", signed=True)
        return self.popen.poll(), layer, self._said.read().decode("utf-8", "replace")

    def end(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        assert self.popen.stdin is not None
        for file in (self.popen.stdin, self.channel, self._said):
            file.close()
        os.close(self._place)


def _ending(code: int | None, said: str) -> str:
    """Say how a process ended."""
    if code is None:
        return "answers what it may not"
    if code == -signal.SIGKILL:
        return "was ended from outside, for the memory that it took, say"
    if code < 0:
        return f"crashes the process ({signal.Signals(-code).name})"
    last = "".join(f"; {escape(line)}" for line in said.strip().splitlines()[-1:])
    return f"ends the process (exit code {code}{last})"
