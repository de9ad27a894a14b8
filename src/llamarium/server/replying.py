"""One request with one answer, whole or as a stream, whatever the protocol that words it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from fastapi import Request, Response

from llamarium.generation.completion import Piece
from llamarium.generation.text_engine import Answers
from llamarium.server.answering import AnswerRequest, close, follow, submit
from llamarium.server.errors import JSON, ApiError, internal_error
from llamarium.server.http.stream import EventStream, Write, unless_gone
from llamarium.server.lifecycle.service import Service
from llamarium.server.usage import Usage


class Wording(Protocol):
    """How a protocol words one answer.

    Its methods are called in the order in which they stand here, `say` for each piece, and `failure` in place of `end`
    where the answer breaks off. What they return are events, for a stream.
    """

    ping: bytes
    """What a stream shows where nothing else happens."""

    def begin(self) -> str:
        """Return what comes before anything else."""
        ...

    def say(self, usage: Usage, piece: Piece) -> str:
        """Take what an answer adds."""
        ...

    def end(self, usage: Usage, last: Piece) -> str:
        """Take an answer's last piece, which has been said."""
        ...

    def failure(self, error: ApiError) -> str:
        """Return how a stream tells that it breaks off."""
        ...

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, after its end."""
        ...


async def reply(request: Request, asked: AnswerRequest, wording: Wording, *, streams: bool) -> Response:
    """Answer a request.

    Raises:
        ApiError: If it cannot be answered.
    """
    service: Service = request.app.state.service
    with ExitStack() as held:
        held.enter_context(service.place(1))
        answers = await submit(service, asked)
        held.callback(close, answers)
        told = _Reply(request, answers[0], wording)
        if streams:
            return EventStream(told.stream, service.settings.ping_s, held.pop_all(), wording.ping)
        whole = await unless_gone(request, told.whole())
        return Response(status_code=499) if whole is None else JSON(whole)


class _Reply:
    """One answer on its way to one client."""

    def __init__(self, request: Request, answers: Answers, wording: Wording) -> None:
        self._notes: dict[str, Any] = request.scope["notes"]
        self._request = request
        self._answers, self._wording, self._usage = answers, wording, Usage([answers])

    async def whole(self) -> dict[str, Any]:
        """Return the answer, once it is there."""
        came: list[Piece] = []
        try:
            async for pieces in follow(self._request, self._answers):
                self._usage.count(pieces)
                came += pieces
        finally:
            self._notes.update(self._usage.noted())
        self._wording.begin()
        self._say(came)
        self._wording.end(self._usage, came[-1])
        return self._wording.whole()

    async def stream(self, write: Write) -> None:
        """Write all events; an error is one of them, and nothing follows it."""
        try:
            await _write(write, self._wording.begin())
            async for pieces in follow(self._request, self._answers):
                self._usage.count(pieces)
                said, last = self._say(pieces), pieces[-1]
                await _write(write, said if last.finish_reason is None else said + self._wording.end(self._usage, last))
        except ApiError as error:
            self._notes["error"] = error.code
            await _write(write, self._wording.failure(error))
        except Exception:
            await _write(write, self._wording.failure(internal_error()))
            raise
        finally:
            self._notes.update(self._usage.noted())

    def _say(self, pieces: Sequence[Piece]) -> str:
        return "".join(self._wording.say(self._usage, piece) for piece in pieces)


async def _write(write: Write, events: str) -> None:
    if events:
        await write(events.encode())
