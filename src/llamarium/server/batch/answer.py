"""Runs the requests of a batch concurrently, enough to keep the engine busy, and writes each answer on completion."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llamarium.errors import EngineStoppedError, counted
from llamarium.load_test.chunks import error_message
from llamarium.server.app import create_routes
from llamarium.server.batch.dispatch import RouteReply, Routes
from llamarium.server.batch.lines import BatchRequest, Line, parse
from llamarium.server.errors import ApiError
from llamarium.server.http.access import new_request_id
from llamarium.server.http.stream import encode
from llamarium.server.lifecycle.service import Service

MAX_PENDING_BYTES = 2**26
"""Maximum total size of the lines in flight; a single larger line is still accepted."""

_AHEAD = 2  # requests in flight per running sequence, so that the next ones are already encoded


@dataclass(slots=True)
class BatchProgress:
    """The progress of a batch.

    Attributes:
        num_lines: Number of lines of the input.
        num_answered: Number of answered lines, including failed ones.
        num_failed: Number of failed lines.
        first_failure: Message of the first failure in this run, or "".
    """

    num_lines: int
    num_answered: int = 0
    num_failed: int = 0
    first_failure: str = ""

    def __str__(self) -> str:
        return f"{self.num_answered} of {counted(self.num_lines, 'line')} answered, {self.num_failed} failed"

    @property
    def share(self) -> float:
        """Share of answered lines, from 0 to 1."""
        return self.num_answered / self.num_lines


class BatchRun:
    """Runs a batch.

    Args:
        service: The served model.
        names: The model's served names.
        write: Writes a line of output.
        warn: Reports a bug in the server.
        progress: Updated with each answered line.
    """

    def __init__(
        self,
        service: Service,
        names: tuple[str, ...],
        write: Callable[[bytes], None],
        warn: Callable[[str], None],
        progress: BatchProgress,
    ) -> None:
        self._service, self._routes = service, Routes(create_routes(service, names))
        self._write, self._warn, self._progress = write, warn, progress
        self._num_bytes = self._num_lines = 0
        self._came = asyncio.Event()

    async def run(self, lines: Iterable[Line]) -> None:
        """Run the requests of all lines.

        Raises:
            EngineStoppedError: If the engine fails.
            OutputError: If the output cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    while not self._has_room(line):
                        self._came.clear()
                        await self._came.wait()
                    self._num_lines += 1
                    self._num_bytes += len(line.text)
                    group.create_task(self._run_line(line))
                    await asyncio.sleep(0)  # lets the task start, so that its answers count as in flight
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _has_room(self, line: Line) -> bool:
        limit = _AHEAD * self._service.settings.max_num_seqs
        return self._num_lines == 0 or (
            max(self._num_lines, self._service.in_flight) < limit
            and self._num_bytes + len(line.text) <= MAX_PENDING_BYTES
        )

    async def _run_line(self, line: Line) -> None:
        try:
            request = self._read(line)
            if request is not None:
                self._write_reply(line, await self._routes.post(request))
        finally:
            self._num_lines -= 1
            self._num_bytes -= len(line.text)
            self._came.set()

    def _read(self, line: Line) -> BatchRequest | None:
        """Return a line's request, or write its error and return None."""
        try:
            request = parse(line)
            self._routes.check(request)
        except ApiError as error:
            fault = {"code": error.code, "message": error.message, "param": error.param, "line": line.number}
            self._put(line, "null", encode(fault), failure=error.message)
            return None
        return request

    def _write_reply(self, line: Line, reply: RouteReply) -> None:
        _, engine = self._service.loaded or (None, None)
        if reply.status == 503 and (engine is None or engine.state != "ready"):  # otherwise only one was aborted
            failure = None if engine is None else engine.failure
            raise EngineStoppedError(f"the engine failed before all requests were answered: {failure}")
        if reply.bug is not None:
            self._warn(f"line {line.number}: internal error in llamarium: {reply.bug}")
        head = encode({"status_code": reply.status, "request_id": new_request_id()})
        failure = "" if reply.status == 200 else f"{reply.status}, {error_message(reply.body.encode())}"
        self._put(line, f'{head[:-1]},"body":{reply.body}}}', "null", failure=failure)

    def _put(self, line: Line, response: str, error: str, *, failure: str) -> None:
        """Write a line of output; `response` and `error` are JSON, `failure` is the message for the progress."""
        head = encode({"id": line.id, "custom_id": line.custom_id})
        self._write(f'{head[:-1]},"response":{response},"error":{error}}}\n'.encode())
        self._progress.num_answered += 1
        if failure:
            self._progress.num_failed += 1
            self._progress.first_failure = self._progress.first_failure or f"line {line.number}: {failure}"
