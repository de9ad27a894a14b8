"""One request, answered as a whole or as a stream, in the format of any protocol."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import Request, Response

from llamarium.generation.answers import Answers
from llamarium.generation.completion import Piece
from llamarium.server.answering import AnswerRequest, Submitted, close, recording, side_by_side, submit
from llamarium.server.errors import JSON, ApiError
from llamarium.server.hints import no_effect_of
from llamarium.server.http.guard import owner_of
from llamarium.server.http.stream import COMMENT, EventStream, Write, unless_gone
from llamarium.server.lifecycle.service import Service
from llamarium.server.metrics import Timer
from llamarium.server.prefix.explainer import HEADER as PREFIX_HEADER
from llamarium.server.prefix.explainer import Explained

T = TypeVar("T")
Pieces = Sequence[Piece]


class Usage:
    """The tokens of one HTTP request; `answers` are those to each of its prompts, `explained` is of a single one."""

    def __init__(self, answers: Sequence[Answers], explained: Explained | None = None) -> None:
        self.answers, self.explained = answers, explained

    def prefix(self) -> dict[str, Any]:
        """Return the explanation of a single prompt's prefix as a member of its details, if texts may be shown."""
        return {} if self.explained is None else self.explained.usage()

    @property
    def prompt(self) -> int:
        """Tokens of prompts."""
        return sum(len(one.prompt_ids) for one in self.answers)

    @property
    def generated(self) -> int:
        """Tokens of answers so far."""
        return sum(len(row.token_ids) for one in self.answers for row in one.rows)

    @property
    def cached(self) -> int:
        """Those of them whose keys and values were cached."""
        return sum(one.num_cached for one in self.answers)

    @property
    def disk(self) -> int:
        """Those of these that came from disk."""
        return sum(one.num_disk for one in self.answers)


class ReplyFormatter(ABC):
    """The format of a protocol's reply to one request.

    For a stream `begin`, `events` for each step of each prompt, and `end` return its events, or `failure` in place of
    what is left. For a whole answer `take` gets each step instead, and `whole` returns the body.
    """

    ping = COMMENT
    """The event that keeps an idle stream open."""

    stores = False
    """Whether `end` and `whole` take long, since they store the answer."""

    def begin(self) -> str:
        """Return the events before the first step; none by default."""
        return ""

    @abstractmethod
    def events(self, prompt: int, pieces: Pieces, usage: Usage) -> str:
        """Return the events of one step of a prompt's answers."""

    def end(self, usage: Usage) -> str:
        """Return the events after the last step; none by default."""
        return ""

    @abstractmethod
    def failure(self, error: ApiError) -> str:
        """Return the last events of a stream that fails."""

    def take(self, prompt: int, pieces: Pieces, usage: Usage) -> None:
        """Take one step of a prompt's answers."""
        self.events(prompt, pieces, usage)

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the body of a whole answer, after its last step."""


async def reply(request: Request, asked: AnswerRequest, formatter: ReplyFormatter, *, streams: bool) -> Response:
    """Answer a request."""
    service: Service = request.app.state.service
    with ExitStack() as held:
        held.enter_context(service.place(asked.num_answers, asked.number_field))
        submitted = await submit(service, asked, owner_of(request), no_effect_of(request.scope))
        held.callback(close, submitted.answers)
        running = _Reply(request, submitted, formatter, is_kept=asked.is_kept)
        if streams:
            ping_s = service.settings.ping_s
            response = EventStream(running.stream, formatter.failure, ping_s, held.pop_all(), formatter.ping)
        else:
            response = await unless_gone(request, running.whole()) or Response(status_code=499)
        if (explained := running.usage.explained) is not None:
            response.headers[PREFIX_HEADER] = explained.header()
        return response


class _Reply:
    """The answers to one request, on their way to its client."""

    def __init__(self, request: Request, submitted: Submitted, formatter: ReplyFormatter, *, is_kept: bool) -> None:
        self._request, self._submitted, self._formatter = request, submitted, formatter
        self._is_kept, explained = is_kept, submitted.explained
        self.usage = Usage(submitted.answers, explained[0] if len(explained) == 1 else None)

    async def stream(self, write: Write) -> None:
        """Write all events."""

        async def write_step(prompt: int, pieces: Pieces) -> None:
            if _has_prompt(pieces):
                await write(await asyncio.to_thread(self._formatter.events, prompt, pieces, self.usage))
            else:
                await write(self._formatter.events(prompt, pieces, self.usage))

        await write(self._formatter.begin())
        await self._read(write_step)
        await write(await _run(lambda: self._formatter.end(self.usage), is_long=self._formatter.stores))

    async def whole(self) -> Response:
        """Return the whole answer, when it is complete."""
        is_long = self._formatter.stores

        async def take(prompt: int, pieces: Pieces) -> None:
            nonlocal is_long
            is_long = is_long or _has_prompt(pieces)
            self._formatter.take(prompt, pieces, self.usage)

        await self._read(take)
        return await _run(lambda: JSON(self._formatter.whole(self.usage)), is_long=is_long)

    async def _read(self, take: Callable[[int, Pieces], Awaitable[None]]) -> None:
        """Pass each step of each prompt to `take`, all prompts side by side."""

        async def read(prompt: int, answers: Answers) -> None:
            noted = self._request.app.state.metrics.of(answers.adapter)
            timer = Timer(noted, self._request.scope["began"])
            with recording(noted, is_edited=answers.is_edited):
                while pieces := await answers.arrived():
                    timer.tokens()
                    for piece in pieces:
                        if piece.finish_reason is not None:
                            noted.finished(piece.finish_reason)
                    await take(prompt, pieces)
                timer.end()

        try:
            await side_by_side([read(prompt, answers) for prompt, answers in enumerate(self._submitted.answers)])
        finally:
            service: Service = self._request.app.state.service
            used = self.usage
            notes = {"prompt": used.prompt, "cached": used.cached, "generated": used.generated}
            self._request.scope["notes"].update(notes)
            if self._is_long_to_keep(service):
                await asyncio.shield(asyncio.to_thread(self._keep, service))  # kept even if the client is gone
            else:
                self._keep(service)

    def _is_long_to_keep(self, service: Service) -> bool:
        is_recorded = service.settings.recorder is not None and self._is_kept
        return is_recorded or any(one.is_long for one in self._submitted.explained)

    def _keep(self, service: Service) -> None:
        """Keep what later prompts are compared with, and record the answers, if that is wanted."""
        for explained, answers in zip(self._submitted.explained, self._submitted.answers, strict=True):
            service.explainer.finished(explained, answers)

        recorder, loaded = service.settings.recorder, service.loaded
        if recorder is None or loaded is None or not self._is_kept:
            return
        for answers in self._submitted.answers:
            failure = recorder.write(self._request.scope["request_id"], answers, *loaded)
            self._request.scope["notes"].update({"not_recorded": failure} if failure else {})


def _has_prompt(pieces: Pieces) -> bool:
    """Whether there are log-probabilities of a prompt or hidden states, which take long to format."""
    return any(piece.prompt_logprobs is not None or piece.states for piece in pieces)


async def _run(work: Callable[[], T], *, is_long: bool) -> T:
    return await asyncio.to_thread(work) if is_long else work()
