"""One sequence: its tokens, how many of them are computed, where their keys and values lie, and what is wanted of it.

A sequence yields tokens, unless its request is for the prompt's vector (`pooling.py`). The prompt's scores
(`scoring.py`) come with its first token. Never torch.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from llamarium.engine.pooling import Pool, States
from llamarium.engine.prefix import Key
from llamarium.engine.request import FinishReason, Request
from llamarium.engine.scoring import PromptScores
from llamarium.runtime.batch import Span
from llamarium.runtime.blocks import BlockTable
from llamarium.runtime.runner import Logits
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler


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
