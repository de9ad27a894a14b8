"""From tokens to text: pieces of an answer, and the whole.

Each row's ids become text that never splits a character, stops at stop strings even where they cross tokens, and leaves
out the tokens that only mean "stop". Where there are tools, the text is divided into content and calls.

Every protocol words a `Piece` in its own way. `Piece.deltas` are what it adds, in order: `ContentDelta`, and of
each call `CallBegin`, `CallArguments` and `CallEnd`. The last piece of an answer says why it ends:

    for delta in piece.deltas:
        match delta:
            case ContentDelta(text): ...                    # never empty
            case CallBegin(index, call_id, name): ...       # calls count from 0, and never overlap
            case CallArguments(index, fragment): ...        # joined, the text of a JSON object
            case CallEnd(index, is_complete): ...           # not complete: the answer broke off or went wrong in it
    if piece.finish_reason is not None: ...                 # "tool_calls" where it ends by itself and has calls

However the text is cut into tokens, the deltas, joined, are the same, and the same as `Completion`'s.
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
    """A possible token: id, text as tables show it, and natural log-probability before sampling parameters."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """The token that came, and the most probable ones at that place, as many as `logprobs` asked for, best first."""

    top: tuple[Alternative, ...]


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """An entry for each token of a prompt; None for the first, as nothing comes before it.

    A prompt may be long, so entries are made when they are looked at.
    """

    def __init__(self, tokenizer: Tokenizer, scores: PromptScores) -> None:
        self._tokenizer, self._scores = tokenizer, scores

    @property
    def ids(self) -> Sequence[int]:
        """The prompt's tokens."""
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
        mine, theirs = self._scores, other._scores
        return list(mine.ids) == list(theirs.ids) and all(
            np.array_equal(getattr(mine, name)[1:], getattr(theirs, name)[1:])
            for name in ("logprobs", "top_ids", "top_logprobs")
        )

    def _entry(self, place: int) -> TokenLogprob | None:
        if place == 0:
            return None
        scores, text = self._scores, self._tokenizer.token_text
        top_ids, top_logprobs = scores.top_ids[place].tolist(), scores.top_logprobs[place].tolist()
        top = tuple(Alternative(i, text(i), logprob) for i, logprob in zip(top_ids, top_logprobs, strict=True))
        token_id = scores.ids[place]
        return TokenLogprob(token_id, text(token_id), float(scores.logprobs[place]), top)


EndReason = FinishReason | Literal["tool_calls"]
"""Why an answer ends: as the engine says it, or "tool_calls" where it ends by itself ("stop") and has called tools."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to an answer.

    >>> piece = next(llama.stream("To be", temperature=0))
    >>> piece.text, len(piece.token_ids), piece.finish_reason
    (' ', 1, None)

    Attributes:
        text: Complete characters that can be shown now; often empty while a character, a stop string or what may be a
            call goes on. Calls are no part of it.
        logprobs: One entry for each id if `logprobs` was asked for, else empty.
        finish_reason: "stop", "length", "tool_calls" or "error" with the last piece, else None.
        index: Which of the `n` answers it belongs to.
        deltas: What it adds, text and calls, in order.
        stop_string: The stop string that ends the answer, with the last piece.
        prompt_logprobs: Of the prompt, with the first piece of an answer, if they were asked for.
        states: Hidden states that were asked for and came with it.
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
        text: Its text, without calls, stop string or stop token.
        token_ids: All ids that were generated, a stop id included.
        logprobs: One entry for each id if `logprobs` was asked for, else None.
        finish_reason: "stop" at a stop id, a stop string or a grammar's end, "tool_calls" if it has calls there,
            "length" at `max_tokens` or the end of the context, "error" where no token could be chosen.
        seed: With this seed the same request gives this answer again.
        error: Why it ended with "error", else None.
        tool_calls: The calls of tools; the last may be incomplete where the answer broke off.
        stop_string: The stop string that ended it, or None.
        states: The hidden states that were asked for, of tokens that were computed.
        failure: The error that `error` is the message of, or None.
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
    """Return an answer as a dialog's message, as OpenAI's API has it.

    A call that broke off has no arguments that could be given back to the model, and is left out.
    """
    complete = [call.to_openai() for call in calls if call.is_complete]
    called = {"tool_calls": complete} if complete else {}
    return {"role": "assistant", "content": text or (None if complete else ""), **called}


@dataclass(frozen=True, slots=True, repr=False)
class Generation:
    """What one prompt gave: its ids as the model saw them, `n` answers, and its log-probabilities if asked for.

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
        """The first answer's calls of tools."""
        return self.completions[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The first answer as the dialog's next message."""
        return self.completions[0].message

    def __str__(self) -> str:
        """Return the answers' texts, with an empty line between two."""
        return "\n\n".join(completion.text for completion in self.completions)

    def __repr__(self) -> str:
        """Show each answer's text, length and end; ids and log-probabilities are in the attributes."""
        shown = ", ".join(
            f"{c.text!r} ({counted(len(c.token_ids), 'token')}, {c.finish_reason})" for c in self.completions
        )
        return f"Generation({len(self.prompt_ids)} prompt tokens: {shown})"

    def or_raise(self) -> "Generation":
        """Return this, if its answers have come to an end; AnswerError if no token could be chosen, and why."""
        for completion in self.completions:
            if completion.failure is not None:
                raise completion.failure
        return self


@dataclass
class RowText:
    """One row's text in the making.

    Attributes:
        params: The row's own; its stop strings and `logprobs` are read.
        index: Which of the prompt's `n` answers this is.
        stop_ids: Ids that end the row and have no text.
        begins: The row begins a text of its own, rather than continuing the prompt's: some vocabularies put a space
            before a text, which is then not part of it.
        tools: Whose calls the text is searched for. The control tokens that announce them are spelled then.
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
        """Begin decoding. What a grammar accepts is all of the text, with no space taken away."""
        self._is_held = self.params.grammar is not None
        continues = not self.begins or self._is_held
        openings = () if self.params.grammar is None else self.params.grammar.openings
        self._calls = None if self.tools is None else self.tools.parser(openings)
        spelled = frozenset[int]() if self._calls is None else tag_ids(self.tokenizer.special_tokens)
        self._decoder = self.tokenizer.stream(continuation=continues, spelled=spelled)
        self._stops = StopStringFilter(self.params.stop) if self.params.stop else None

    def push(self, event: TokenEvent) -> Piece:
        """Take the row's next token and return what it adds."""
        self.states.extend(event.states)
        prompt = None if event.prompt_scores is None else PromptLogprobs(self.tokenizer, event.prompt_scores)
        self.prompt_logprobs = prompt or self.prompt_logprobs
        is_text = event.token_id >= 0 and event.token_id not in self.stop_ids
        text = self._decoder.push(event.token_id) if is_text else ""
        if event.finish_reason is not None and self.params.grammar is None:  # no half character, which none accepts
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
        """Return what can be shown of a text; where a stop string ends the answer, note it."""
        if not self._is_held and len(self.token_ids) >= self.params.min_tokens:
            text = stops.push(text)
        if stops.stopped:
            self.finish_reason = "stop"
        if not self._is_held and self.finish_reason is not None:
            text += stops.finish()
        return text

    def _divide(self, calls: ToolCallParser, text: str) -> tuple[str, tuple[Delta, ...]]:
        """Return what of a text is said, and that with the calls; where calls end the answer, note it."""
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
        """Whether a stop string has ended it."""
        return self._stops is not None and self._stops.stopped

    def _until_stop(self, stops: StopStringFilter, deltas: Sequence[Delta]) -> list[Delta]:
        """Return what comes before a stop string, which ends the answer; within calls there is none."""
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
        """Yield what each of the row's tokens adds, to the answer's end.

        AnswerError if no token could be chosen, and why.
        """
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
    """Return a `RowText` for every row of `generate_tokens`, and the prompt that each row answers."""
    rows: list[RowText] = []
    prompt_of: list[int] = []
    for prompt_idx, wanted in enumerate(params):
        for index, single in enumerate(wanted.rows()):
            stops = stop_ids | frozenset(wanted.stop_token_ids)
            rows.append(RowText(tokenizer, single, index, stops, begins[prompt_idx], tools))
            prompt_of.append(prompt_idx)
    return rows, prompt_of


def stop_ids_of(config: ModelConfig, tokenizer: Tokenizer | None, recommended: Sequence[int]) -> frozenset[int]:
    """Return the ids that end an answer: by the model's own files, by their spelling, and by the dialog format."""
    ids = {*config.eos_token_id, *recommended}
    if tokenizer is not None:
        ids.update(tokenizer.special.ends)
        if tokenizer.chat_format is not None:
            ids.update(tokenizer.chat_format.stop_ids)
    return frozenset(ids)
