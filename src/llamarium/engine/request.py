"""Requests to the engine, the sequences that answer them, and its events: ids, never text. Never torch.

A sequence yields tokens, unless its request is for the prompt's vector (`pooling.py`). The prompt's scores
(`scoring.py`) come with its first token.
"""

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from llamarium.config import ModelConfig
from llamarium.engine.pooling import Places, Pool, Pooling, State, States, Vector
from llamarium.engine.prefix import Key
from llamarium.engine.scoring import PromptScores
from llamarium.errors import (
    AnswerError,
    ContextLengthError,
    InputError,
    MemoryBudgetError,
    OptionError,
    counted,
    show_value,
)
from llamarium.runtime.batch import BlockTable, Span
from llamarium.runtime.intervention import Edit, check_edit
from llamarium.runtime.runner import Logits
from llamarium.sampling.constraint import CompiledGrammar
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler

FinishReason = Literal["stop", "length", "error", "timeout"]

_FEW_DEADLINES = 64  # that are kept without looking through them


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how to answer it.

    Attributes:
        params: Sampling parameters; `n` answers share the prompt.
        stop_ids: Ids that end an answer, besides the parameters' own; the stop id itself is in the events.
        adapter: Which of the runner's adapters is used, -1 for none.
        salt: Keys and values are shared only between requests with the same salt.
        grammar: The compiled grammar of `params`, if they have one.
        deadline_s: When it ends though it is not finished, by the engine's clock.
        pooling: If set, return a pooled vector; `params` is ignored.
        edits: Of what the model computes for this request alone, in order.
        places: Where its hidden states are wanted.
        ngram_pool: Drafts are found in texts of requests with the same name here, and no salt; None keeps this one's
            text out of all pools.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    stop_ids: Collection[int] = ()
    adapter: int = -1
    salt: str = ""
    grammar: CompiledGrammar | None = None
    deadline_s: float = math.inf
    pooling: Pooling | None = None
    edits: tuple[Edit, ...] = ()
    places: Places | None = None
    ngram_pool: str | None = ""


class TokenEvent(NamedTuple):
    """One new token of one answer, or its end without one; `request` is its number, and `row` which of its answers.

    Attributes:
        token_id: The token; below 0 if there is none: a `NoToken`, which says why.
        logprob: Its log-probability under the model, before any sampling parameter; NaN unless asked for.
        top: The most probable (id, logprob) pairs, as many as `logprobs` asked for.
        finish_reason: "stop" after a stop id or where a grammar's text is complete, "length" at `max_tokens` or the end
            of the context, "error" where no token could be chosen, "timeout" at the request's deadline, else None.
        num_cached: How many of the prompt's tokens were found in the prefix cache.
        num_disk: How many of those came from disk.
        prompt_scores: The prompt's, with an answer's first token, if the request asked for them.
        vector: The prompt's, if the request asked for it; it ends with "stop" then, and with "error" if hidden states
            are not finite.
        states: Hidden states that have come since the answer's last event, if the request asked for some.
        failure: With "error", what a caller's function did, if that was it.
    """

    request: int
    row: int
    token_id: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    num_disk: int = 0
    prompt_scores: PromptScores | None = None
    vector: Vector | None = None
    states: tuple[State, ...] = ()
    failure: AnswerError | None = None


def limit_of(config: ModelConfig, request: Request) -> int:
    """Return the tokens, prompt included, at which an answer to a request ends."""
    return min(len(request.prompt_ids) + request.params.max_tokens, config.max_position_embeddings)


def room_of(config: ModelConfig, request: Request) -> int:
    """Return for how many tokens there must be room: an answer's last one is never computed, the prompt's is."""
    return max(limit_of(config, request), len(request.prompt_ids) + 1)


def check_prompt(config: ModelConfig, prompt: Sequence[int], name: str = "the prompt", *, room: int = 1) -> None:
    """Refuse a prompt that the model cannot continue by `room` tokens; `name` is the prompt's, for messages.

    InputError for an empty prompt or an id outside the vocabulary, ContextLengthError if it leaves no room in the
    context.
    """
    if not prompt:
        raise InputError(f"{name} has no tokens; expected at least one (a model with a BOS token adds it)")
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        span = f"{min(prompt)}..{max(prompt)}"
        raise InputError(f"{name} has token ids {span}; expected 0..{config.vocab_size - 1}")
    if len(prompt) + room > config.max_position_embeddings:
        raise too_long(len(prompt), None, config.max_position_embeddings, name)


def check_timeout(timeout_s: object) -> None:
    """Raise an OptionError unless `timeout_s` is None or seconds of 0 or more."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:  # false for NaN
        raise OptionError(f"timeout_s is {show_value(timeout_s)}; expected seconds, 0 or more")


def check_inside(config: ModelConfig, request: Request) -> None:
    """Refuse edits and hidden states of what there is not: InputError."""
    for edit in request.edits:
        check_edit(config, edit)
    layers, positions = request.places or ((), ())
    num_tokens = room_of(config, request) - 1  # an answer's last one is never computed
    for name, wanted, size in (("layer", layers, config.num_hidden_layers), ("position", positions, num_tokens)):
        for one in wanted:
            if not 0 <= one < size:
                raise InputError(f"hidden states are asked for of {name} {one}; expected 0 to {size - 1}")


def too_long(num_prompt: int, wanted: int | None, most: int, name: str = "the prompt") -> ContextLengthError:
    """Return the error of a prompt that does not fit, in words that clients of OpenAI's and Anthropic's API look for.

    The prompt has `num_prompt` tokens, `wanted` more are asked for (None is any number), and `most` fit in all.
    """
    asks = "" if wanted is None else f" and asks for {wanted} more, {num_prompt + wanted} together"
    has = counted(num_prompt, "token").replace(",", "")  # clients read the numbers, as in OpenAI's errors
    return ContextLengthError(
        f"{name} is too long: it has {has}{asks}; this model's maximum context length is {most} tokens, "
        "prompt and answer together: shorten the prompt, or ask for fewer tokens"
    )


def no_room(request: Request, num_slots: int, most: int) -> MemoryBudgetError:
    """Return the error of a request for which a whole cache of `num_slots`, `most` tokens in all, has not room."""
    num_tokens = len(request.prompt_ids)
    if request.pooling is not None:
        return MemoryBudgetError(
            f"the text has {counted(num_tokens, 'token')}, and the cache has room for {num_slots}; use a shorter text"
        )
    return MemoryBudgetError(
        f"the prompt has {counted(num_tokens, 'token')} and asks for {request.params.max_tokens} more, "
        "and the cache has room for "
        f"{most}; shorten the prompt, or ask for fewer tokens"
    )


class Deadlines:
    """The deadlines of requests, by the engine's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, deadline_s: float, number: int, live: Collection[int]) -> None:
        """Note a request's deadline; those of ended requests are dropped once they are most of what is kept."""
        if len(self._heap) > 2 * len(live) + _FEW_DEADLINES:
            self._heap = [one for one in self._heap if one[1] in live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, number))

    def due(self, now_s: float) -> Iterator[int]:
        """Yield the requests whose deadline has passed, ended ones included."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[1]


@dataclass(slots=True)
class Draft:
    """Proposed next tokens of one sequence; `num_scheduled` of them run in the step."""

    ids: list[int] = field(default_factory=list[int])
    num_scheduled: int = 0


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One of a request's answers in the making; `number` is the request's, by arrival, and `row` which of its answers.

    Attributes:
        limit: Tokens, prompt included, at which it ends.
        stops: Ids that end it.
        table: Its blocks of the cache.
        root: The key that its first block goes on from.
        ids: Its tokens: the prompt, then the chosen ones; empty before it is first admitted.
        num_computed: How many of them have their keys and values in the cache.
        keys: Prefix keys of its whole blocks.
        promised: Keys of the whole blocks that it is going to fill, the next one last.
        waits_for: Key of a block that another sequence is going to fill, and that this one waits for.
        num_sought: How many of the prompt's tokens were looked for in the cache.
        num_cached: How many of them were there, in memory or on disk; -1 before it is first admitted.
        num_disk: How many of those came from disk.
        is_on_disk: Whether its next tokens may be there.
        leader: The sequence that computes the prompt for this one, of several answers to it.
        followers: The sequences that wait for this one to compute the prompt.
        scores: Gathers the prompt's log-probabilities; None if they are not wanted, or have been delivered.
        pool: Gathers hidden states for the prompt's vector; None if tokens are wanted.
        states: Gathers hidden states; None if none are wanted.
        num_overtaken: How many were admitted before it while it waited for memory.
        free_blocks_at_refusal: Free blocks when there was last no room for it; -1 if there was.
    """

    number: int
    row: int
    request: Request
    sampling: SamplingRow
    limit: int
    stops: frozenset[int]
    table: BlockTable
    root: Key
    ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    keys: list[Key] = field(default_factory=list[Key])
    promised: list[Key] = field(default_factory=list[Key])
    waits_for: Key | None = None
    num_sought: int = 0
    num_cached: int = -1
    num_disk: int = 0
    is_on_disk: bool = False
    leader: "EngineSequence | None" = None
    followers: "list[EngineSequence]" = field(default_factory=list["EngineSequence"])
    scores: PromptScores | None = None
    pool: Pool | None = None
    states: States | None = None
    draft: Draft = field(default_factory=Draft)
    finish_reason: FinishReason | None = None
    num_overtaken: int = 0
    free_blocks_at_refusal: int = -1

    @property
    def num_uncomputed(self) -> int:
        """Tokens without keys and values: 1 while it decodes, more while its prompt is read."""
        return len(self.ids) - self.num_computed

    @property
    def last_key(self) -> Key:
        """Prefix key of its last whole block, or its root."""
        return self.keys[-1] if self.keys else self.root

    @property
    def num_searchable(self) -> int:
        """How many of its first tokens need not be computed: not the last one, nor those whose outputs are wanted."""
        if self.pool is not None and self.pool.kind == "mean":
            return 0
        skipped = None if self.scores is None else self.scores.num_skipped
        missing = None if self.states is None else self.states.first_missing
        ends = (len(self.ids or self.request.prompt_ids) - 1, skipped, missing)
        return min(end for end in ends if end is not None)

    @property
    def is_tapped(self) -> bool:
        """Whether hidden states of it are still to come."""
        return self.states is not None and self.states.first_missing is not None

    def item(self, end: int) -> "StepItem":
        """Return its uncomputed tokens before `end`, and its draft after the last one, as a part of a step."""
        ids, num_logits = self.ids[self.num_computed : end], 0
        if end == len(self.ids) and self.pool is None:
            num_logits = 1 + self.draft.num_scheduled
            ids += self.draft.ids[: self.draft.num_scheduled]
        if self.scores is not None:
            num_logits += self.scores.num_wanted(self.num_computed, end)
        request, start = self.request, self.num_computed
        return StepItem(self, end, Span(ids, start, self.table.blocks, num_logits, request.adapter, request.edits))

    def score(self, item: "StepItem", logits_WV: Logits, row: int, sampler: Sampler) -> int:
        """Score the prompt's tokens that an item ran, from the step's logits, of `row` on.

        Returns the row of the logits for the sequence's next token.
        """
        assert self.scores is not None
        num_wanted = self.scores.num_wanted(item.span.start, item.end)
        self.scores.take(logits_WV[row : row + num_wanted], sampler)
        return row + num_wanted


class StepItem(NamedTuple):
    """A sequence's part of a step: its tokens before `end`, as a span of the batch."""

    sequence: EngineSequence
    end: int
    span: Span
