"""The choices of chat completions and completions, complete or in chunks."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import Request

from llamarium.engine.pooling import State
from llamarium.generation.adapters import head_reader
from llamarium.generation.completion import Generation, Piece
from llamarium.server.errors import ApiError
from llamarium.server.http.stream import encode
from llamarium.server.lifecycle.service import ModelChoice, Service
from llamarium.server.openai.fields import shows_usage
from llamarium.server.openai.interventions import Intervened, shown
from llamarium.server.openai.logprobs import for_prompt
from llamarium.server.replying import ReplyFormatter, Usage


class ChoicesFormatter(ReplyFormatter):
    """Formats all choices of a request."""

    prefix: ClassVar[str]
    """Prefix of response ids."""
    whole_name: ClassVar[str]
    """The `object` of a complete answer."""
    chunk_name: ClassVar[str]
    """The `object` of a chunk."""
    nothing: ClassVar[str]
    """JSON members of a choice in a chunk that adds no text."""

    needs_steps = False

    def __init__(self, request: Request, body: Intervened, model: ModelChoice) -> None:
        service: Service = request.app.state.service
        self._tokenizer, self._body = service.tokenizer, body
        self._num_answers = body.n or 1  # per prompt
        self._reports_prompts = body.prompt_logprobs is not None
        self._shows_ids = body.return_token_ids or False
        self._shows_usage = body.stream_options is not None and shows_usage(body)
        self._looks_inside = body.hidden_states is not None or body.lens is not None
        self._started = set[int]()  # indices of prompts whose first events were returned
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.chunk_name if body.stream else self.whole_name,
            "created": int(time.time()),
            "model": model.name,
        }
        self._chunk_start = f'data: {encode(self._head)[:-1]},"choices":['
        self._chunk_end = ',"usage":null}\n\n' if self._shows_usage else "}\n\n"

    @abstractmethod
    def _choice(self, generation: Generation, prompt: int, row: int) -> dict[str, Any]:
        """Return one choice, without its index."""

    def _of_prompts(self, generation: Generation) -> dict[str, Any]:
        """Return the member `prompt_logprobs`, if requested."""
        if not self._reports_prompts or generation.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": for_prompt(self._tokenizer, generation.prompt_logprobs)}

    def _beside(self, generation: Generation) -> dict[str, Any]:
        """Return further members of a complete answer; `generation` is the first prompt's."""
        return {}

    @abstractmethod
    def _first(self, index: int, prompt: int, ids: str) -> str:
        """Return the events before a choice's first piece; `ids` is the JSON member `prompt_token_ids`, or ""."""

    @abstractmethod
    def _piece(self, index: int, prompt: int, piece: Piece) -> str:
        """Return the events of one piece, or "" if it has no content."""

    def _chunk(self, index: int, content: str, logprobs: str = "null", reason: str = "null", members: str = "") -> str:
        """Return the event of a chunk with one choice.

        Args:
            index: Index of the choice.
            content: The choice's content as JSON members, e.g. `"delta":{}`.
            logprobs: `logprobs` as JSON.
            reason: `finish_reason` as JSON.
            members: Further JSON members of the chunk.
        """
        choice = f'{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return f"{self._chunk_start}{choice}]{members}{self._chunk_end}"

    def events(self, prompt: int, pieces: Sequence[Piece], usage: Usage) -> str:
        """Return the chunks of one step of a prompt's answers."""
        first, events = prompt * self._num_answers, ""
        if prompt not in self._started:
            self._started.add(prompt)
            ids = f',"prompt_token_ids":{encode(usage.answers[prompt].prompt_ids)}' if self._shows_ids else ""
            events = "".join(self._first(first + row, prompt, "" if row else ids) for row in range(self._num_answers))
        for piece in pieces:
            if piece.states and self._looks_inside:
                members = encode(self._inside(piece.states, prompt, usage))[1:-1]
                events += self._chunk(first + piece.index, f"{self.nothing},{members}")
            events += self._piece(first + piece.index, prompt, piece)
        return events

    def _inside(self, states: Sequence[State], prompt: int, usage: Usage) -> dict[str, Any]:
        """Return the members `hidden_states` and `lens` of a choice, if requested."""
        answers = usage.answers[prompt]
        return shown(self._body, states, len(answers.prompt_ids), head_reader(*answers.runs_on), self._tokenizer)

    def end(self, usage: Usage) -> str:
        """Return the chunk with the usage, if requested, and the end marker."""
        counts = f'{self._chunk_start}],"usage":{encode(counts_of(usage))}}}\n\n' if self._shows_usage else ""
        return f"{counts}data: [DONE]\n\n"

    def failure(self, error: ApiError) -> str:
        """Return the error event."""
        return error_event(error)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the body with all choices."""
        generations = [answers.generation() for answers in usage.answers]
        choices = list[dict[str, Any]]()
        for prompt, generation in enumerate(generations):
            for row, answer in enumerate(generation.completions):
                choice = {"index": len(choices)} | self._choice(generation, prompt, row)
                choices.append(choice | self._inside(answer.states, prompt, usage) if self._looks_inside else choice)

        body = self._head | {"choices": choices, "usage": counts_of(usage)}
        return body | self._beside(generations[0]) if self._shows_ids or self._reports_prompts else body


def error_event(error: ApiError) -> str:
    """Return the last event of a failed stream."""
    return f"data: {encode(error.body)}\n\n"


def counts_of(usage: Usage) -> dict[str, Any]:
    """Return token counts with OpenAI's names."""
    counts = usage.counts()
    from_disk = {"disk_tokens": counts.disk} if counts.disk else {}
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.generated,
        "total_tokens": counts.prompt + counts.generated,
        "prompt_tokens_details": {"cached_tokens": counts.cached, **from_disk, **usage.prefix},
    }
