"""Engine requests, sequences and events: token ids, no text. Torch-free.

A sequence yields tokens, or one vector if its request sets `pooling` (`pooling.py`). Prompt scores (`scoring.py`) come
with its first token.
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

_FEW_DEADLINES = 64  # stale ones are not worth removing below this


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it.

    Attributes:
        prompt_ids: Token ids of the prompt.
        params: Sampling parameters; `n` answers share the prompt.
        stop_ids: Ids that end an answer, in addition to those of `params`; the stop id itself is emitted.
        adapter: Index of the runner's adapter, -1 for none.
        salt: Isolates the prefix cache: only requests with the same salt share keys and values.
        grammar: The compiled grammar of `params`, if it has one.
        deadline_s: Time by the engine's clock at which an unfinished request ends.
        pooling: If set, return a pooled vector and ignore `params`.
        edits: Edits of this request's activations, in order.
        places: Layers and positions whose hidden states are returned.
        ngram_pool: Name of the pool in which n-gram drafts are looked up, if there is no salt; None keeps this
            request's text out of all pools.
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
    """A new token of an answer, or the end of an answer without one.

    Attributes:
        request: Number of the request.
        row: Index of the answer.
        token_id: The token, or a negative `NoToken` that says why there is none.
        logprob: Log-probability of the token under the model, before sampling parameters; NaN unless requested.
        top: The most likely (id, logprob) pairs, if `logprobs` requests them.
        finish_reason: "stop" after a stop id or a complete grammar, "length" at `max_tokens` or the end of the context,
            "error" if no token could be sampled, "timeout" at the deadline; None if the answer continues.
        num_cached: Prompt tokens found in the prefix cache.
        num_disk: Prompt tokens that were read from disk.
        prompt_scores: With the first token, if the request asked for prompt log-probabilities.
        vector: The pooled vector, if requested, with finish reason "stop"; hidden states that are not finite end with
            "error" instead.
        states: Requested hidden states computed since the answer's last event.
        failure: With "error", the error of a caller's function, if that was the cause.
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
    """Return the maximum length of a request's sequences, in tokens, prompt included."""
    return min(len(request.prompt_ids) + request.params.max_tokens, config.max_position_embeddings)


def room_of(config: ModelConfig, request: Request) -> int:
    """Return how many tokens `Engine.reserve` must make room for: a pooled prompt also needs its last token's slot."""
    return max(limit_of(config, request), len(request.prompt_ids) + 1)


def check_prompt(config: ModelConfig, prompt: Sequence[int], name: str = "the prompt", *, room: int = 1) -> None:
    """Validate that the model can run a prompt and `room` more tokens; messages call it `name`.

    Raises:
        InputError: If the prompt is empty, or has an id outside the vocabulary.
        ContextLengthError: If it leaves no room in the context.
    """
    if not prompt:
        raise InputError(f"{name} has no tokens; expected at least one (a model with a BOS token adds it)")
    if min(prompt) < 0 or max(prompt) >= config.vocab_size:
        span = f"{min(prompt)}..{max(prompt)}"
        raise InputError(f"{name} has token ids {span}; expected 0..{config.vocab_size - 1}")
    if len(prompt) + room > config.max_position_embeddings:
        raise too_long(len(prompt), None, config.max_position_embeddings, name)


def check_timeout(timeout_s: object) -> None:
    """Validate that a timeout is None or a number of seconds, 0 or more; OptionError otherwise."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:  # false for NaN
        raise OptionError(f"timeout_s is {show_value(timeout_s)}; expected seconds, 0 or more")


def check_inside(config: ModelConfig, request: Request) -> None:
    """Validate the layers and positions that a request edits or taps; InputError if one is out of range."""
    for edit in request.edits:
        check_edit(config, edit)
    layers, positions = request.places or ((), ())
    num_tokens = room_of(config, request) - 1  # the last token of an answer is never computed
    for name, indices, limit in (("layer", layers, config.num_hidden_layers), ("position", positions, num_tokens)):
        for index in indices:
            if not 0 <= index < limit:
                raise InputError(f"{name} {index} of the requested hidden states is out of range 0 to {limit - 1}")


def too_long(
    num_prompt: int, max_new_tokens: int | None, max_length: int, name: str = "the prompt"
) -> ContextLengthError:
    """Return the error for a prompt that does not fit, with the phrases that OpenAI and Anthropic clients match.

    Args:
        num_prompt: Tokens of the prompt.
        max_new_tokens: Tokens requested in addition, or None.
        max_length: Tokens that fit, prompt and answer together.
        name: What messages call the prompt.
    """
    length = counted(num_prompt, "token").replace(",", "")  # clients parse the numbers, as in OpenAI's errors
    if max_new_tokens is not None:
        length += f" and asks for {max_new_tokens} more, {num_prompt + max_new_tokens} together"
    return ContextLengthError(
        f"{name} is too long: it has {length}; this model's maximum context length is {max_length} tokens, "
        "prompt and answer together: shorten the prompt, or ask for fewer tokens"
    )


def no_room(request: Request, num_slots: int, max_tokens: int) -> MemoryBudgetError:
    """Return the error for a request that does not fit into the whole KV cache.

    Args:
        request: The request.
        num_slots: Slots of the KV cache.
        max_tokens: Maximum length of a request.
    """
    num_tokens = len(request.prompt_ids)
    if request.pooling is not None:
        return MemoryBudgetError(
            f"the text has {counted(num_tokens, 'token')}, but the KV cache has room for {num_slots}; "
            "use a shorter text"
        )
    return MemoryBudgetError(
        f"the prompt has {counted(num_tokens, 'token')} and asks for {request.params.max_tokens} more, but the KV "
        f"cache has room for {max_tokens}; shorten the prompt, or ask for fewer tokens"
    )


class Deadlines:
    """The deadlines of requests, by the engine's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, deadline_s: float, number: int, live: Collection[int]) -> None:
        """Add a request's deadline; drop those of ended requests once they outnumber the live ones."""
        if len(self._heap) > 2 * len(live) + _FEW_DEADLINES:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, number))

    def due(self, now_s: float) -> Iterator[int]:
        """Yield and remove the requests whose deadline has passed, including ended ones."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[1]


@dataclass(slots=True)
class Draft:
    """Draft tokens of a sequence; the first `num_scheduled` of them run in the step."""

    ids: list[int] = field(default_factory=list[int])
    num_scheduled: int = 0


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One answer of a request while it is generated.

    Attributes:
        number: Number of the request, by arrival.
        row: Index of the answer within the request.
        sampling: Sampling state.
        limit: Maximum length in tokens, prompt included.
        stops: Ids that end it.
        table: Its blocks of the KV cache.
        root: Prefix key before its first block.
        ids: Its tokens, prompt first; empty until it is first admitted.
        num_computed: Number of its first tokens whose keys and values are in the KV cache.
        keys: Prefix keys of its whole computed blocks.
        promised: Prefix keys of the whole blocks that it is going to compute, in reverse order. Sequences with the same
            prefix wait for them.
        waits_for: Prefix key of a block that it waits for, because another sequence promised it.
        num_sought: Prompt tokens looked up in the prefix cache.
        num_cached: Prompt tokens found there, in memory or on disk; -1 until it is first admitted.
        num_disk: Prompt tokens that were read from disk.
        is_on_disk: Whether its next block may be on disk.
        leader: The answer to the same prompt that computes the prompt for this one.
        followers: The answers that wait for this one to compute the prompt.
        scores: Collects prompt log-probabilities; None if not requested, or delivered already.
        pool: Collects hidden states for the prompt's vector; None if the request is for tokens.
        states: Collects hidden states; None if not requested.
        draft: Draft tokens of the current step.
        finish_reason: Set when it ends.
        num_overtaken: Sequences admitted before it while it waited for memory.
        free_blocks_at_refusal: Free blocks when it was last refused for lack of memory, else -1.
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
        """Number of tokens without keys and values: 1 in decode, more in prefill."""
        return len(self.ids) - self.num_computed

    @property
    def last_key(self) -> Key:
        """Prefix key of its last whole block, or its root key."""
        return self.keys[-1] if self.keys else self.root

    @property
    def num_searchable(self) -> int:
        """Number of first tokens that the prefix cache may supply.

        The last token must be computed for its logits, and so must tokens whose logits or hidden states are requested.
        """
        if self.pool is not None and self.pool.kind == "mean":
            return 0
        skipped = None if self.scores is None else self.scores.num_skipped
        missing = None if self.states is None else self.states.first_missing
        ends = (len(self.ids or self.request.prompt_ids) - 1, skipped, missing)
        return min(end for end in ends if end is not None)

    @property
    def is_tapped(self) -> bool:
        """Whether some of its requested hidden states have not been computed yet."""
        return self.states is not None and self.states.first_missing is not None

    def item(self, end: int) -> "StepItem":
        """Return its part of a step: the uncomputed tokens before `end`, and the draft if `end` is its last token."""
        ids, num_logits = self.ids[self.num_computed : end], 0
        if end == len(self.ids) and self.pool is None:
            num_logits = 1 + self.draft.num_scheduled
            ids += self.draft.ids[: self.draft.num_scheduled]
        if self.scores is not None:
            num_logits += self.scores.num_wanted(self.num_computed, end)
        request, start = self.request, self.num_computed
        return StepItem(self, end, Span(ids, start, self.table.blocks, num_logits, request.adapter, request.edits))

    def score(self, item: "StepItem", logits_WV: Logits, row: int, sampler: Sampler) -> int:
        """Score the prompt tokens of an item from the step's logits, starting at `row`.

        Returns the row of the logits for the sequence's next token.
        """
        assert self.scores is not None
        num_wanted = self.scores.num_wanted(item.span.start, item.end)
        self.scores.take(logits_WV[row : row + num_wanted], sampler)
        return row + num_wanted


class StepItem(NamedTuple):
    """A sequence's part of a step: a span of the batch that computes its tokens before `end`."""

    sequence: EngineSequence
    end: int
    span: Span
