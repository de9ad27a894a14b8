"""Asking all lines, as many side by side as keep the engine busy, and writing each answer when it is there."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llamarium.errors import EngineStoppedError
from llamarium.load_test.chunks import error_message
from llamarium.server.app import create_routes
from llamarium.server.batch.dispatch import RouteReply, Routes
from llamarium.server.batch.lines import BatchRequest, Line, parse
from llamarium.server.errors import ApiError
from llamarium.server.http.access import new_request_id
from llamarium.server.http.stream import encode
from llamarium.server.lifecycle.service import Service

MAX_PENDING_BYTES = 2**26
"""Of lines that are under way, unless a single one has more."""

_AHEAD = 2  # times what runs side by side: who comes next has been read and encoded before there is room


@dataclass(slots=True)
class BatchProgress:
    """What has come of a batch so far.

    Attributes:
        num_lines: In all.
        num_answered: Those that have an answer, whichever.
        num_failed: Those whose answer is an error.
        first_failure: What the first error of this run says; empty if there is none.
    """

    num_lines: int
    num_answered: int = 0
    num_failed: int = 0
    first_failure: str = ""

    def __str__(self) -> str:
        """Say it."""
        return f"{self.num_answered} of {self.num_lines} lines answered, {self.num_failed} failed"

    @property
    def share(self) -> float:
        """Of the lines, those that have an answer."""
        return self.num_answered / self.num_lines


class BatchRun:
    """Asks lines.

    Args:
        service: The model.
        names: Under which it is served, at least one.
        write: Takes the answers, each a line.
        warn: Is told of bugs of ours.
        tally: Is kept up to date.
    """

    def __init__(
        self,
        service: Service,
        names: tuple[str, ...],
        write: Callable[[bytes], None],
        warn: Callable[[str], None],
        tally: BatchProgress,
    ) -> None:
        self._service, self._routes = service, Routes(create_routes(service, names))
        self._write, self._warn, self._tally = write, warn, tally
        self._num_bytes = self._num_lines = 0
        self._came = asyncio.Event()

    async def ask_all(self, lines: Iterable[Line]) -> None:
        """Ask them.

        Raises:
            EngineStoppedError: If the engine breaks; who was not answered then has no line.
            OutputError: If an answer cannot be written.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    while not self._has_room(line):
                        self._came.clear()
                        await self._came.wait()
                    self._num_lines += 1
                    self._num_bytes += len(line.text)
                    group.create_task(self._ask(line))
                    await asyncio.sleep(0)  # so that its answers are counted
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _has_room(self, line: Line) -> bool:
        """Whether a line may be asked besides those that are under way."""
        most = _AHEAD * self._service.settings.max_num_seqs
        return self._num_lines == 0 or (
            max(self._num_lines, self._service.in_flight) < most
            and self._num_bytes + len(line.text) <= MAX_PENDING_BYTES
        )

    async def _ask(self, line: Line) -> None:
        try:
            asked = self._read(line)
            if asked is not None:
                self._tell(line, await self._routes.post(asked))
        finally:
            self._num_lines -= 1
            self._num_bytes -= len(line.text)
            self._came.set()

    def _read(self, line: Line) -> BatchRequest | None:
        """Return what a line asks, or write what is wrong with it."""
        try:
            asked = parse(line)
            self._routes.check(asked)
        except ApiError as error:
            fault = {"code": error.code, "message": error.message, "param": error.param, "line": line.number}
            self._put(line, "null", encode(fault), failure=error.message)
            return None
        return asked

    def _tell(self, line: Line, answer: RouteReply) -> None:
        """Write a route's answer."""
        if answer.status == 503 and not self._has_engine():  # else this answer gave way to others
            raise self._broken()
        if answer.bug is not None:
            self._warn(f"line {line.number} met a bug in llamarium: {answer.bug}")
        head = encode({"status_code": answer.status, "request_id": new_request_id()})
        failure = "" if answer.status == 200 else f"{answer.status}, {error_message(answer.body.encode())}"
        self._put(line, f'{head[:-1]},"body":{answer.body}}}', "null", failure=failure)

    def _has_engine(self) -> bool:
        loaded = self._service.loaded
        return loaded is not None and loaded[1].state == "ready"

    def _broken(self) -> EngineStoppedError:
        failure = None if self._service.loaded is None else self._service.loaded[1].failure
        return EngineStoppedError(f"the engine has broken, and not all lines are answered: {failure}")

    def _put(self, line: Line, response: str, error: str, *, failure: str) -> None:
        """Write an answer; response and error are JSON."""
        head = encode({"id": line.id, "custom_id": line.custom_id})
        self._write(f'{head[:-1]},"response":{response},"error":{error}}}\n'.encode())
        self._tally.num_answered += 1
        if failure:
            self._tally.num_failed += 1
            self._tally.first_failure = self._tally.first_failure or f"line {line.number}: {failure}"
