"""What chat completions and completions have in common: one request, answered as a whole or as a stream."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from llamarium.generation.completion import Generation, Piece
from llamarium.generation.text_engine import Answers
from llamarium.server.answering import AnswerRequest, close, follow, side_by_side, submit
from llamarium.server.errors import JSON, ApiError, internal_error
from llamarium.server.http.stream import EventStream, Write, encode, unless_gone
from llamarium.server.lifecycle.service import Service
from llamarium.server.openai.usage import for_completions
from llamarium.server.usage import Usage
from llamarium.tokenizer.base import Tokenizer

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


class Shape(Protocol):
    """How a protocol words an answer."""

    prefix: str
    """Of ids."""
    whole_name: str
    """The `object` of a whole answer."""
    chunk_name: str
    """The `object` of a chunk."""

    def choice(self, tokenizer: Tokenizer, generation: Generation, prompt: int, row: int) -> dict[str, Any]:
        """Return one answer, without its index."""
        ...

    def beside(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return what stands beside the choices of a whole answer."""
        ...

    def first(self, chunks: "Chunks", prompt: int, index: int, prompt_ids: Sequence[int]) -> str:
        """Return what comes before an answer's first piece."""
        ...

    def piece(self, tokenizer: Tokenizer, chunks: "Chunks", index: int, piece: Piece) -> str:
        """Return the events of one piece; none where it has nothing to show."""
        ...


class Chunks:
    """Writes a stream's events around what never changes in it.

    Args:
        head: What every chunk begins with.
        shows_usage: Every chunk has `usage`, null but for the last.
    """

    def __init__(self, head: dict[str, Any], shows_usage: bool) -> None:
        self._lead = f'data: {encode(head)[:-1]},"choices":['
        self._end = ',"usage":null}\n\n' if shows_usage else "}\n\n"

    def event(self, index: int, content: str, logprobs: str = "null", reason: str = "null", beside: str = "") -> str:
        """Return a chunk; the arguments but the first are JSON, and `beside` are further members of the chunk."""
        choice = f'{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return f"{self._lead}{choice}]{beside}{self._end}"

    def usage(self, usage: Usage) -> str:
        """Return the chunk that tells the counts."""
        return f'{self._lead}],"usage":{encode(for_completions(usage))}}}\n\n'


async def respond(
    request: Request, asked: AnswerRequest, shape: Shape, *, streams: bool, shows_usage: bool
) -> Response:
    """Answer a request.

    Raises:
        ApiError: If it cannot be answered.
    """
    service: Service = request.app.state.service
    head = {
        "id": f"{shape.prefix}-{secrets.token_hex(12)}",
        "object": shape.chunk_name if streams else shape.whole_name,
        "created": int(time.time()),
        "model": asked.model.name,
    }
    with ExitStack() as held:
        held.enter_context(service.place(asked.num_answers, asked.number_field))
        answers = await submit(service, asked)
        held.callback(close, answers)
        if streams:
            stream = _Stream(request, answers, shape, Chunks(head, shows_usage), shows_usage)
            return EventStream(stream.produce, service.settings.ping_s, held.pop_all())
        whole = await unless_gone(request, _whole(request, answers, shape, head))
        return whole or Response(status_code=499)


async def _whole(request: Request, answers: Sequence[Answers], shape: Shape, head: dict[str, Any]) -> Response:
    usage = Usage(answers)

    async def read(one: Answers) -> None:
        async for pieces in follow(request, one):
            usage.count(pieces)

    try:
        await side_by_side([read(one) for one in answers])
    finally:
        request.scope["notes"].update(usage.noted())
    tokenizer = request.app.state.service.tokenizer
    generations = [one.collect() for one in answers]  # all of it has come

    def worded() -> Response:
        choices = [
            shape.choice(tokenizer, generation, prompt, row)
            for prompt, generation in enumerate(generations)
            for row in range(len(generation.completions))
        ]
        indexed = [{"index": i} | choice for i, choice in enumerate(choices)]
        return JSON(head | {"choices": indexed, "usage": for_completions(usage)} | shape.beside(generations))

    return await _done(worded, any(generation.prompt_logprobs is not None for generation in generations))


async def _done(work: Callable[[], T], is_long: bool) -> T:
    """Do something, in a thread where it takes long."""
    return await asyncio.to_thread(work) if is_long else work()


class _Stream:
    """One request's answers as events.

    Args:
        request: The client's.
        answers: To each prompt.
        shape: How they are worded.
        chunks: Writes events.
        shows_usage: The counts are told at the end.
    """

    def __init__(
        self, request: Request, answers: Sequence[Answers], shape: Shape, chunks: Chunks, shows_usage: bool
    ) -> None:
        self._request, self._answers, self._shape, self._chunks = request, answers, shape, chunks
        self._shows_usage, self._usage = shows_usage, Usage(answers)
        self._tokenizer: Tokenizer = request.app.state.service.tokenizer

    async def produce(self, write: Write) -> None:
        """Write all events; an error is one of them, and nothing follows it."""
        notes = self._request.scope["notes"]
        try:
            await side_by_side([self._follow(write, i) for i in range(len(self._answers))])
            end = self._chunks.usage(self._usage).encode() if self._shows_usage else b""
            await write(end + DONE)
        except ApiError as error:
            notes["error"] = error.code
            await write(error_event(error))
        except Exception:
            await write(error_event(internal_error()))
            raise
        finally:
            notes.update(self._usage.noted())

    async def _follow(self, write: Write, prompt: int) -> None:
        answers, shape, chunks = self._answers[prompt], self._shape, self._chunks
        first = prompt * answers.num_answers
        begun = False
        async for pieces in follow(self._request, answers):
            events: list[str] = []
            if not begun:
                rows = range(answers.num_answers)
                events = [shape.first(chunks, prompt, first + row, answers.prompt_ids) for row in rows]
                begun = True
            self._usage.count(pieces)
            has_prompt = any(piece.prompt_logprobs is not None for piece in pieces)
            events.append(await _done(partial(self._words, first, pieces), has_prompt))
            if written := "".join(events):
                await write(written.encode())

    def _words(self, first: int, pieces: Sequence[Piece]) -> str:
        shape, chunks, tokenizer = self._shape, self._chunks, self._tokenizer
        return "".join(shape.piece(tokenizer, chunks, first + piece.index, piece) for piece in pieces)


def error_event(error: ApiError) -> bytes:
    """Return the event that a stream which has failed ends with."""
    return f"data: {encode(error.body)}\n\n".encode()
