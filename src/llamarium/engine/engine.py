"""The engine: runs steps; each yields one token per running sequence. Never torch.

A request gets the same tokens whatever company it has: where the runner gives each token the bits that it has alone
(`Runner.is_row_exact`), neither other requests, nor chunks, nor what was found in the cache, nor a preemption change
them. Draws depend on the request alone (`sampling/steps.py`).
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from llamarium.engine.counts import Counts, EngineSnapshot
from llamarium.engine.output import OutputProcessor
from llamarium.engine.pace import MAX_CHUNK_TOKENS, Pace
from llamarium.engine.pooling import HIDDEN, Pool, States
from llamarium.engine.prefix import Key, PrefixIndex, root_key
from llamarium.engine.proposers.base import ProposerPolicy
from llamarium.engine.request import (
    Deadlines,
    EngineSequence,
    Request,
    StepItem,
    TokenEvent,
    check_inside,
    check_prompt,
    limit_of,
    no_room,
)
from llamarium.engine.scheduler import Scheduler, capacity_blocks
from llamarium.engine.scoring import PromptScores, most_logits
from llamarium.engine.tiers.disk_cache import DiskCache
from llamarium.engine.tiers.disk_tier import DiskTier
from llamarium.errors import OptionError, show_value
from llamarium.runtime.batch import BlockTable, Span, pack
from llamarium.runtime.intervention import edits_key
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.runtime.taps import Taps
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler

SERVING_BLOCK_SIZE = 32
"""Slots of a block: half of one is wasted for each sequence (docs/decisions/0014 has what smaller ones cost)."""

MAX_NUM_SEQS = 64
"""Sequences side by side, by default."""


class Engine:
    """Answers requests side by side, for one thread (`engine/thread.py` serves several).

    Args:
        kv_cache_dtype: What keys and values are kept in.
        max_num_seqs: How many sequences run side by side at most; the others wait.
        block_size: Slots of a block.
        use_cache: False recomputes everything for every token: for comparison, never for speed.
        shares: Reuse keys and values of equal tokens. False is for comparison.
        chunk: Prompt tokens in a step at most. None chooses by measured step times, so that decoding goes on smoothly;
            where the runner is not row-exact, results would depend on them, so it is `MAX_CHUNK_TOKENS`.
        proposer: Proposes tokens ahead (`engine/proposers/`): the same events, sooner.
        disk: Where whole blocks go besides memory, and come back from.
        clock: Returns seconds.

    Attributes:
        live: The numbers of requests with sequences that have not ended.
        was_mixed: Whether the last step read a prompt beside sequences that decode.

    Raises:
        MemoryBudgetError: If there is no memory for the cache.
        OptionError: If `max_num_seqs`, `num_blocks` or `chunk` is less than 1; with `disk`, if the runner's keys and
            values have not the same bits in every pass.
    """

    def __init__(
        self,
        runner: Runner,
        num_blocks: int,
        *,
        kv_cache_dtype: CacheDtype = "auto",
        max_num_seqs: int = MAX_NUM_SEQS,
        block_size: int = SERVING_BLOCK_SIZE,
        use_cache: bool = True,
        shares: bool = True,
        chunk: int | None = None,
        proposer: ProposerPolicy | None = None,
        disk: DiskCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("num_blocks", num_blocks), ("chunk", chunk)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {show_value(value)}; expected at least 1")
        self.runner, self.counts, vocab_size = runner, Counts(), runner.config.vocab_size
        self.cache = runner.new_cache(num_blocks, kv_cache_dtype, block_size)
        self._kv_cache_dtype: CacheDtype = kv_cache_dtype
        kv_dtype = runner.kv_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        self.disk = None if disk is None else DiskTier(disk, runner, self.cache, kv_dtype)
        self.prefix_index, most = PrefixIndex(num_blocks, block_size, self.disk), most_logits(vocab_size)
        self._scheduler = Scheduler(
            self.prefix_index, self.cache.copy_block, max_num_seqs, most, shares=shares and use_cache
        )
        self._sampler = Sampler(vocab_size)
        self.live: Collection[int] = self._scheduler.live
        self._output = OutputProcessor(self._scheduler, self._sampler, self.counts, use_cache=use_cache)
        self._pace, self._clock = Pace(), clock
        self.was_mixed = False
        fixed = chunk if chunk is not None or runner.is_row_exact else MAX_CHUNK_TOKENS
        self._chunk: Callable[[int, Sequence[int]], int] = self._pace.chunk if fixed is None else lambda _, __: fixed
        self._deadlines, self._numbers = Deadlines(), itertools.count()
        self.use_proposer(proposer)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.cache.num_blocks

    def snapshot(self) -> EngineSnapshot:
        """Return what there is now of sequences and blocks, and a copy of the counts."""
        num_live = sum(map(len, self._scheduler.live.values()))
        num_running, num_blocks = len(self._scheduler.running), self.cache.num_blocks
        num_used = num_blocks - self.prefix_index.pool.num_free
        return EngineSnapshot(num_running, num_live - num_running, num_used, num_blocks, replace(self.counts))

    @property
    def sequences(self) -> list[EngineSequence]:
        """All sequences that have not ended, by arrival: to look at, in the engine's thread."""
        return [sequence for sequences in self._scheduler.live.values() for sequence in sequences]

    @property
    def max_tokens(self) -> int:
        """The most tokens of a request, prompt and answer together, that context and cache have room for."""
        return min(self.runner.config.max_position_embeddings, self.num_blocks * self.cache.block_size + 1)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, and no event."""
        return not self._scheduler.live and not self._output.events

    def add(self, request: Request) -> int:
        """Take a request and return its number; `step` answers it; errors as `prepare`."""
        return self.start(self.prepare(request))

    def prepare(self, request: Request) -> list[EngineSequence]:
        """Check a request and return the sequences that `start` begins; any thread may call this.

        InputError for an empty prompt or an id outside the vocabulary, ContextLengthError if the prompt leaves no room
        in the context, MemoryBudgetError if the whole cache has not room for it, SamplingError if the parameters name
        ids or counts outside the vocabulary. InputError or OptionError for edits that this model cannot have.
        """
        prompt, params, config = request.prompt_ids, request.params, self.runner.config
        check_prompt(config, prompt, room=0 if request.pooling else min(1, params.max_tokens))
        limit = limit_of(config, request)
        room = max(limit, len(prompt) + 1)  # the prompt's last token is computed, an answer's is not
        if capacity_blocks(room, self.cache.block_size) > self.cache.num_blocks:
            raise no_room(request, self.num_blocks * self.cache.block_size, self.max_tokens)
        if request.edits and not self.runner.takes_edits:
            raise OptionError(f"{self.runner.name} take no edits; load the model whose weights they use")
        if request.edits or request.places is not None:
            check_inside(config, request)
        stops = frozenset((*request.stop_ids, *params.stop_token_ids))
        number = next(self._numbers)
        root = self.root_of(request)
        sequences: list[EngineSequence] = []
        for row, single in enumerate(params.rows()):
            constraint = None if request.grammar is None else request.grammar.begin(stops)
            sampling = SamplingRow(single, prompt, config.vocab_size, constraint=constraint, stops=stops)
            scores = None if params.prompt_logprobs is None else PromptScores(prompt, params.prompt_logprobs)
            made = EngineSequence(
                number, row, request, sampling, limit, stops, BlockTable(self.prefix_index.pool), root
            )
            made.scores, made.pool = scores, None if request.pooling is None else Pool(request.pooling)
            made.states = None if request.places is None else States(request.places)
            sequences.append(made)
        return sequences

    def root_of(self, request: Request) -> Key:
        """Return the key before a request's first block; on disk it says by content what else the numbers depend on."""
        adapter = request.adapter if self.disk is None else self.disk.identity(self.runner, request.adapter)
        return root_key(adapter, request.salt, *([edits_key(request.edits)] if request.edits else ()))

    def start(self, sequences: list[EngineSequence]) -> int:
        """Begin what `prepare` has returned; return the request's number."""
        number = sequences[0].number
        self._scheduler.add(sequences)
        if (deadline_s := sequences[0].request.deadline_s) != math.inf:
            self._deadlines.add(deadline_s, number, self._scheduler.live)
        return number

    def abort(self, number: int, row: int | None = None) -> None:
        """Abort a request, or one of its sequences, without emitting an event; one that has ended stays as it is."""
        for sequence in list(self._scheduler.live.get(number, ())):
            if row is None or sequence.row == row:
                self._scheduler.remove(sequence)

    def step(self) -> list[TokenEvent]:
        """Run the next step and return its events: tokens of the sequences whose tokens are all computed.

        MemoryBudgetError if there is no memory for the step; after `abort_largest` the next one may have it.
        """
        for number in self._deadlines.due(self._clock()):
            for sequence in list(self._scheduler.live.get(number, ())):
                self._output.end(sequence, "timeout", NoToken.TIMED_OUT)
        items = self._scheduler.schedule(self._chunk)
        if items:
            self._run(items)
        events, self._output.events = self._output.events, []
        return events

    def reserve(self, num_tokens: int) -> None:
        """Make room for a request of so many tokens in all; the cache grows if need be.

        MemoryBudgetError if there is not that much memory.
        """
        num_blocks, before = capacity_blocks(num_tokens, self.cache.block_size), self.num_blocks
        if num_blocks > before:
            most = capacity_blocks(self.runner.config.max_position_embeddings, self.cache.block_size)
            self.cache.grow(max(num_blocks, min(2 * num_blocks, most)))
            self.prefix_index.pool.add(self.num_blocks - before)

    def use_proposer(self, policy: ProposerPolicy | None) -> None:
        """Propose tokens ahead from now on, or do not; while no request is live. A draft model needs memory."""
        proposer = self._scheduler.proposer
        if proposer is None or proposer.policy is not policy:
            how = self.num_blocks, self.cache.block_size, self._kv_cache_dtype, self._clock
            self._scheduler.proposer = None if policy is None else policy.open(*how)
        else:
            proposer.reserve(self.num_blocks)

    def fill_cache_for_benchmark(self, ids: Sequence[int]) -> None:
        """Mark tokens as computed without running them: each block holds what the first does.

        MemoryBudgetError if the cache has no room for them.
        """
        size, table, parent = self.cache.block_size, BlockTable(self.prefix_index.pool), root_key(-1, "")
        table.reserve(len(ids))
        self.runner.run(pack([Span(ids[:size], 0, table.blocks, num_logits=0)], size), self.cache)
        for place, block in enumerate(table.blocks):
            if place:
                self.cache.copy_block(table.blocks[0], block)
            parent = self.prefix_index.enter(parent, block, ids[place * size : (place + 1) * size])
        table.release()

    def abort_largest(self) -> int | None:
        """Abort the request with the most uncomputed tokens, after a step had no memory; return its number, if any."""
        running = self._scheduler.running
        if not running:
            return None
        number = max(running, key=lambda sequence: (sequence.num_uncomputed, sequence.number, sequence.row)).number
        self.abort(number)
        return number

    def close(self) -> None:
        """Write to disk what is left to write, for some seconds at most; an engine without a disk needs no end."""
        if self.disk is not None:
            self.disk.close()

    def run(self) -> Iterator[TokenEvent]:
        """Yield the events of all requests, until none is left."""
        while not self.is_idle:
            yield from self.step()

    def _run(self, items: list[StepItem]) -> None:
        is_tapped = any(one.pool is not None or one.states is not None for one, _, _ in items)
        taps = _taps(items) if is_tapped else None
        batch = pack([item.span for item in items], self.cache.block_size)
        begin = self._clock()
        logits_WV = self.runner.run(batch, self.cache, taps)
        seconds = max(1e-9, self._clock() - begin)

        num_tokens = num_decoded = num_decoding = num_drafted = 0
        for sequence, _, span in items:
            num_tokens += len(span.token_ids)
            if sequence.num_uncomputed == 1:
                num_decoding += 1
                num_decoded += len(span.token_ids)
                num_drafted += sequence.draft.num_scheduled
        self.was_mixed = 0 < num_decoded < num_tokens
        counts, proposer = self.counts, self._scheduler.proposer
        counts.steps, counts.pass_s = counts.steps + 1, counts.pass_s + seconds
        counts.drafted_tokens, counts.preempted = counts.drafted_tokens + num_drafted, self._scheduler.num_preempted
        self._pace.record(num_decoded, num_tokens - num_decoded, seconds)
        if proposer is not None and num_decoding:
            proposer.policy.count_pass(num_drafted)
            if num_decoding == len(items):  # a prompt would make the step longer
                proposer.policy.record_pass(len(items), num_drafted, seconds)
        self._output.process(items, logits_WV, taps)


def _taps(items: Sequence[StepItem]) -> Taps | None:
    """Return what a step's pass has to hand out; None is nothing after all."""
    wanted = {HIDDEN for item in items if item.sequence.pool is not None}
    for sequence, end, span in items:
        wanted.update(() if sequence.states is None else sequence.states.keys(span.start, end))
    return Taps(wanted) if wanted else None
