"""Replies to a generation request, streaming or complete, in any protocol's format."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import Request, Response

from llamarium.generation.answers import Answers
from llamarium.generation.completion import Piece
from llamarium.server.answering import AnswerRequest, Submitted, recording, side_by_side, submit
from llamarium.server.errors import JSON, ApiError
from llamarium.server.http.access import owner_of
from llamarium.server.http.stream import COMMENT, EventStream, Write, while_listening
from llamarium.server.lifecycle.service import Service
from llamarium.server.metrics import Timer
from llamarium.server.prefix.explainer import HEADER as PREFIX_HEADER
from llamarium.server.prefix.explainer import LONG_PROMPT, Explained

Pieces = Sequence[Piece]
WriteStep = Callable[[int, Pieces], Awaitable[None]]
"""Writes one step of a prompt's answers to a stream."""


class TokenCounts(NamedTuple):
    """The tokens of one HTTP request.

    Attributes:
        prompt: Prompt tokens.
        generated: Generated tokens so far.
        cached: Prompt tokens read from the prefix cache.
        disk: Cached tokens that were read from disk.
    """

    prompt: int
    generated: int
    cached: int
    disk: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one HTTP request.

    Attributes:
        answers: The answers to each prompt.
        explained: Prefix explanation; None if there are several prompts.
        prefix: The explanation as a member of `prompt_tokens_details`; empty unless texts may be shown.
    """

    answers: Sequence[Answers]
    explained: Explained | None = None
    prefix: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def counts(self) -> TokenCounts:
        """Return the token counts so far."""
        return TokenCounts(
            sum(len(answers.prompt_ids) for answers in self.answers),
            sum(len(row.token_ids) for answers in self.answers for row in answers.rows),
            sum(answers.num_cached for answers in self.answers),
            sum(answers.num_disk for answers in self.answers),
        )


class ReplyFormatter(ABC):
    """Formats the reply to one request in a protocol's format.

    A stream consists of the events returned by `begin`, by `events` for each step of each prompt, and by `end`; after
    an error, `failure` returns the last events. For a complete answer, `take` receives each step and `whole` returns
    the body.
    """

    ping = COMMENT
    """The event that keeps an idle stream open."""

    stores = False
    """Whether `end` and `whole` store the answer; if so, they run in a thread."""

    needs_steps = True
    """Whether a complete answer is built from its steps; otherwise `take` is not called."""

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
        """Return the last events of a failed stream."""

    def take(self, prompt: int, pieces: Pieces, usage: Usage) -> None:
        """Process one step of a prompt's answers."""
        self.events(prompt, pieces, usage)

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the body of a complete answer, after its last step."""


async def reply(
    request: Request, generation_request: AnswerRequest, formatter: ReplyFormatter, *, streams: bool
) -> Response:
    """Run a generation request and return its response.

    Args:
        request: The HTTP request.
        generation_request: The generation request.
        formatter: The format of the reply.
        streams: Whether to stream server-sent events.

    Raises:
        ApiError: If the request is rejected, or fails before the response has started.
    """
    service: Service = request.app.state.service
    owner = owner_of(request) if service.settings.api_keys else ""
    n = generation_request.options.sampler.get("n") or 1
    with ExitStack() as resources:
        resources.enter_context(
            service.admit(generation_request.prompts.count * n, "n" if n > 1 else generation_request.names.prompt)
        )
        submitted = await submit(service, generation_request, owner, request.scope)
        for answers in submitted.answers:
            resources.callback(answers.close)
        running = _Reply(request, generation_request, submitted, formatter)
        if streams:
            ping_s = service.settings.ping_s
            response = EventStream(running.stream, formatter.failure, ping_s, resources.pop_all(), formatter.ping)
        else:
            response = await while_listening(running.whole(), request.receive) or Response(status_code=499)
        if (explained := running.usage.explained) is not None:
            response.headers[PREFIX_HEADER] = explained.explanation.header()
        return response


class _Reply:
    """The running answers to one request."""

    def __init__(
        self, request: Request, generation_request: AnswerRequest, submitted: Submitted, formatter: ReplyFormatter
    ) -> None:
        self._request, self._formatter, self._is_kept = request, formatter, generation_request.is_kept
        self._explained = submitted.explained
        single = submitted.explained[0] if len(submitted.explained) == 1 else None
        prefix = {"prefix": single.explanation.to_json()} if single is not None and single.shows_texts else {}
        self.usage = Usage(submitted.answers, single, prefix)
        # prompt log-probabilities and hidden states take long to format
        self._is_long = (
            generation_request.options.sampler.get("prompt_logprobs") is not None
            or generation_request.interventions is not None
        )

    async def stream(self, write: Write) -> None:
        """Write all events to the stream."""
        formatter, usage = self._formatter, self.usage

        async def write_step(prompt: int, pieces: Pieces) -> None:
            if self._is_long and any(piece.prompt_logprobs is not None or piece.states for piece in pieces):
                await write(await asyncio.to_thread(formatter.events, prompt, pieces, usage))
            else:
                await write(formatter.events(prompt, pieces, usage))

        await write(formatter.begin())
        await self._follow_all(write_step)
        await write(await asyncio.to_thread(formatter.end, usage) if formatter.stores else formatter.end(usage))

    async def whole(self) -> Response:
        """Wait for the answers, and return the complete response."""
        await self._follow_all(None)
        if self._is_long or self._formatter.stores:
            return await asyncio.to_thread(lambda: JSON(self._formatter.whole(self.usage)))
        return JSON(self._formatter.whole(self.usage))

    async def _follow_all(self, write_step: WriteStep | None) -> None:
        """Consume the answers to all prompts concurrently; at the end, log the usage and call `_keep`."""
        try:
            all_answers = self.usage.answers
            if len(all_answers) == 1:
                await self._follow(0, all_answers[0], write_step)
            else:
                await side_by_side([self._follow(*numbered, write_step) for numbered in enumerate(all_answers)])
        finally:
            counts, service = self.usage.counts(), self._request.app.state.service
            notes = {"prompt": counts.prompt, "cached": counts.cached, "generated": counts.generated}
            self._request.scope["notes"].update(notes)
            is_recorded = service.settings.recorder is not None and self._is_kept
            if is_recorded or any(len(numbered.prompt.ids) > LONG_PROMPT for numbered in self._explained):
                await asyncio.shield(asyncio.to_thread(self._keep, service))  # also if the client has disconnected
            else:
                self._keep(service)

    async def _follow(self, prompt: int, answers: Answers, write_step: WriteStep | None) -> None:
        """Pass each step of a prompt's answers to `write_step`, or to the formatter of a complete answer."""
        noted = self._request.app.state.metrics.of(answers.adapter)
        timer, formatter = Timer(noted, self._request.scope["began"]), self._formatter
        with recording(noted, is_edited=answers.is_edited):
            while pieces := await answers.arrived():
                timer.step(pieces)
                if write_step is not None:
                    await write_step(prompt, pieces)
                elif formatter.needs_steps:
                    formatter.take(prompt, pieces, self.usage)
            timer.end()

    def _keep(self, service: Service) -> None:
        """Store the answers for prefix explanations, and record them if recording is enabled."""
        for explained, answers in zip(self._explained, self.usage.answers, strict=True):
            service.explainer.finished(explained, answers)

        recorder, loaded = service.settings.recorder, service.loaded
        if recorder is None or loaded is None or not self._is_kept:
            return
        for answers in self.usage.answers:
            failure = recorder.write(self._request.scope["request_id"], answers, *loaded)
            self._request.scope["notes"].update({"not_recorded": failure} if failure else {})
