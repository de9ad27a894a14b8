"""Turn tokens into text: pieces of an answer while it is generated, and complete answers.

The text never splits a character, ends at stop strings even if they span tokens, and omits stop tokens. If the request
has tools, the text is divided into content and tool calls.

The protocols of the server format a `Piece`. `Piece.deltas` has what it adds, in order: `ContentDelta`, and for each
call `CallBegin`, `CallArguments` and `CallEnd`. The last piece has the finish reason:

    for delta in piece.deltas:
        match delta:
            case ContentDelta(text): ...                    # never empty
            case CallBegin(index, call_id, name): ...       # calls count from 0, and never overlap
            case CallArguments(index, fragment): ...        # joined, the text of a JSON object
            case CallEnd(index, is_complete): ...           # not complete: the answer was cut off or is malformed
    if piece.finish_reason is not None: ...                 # "tool_calls" instead of "stop" if there are calls

The concatenated deltas do not depend on how the text is split into tokens, and equal the `Completion`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np

from llamarium.config import ModelConfig
from llamarium.engine.pooling import State
from llamarium.engine.request import FinishReason, TokenEvent
from llamarium.engine.scoring import PromptScores
from llamarium.errors import AnswerError, counted
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.params import SamplingParams
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.streaming import StopStringFilter
from llamarium.tokenizer.tools.definition import ToolCall
from llamarium.tokenizer.tools.deltas import ContentDelta, Delta, text_of
from llamarium.tokenizer.tools.forms import tag_ids
from llamarium.tokenizer.tools.parser import ToolCallParser
from llamarium.tokenizer.tools.request import ToolRequest


@dataclass(frozen=True, slots=True)
class Alternative:
    """A candidate token: id, display text, and natural log-probability before sampling parameters."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """A token of a text, and the `logprobs` most likely tokens at its position, best first."""

    top: tuple[Alternative, ...]


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """Log-probabilities of a prompt's tokens; None for the first token. Entries are created on access."""

    def __init__(self, tokenizer: Tokenizer, scores: PromptScores) -> None:
        self._tokenizer, self._scores = tokenizer, scores

    @property
    def ids(self) -> Sequence[int]:
        """Token ids of the prompt."""
        return self._scores.ids

    def __len__(self) -> int:
        return len(self._scores.ids)

    @overload
    def __getitem__(self, place: int) -> TokenLogprob | None: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TokenLogprob | None, ...]: ...
    def __getitem__(self, place: int | slice) -> TokenLogprob | tuple[TokenLogprob | None, ...] | None:
        places = range(len(self))[place]
        return self._entry(places) if isinstance(places, int) else tuple(map(self._entry, places))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        scores, other_scores = self._scores, other._scores
        return list(scores.ids) == list(other_scores.ids) and all(
            np.array_equal(getattr(scores, name)[1:], getattr(other_scores, name)[1:])
            for name in ("logprobs", "top_ids", "top_logprobs")
        )

    def _entry(self, position: int) -> TokenLogprob | None:
        if position == 0:
            return None
        scores, text = self._scores, self._tokenizer.token_text
        top_ids, top_logprobs = scores.top_ids[position].tolist(), scores.top_logprobs[position].tolist()
        top = tuple(Alternative(i, text(i), logprob) for i, logprob in zip(top_ids, top_logprobs, strict=True))
        token_id = scores.ids[position]
        return TokenLogprob(token_id, text(token_id), float(scores.logprobs[position]), top)


EndReason = FinishReason | Literal["tool_calls"]
"""Why an answer ended: the engine's reason, or "tool_calls" instead of "stop" if it has tool calls."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to an answer.

    >>> piece = next(llama.stream("To be", temperature=0))
    >>> piece.text, len(piece.token_ids), piece.finish_reason
    (' ', 1, None)

    Attributes:
        text: New text, without tool calls; often empty while a character, or what may be a stop string or a call, is
            incomplete.
        token_ids: The new token, or none.
        logprobs: One entry per id if requested by `logprobs`, else empty.
        finish_reason: "stop", "length", "tool_calls" or "error" with the last piece, else None.
        index: Index of the answer, 0 to n - 1.
        deltas: The new text and calls, in order.
        stop_string: With the last piece, the stop string that ended the answer.
        prompt_logprobs: With the first piece, the prompt's log-probabilities, if requested.
        states: Requested hidden states.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: EndReason | None
    index: int = 0
    deltas: tuple[Delta, ...] = ()
    stop_string: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    states: tuple[State, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer.

    >>> (completion,) = llama.generate("To be", temperature=0, max_tokens=5).completions
    >>> completion.finish_reason
    'length'

    Attributes:
        text: The text, without tool calls, stop string or stop token.
        token_ids: All generated ids, including a stop id.
        logprobs: One entry per id if requested by `logprobs`, else None.
        finish_reason: "stop" after a stop id, a stop string or a complete grammar, "tool_calls" instead if it has tool
            calls, "length" at `max_tokens` or the end of the context, "error" if no token could be sampled.
        seed: The seed that reproduces this answer.
        error: The error message if it ended with "error", else None.
        tool_calls: The tool calls; the last one is incomplete if the answer was cut off in it.
        stop_string: The stop string that ended it, or None.
        states: Requested hidden states of computed tokens.
        failure: The error behind `error`, or None.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: EndReason
    seed: int | None
    error: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    states: tuple[State, ...] = ()
    failure: AnswerError | None = field(default=None, compare=False, repr=False)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the dialog's next message; see `message_of`."""
        return message_of(self.text, self.tool_calls)


def message_of(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return an answer as a message of a dialog, in the format of OpenAI's API.

    An incomplete call is omitted, as its arguments are not valid JSON.
    """
    complete = [call.to_openai() for call in calls if call.is_complete]
    called = {"tool_calls": complete} if complete else {}
    return {"role": "assistant", "content": text or (None if complete else ""), **called}


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """The result for one prompt: its token ids, `n` answers, and its log-probabilities if requested.

    >>> generation = llama.generate("To be", temperature=0.8, seed=1, n=2, max_tokens=5)
    >>> len(generation.prompt_ids), len(generation.completions)
    (5, 2)
    """

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.completions[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first answer's tool calls."""
        return self.completions[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The first answer as the dialog's next message."""
        return self.completions[0].message

    def __str__(self) -> str:
        """Return the texts of the answers, separated by blank lines."""
        return "\n\n".join(completion.text for completion in self.completions)

    def __repr__(self) -> str:
        """Return each answer's text, length and finish reason."""
        answers = ", ".join(
            f"{c.text!r} ({counted(len(c.token_ids), 'token')}, {c.finish_reason})" for c in self.completions
        )
        return f"Generation({len(self.prompt_ids)} prompt tokens: {answers})"

    def or_raise(self) -> "Generation":
        """Return self; AnswerError if an answer ended because no token could be sampled."""
        for completion in self.completions:
            if completion.failure is not None:
                raise completion.failure
        return self


@dataclass
class RowText:
    """The text of an answer while it is generated.

    Attributes:
        tokenizer: Decodes the ids.
        params: Sampling parameters, of which stop strings, `logprobs` and the grammar matter here.
        index: Index of the answer, 0 to n - 1.
        stop_ids: Ids that end the answer and have no text.
        begins: Whether the answer starts a new text instead of continuing the prompt's. Some vocabularies put a space
            before a text, which is removed then.
        tools: The tools whose calls are parsed; the control tokens that introduce calls are kept in the text then.
    """

    tokenizer: Tokenizer
    params: SamplingParams
    index: int
    stop_ids: frozenset[int]
    begins: bool
    tools: ToolRequest | None = None
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: EndReason | None = None
    failure: AnswerError | None = None
    prompt_logprobs: PromptLogprobs | None = None
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start decoding."""
        self._is_held = self.params.grammar is not None  # a grammar accepts the whole text, so no space is removed
        continues = not self.begins or self._is_held
        openings = () if self.params.grammar is None else self.params.grammar.openings
        self._calls = None if self.tools is None else self.tools.parser(openings)
        spelled = frozenset[int]() if self._calls is None else tag_ids(self.tokenizer.special_tokens)
        self._decoder = self.tokenizer.stream(continuation=continues, spelled=spelled)
        self._stops = StopStringFilter(self.params.stop) if self.params.stop else None

    def push(self, event: TokenEvent) -> Piece:
        """Add the row's next token and return what it adds to the answer."""
        self.states.extend(event.states)
        prompt = None if event.prompt_scores is None else PromptLogprobs(self.tokenizer, event.prompt_scores)
        self.prompt_logprobs = prompt or self.prompt_logprobs
        is_text = event.token_id >= 0 and event.token_id not in self.stop_ids
        text = self._decoder.push(event.token_id) if is_text else ""
        if event.finish_reason is not None and self.params.grammar is None:  # no grammar accepts half a character
            text += self._decoder.finish()
        self.finish_reason = event.finish_reason
        if self._stops is not None:
            text = self._until_stop_string(self._stops, text)
        deltas = (ContentDelta(text),) if text else ()
        if self._calls is not None:
            text, deltas = self._divide(self._calls, text)
        self.texts.append(text)

        if event.finish_reason == "error":
            self.failure = event.failure or AnswerError(NoToken(event.token_id).message)
            return Piece(text, (), (), "error", self.index, deltas, states=event.states)

        ids = (event.token_id,) if event.token_id >= 0 else ()
        logprobs: tuple[TokenLogprob, ...] = ()
        if ids and self.params.logprobs is not None:
            text_of_id = self.tokenizer.token_text
            top = tuple(Alternative(i, text_of_id(i), logprob) for i, logprob in event.top)
            logprobs = (TokenLogprob(event.token_id, text_of_id(event.token_id), event.logprob, top),)
        self.token_ids.extend(ids)
        self.logprobs.extend(logprobs)
        matched = None if self._stops is None else self._stops.matched
        return Piece(text, ids, logprobs, self.finish_reason, self.index, deltas, matched, prompt, event.states)

    def _until_stop_string(self, stops: StopStringFilter, text: str) -> str:
        """Return the text up to a stop string, and set the finish reason if there is one."""
        if not self._is_held and len(self.token_ids) >= self.params.min_tokens:
            text = stops.push(text)
        if stops.stopped:
            self.finish_reason = "stop"
        if not self._is_held and self.finish_reason is not None:
            text += stops.finish()
        return text

    def _divide(self, calls: ToolCallParser, text: str) -> tuple[str, tuple[Delta, ...]]:
        """Divide text into content and tool calls; return the content and all deltas, and set the finish reason."""
        deltas = calls.push(text)
        if calls.is_done and self.finish_reason is None:
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            deltas += calls.finish()
        if self._is_held and self._stops is not None:
            deltas = self._until_stop(self._stops, deltas)
        if self.finish_reason == "stop" and calls.calls and not self._is_stopped:
            self.finish_reason = "tool_calls"
        return text_of(deltas), tuple(deltas)

    @property
    def _is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stops is not None and self._stops.stopped

    def _until_stop(self, stops: StopStringFilter, deltas: Sequence[Delta]) -> list[Delta]:
        """Return the deltas before a stop string, which ends the answer; stop strings are ignored within calls."""
        kept: list[Delta] = []
        for delta in deltas:
            is_content = isinstance(delta, ContentDelta)
            if text := stops.push(delta.text) if is_content else stops.finish():
                kept.append(ContentDelta(text))
            if not is_content and not stops.stopped:
                kept.append(delta)
        if self.finish_reason is not None and (text := stops.finish()):
            kept.append(ContentDelta(text))
        if stops.stopped:
            self.finish_reason = "stop"
        return kept

    def pieces(self, events: Iterable[TokenEvent]) -> Iterator[Piece]:
        """Yield the pieces of the row's events, up to the end; AnswerError if no token could be sampled."""
        for event in events:
            piece = self.push(event)
            if self.failure is not None:
                raise self.failure
            yield piece
            if piece.finish_reason is not None:
                return

    def completion(self) -> Completion:
        """Return the finished answer."""
        assert self.finish_reason is not None
        logprobs = None if self.params.logprobs is None else tuple(self.logprobs)
        return Completion(
            "".join(self.texts),
            tuple(self.token_ids),
            logprobs,
            self.finish_reason,
            self.params.seed,
            None if self.failure is None else str(self.failure),
            () if self._calls is None or (self._is_held and self._is_stopped) else self._calls.calls,
            None if self._stops is None else self._stops.matched,
            tuple(self.states),
            self.failure,
        )


def row_texts(
    tokenizer: Tokenizer,
    params: Sequence[SamplingParams],
    stop_ids: frozenset[int],
    begins: Sequence[bool],
    tools: ToolRequest | None = None,
) -> tuple[list[RowText], list[int]]:
    """Return a `RowText` for each row of `generate_tokens`, and the index of each row's prompt."""
    rows: list[RowText] = []
    prompt_of: list[int] = []
    for prompt_idx, prompt_params in enumerate(params):
        for index, single in enumerate(prompt_params.rows()):
            stops = stop_ids | frozenset(prompt_params.stop_token_ids)
            rows.append(RowText(tokenizer, single, index, stops, begins[prompt_idx], tools))
            prompt_of.append(prompt_idx)
    return rows, prompt_of


def stop_ids_of(config: ModelConfig, tokenizer: Tokenizer | None, recommended: Sequence[int]) -> frozenset[int]:
    """Return the ids that end an answer: from the model's files, by their spelling, and from the chat format."""
    ids = {*config.eos_token_id, *recommended}
    if tokenizer is not None:
        ids.update(tokenizer.special.ends)
        if tokenizer.chat_format is not None:
            ids.update(tokenizer.chat_format.stop_ids)
    return frozenset(ids)
