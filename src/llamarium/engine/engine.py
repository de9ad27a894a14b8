"""The engine: each step yields one token per decoding sequence. Torch-free.

A request gets the same tokens whatever else runs. If the runner is row-exact (`Runner.is_row_exact`), the logits do not
depend on other requests, on how the prompt is split into chunks, on prefix cache hits or on preemptions, and random
draws depend only on the request (`sampling/steps.py`).
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
from llamarium.options.serving import EngineOptions
from llamarium.runtime.batch import BlockTable, Span, pack
from llamarium.runtime.intervention import edits_key
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.runtime.taps import Taps
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler

SERVING_BLOCK_SIZE = 32
"""Slots per block. A sequence wastes half a block on average; docs/decisions/0014 has the cost of smaller blocks."""

MAX_NUM_SEQS = EngineOptions.max_num_seqs
"""Default maximum number of concurrent sequences."""


class Engine:
    """A continuous-batching engine for one thread (`engine/thread.py` serves several).

    Args:
        runner: Runs the model.
        num_blocks: Blocks of the KV cache.
        kv_cache_dtype: KV cache dtype.
        max_num_seqs: Maximum number of concurrent sequences; others wait.
        block_size: Slots per block.
        use_cache: False recomputes all tokens in every step, for comparison only.
        shares: Enable prefix caching. False is for comparison only.
        chunk: Maximum number of prompt tokens per step. None adapts it to measured step times, so that prompts do not
            stall decoding; if the runner is not row-exact, None means `MAX_CHUNK_TOKENS`, as results would depend on
            timing otherwise.
        proposer: Speculative decoding (`engine/proposers/`): the same events in fewer steps.
        disk: Second tier of the prefix cache.
        clock: Returns the time in seconds.

    Attributes:
        live: Numbers of the requests that have not ended.
        was_mixed: Whether the last step ran prompt tokens beside decoding sequences.

    Raises:
        MemoryBudgetError: If there is not enough memory for the KV cache.
        OptionError: If `max_num_seqs`, `num_blocks` or `chunk` is less than 1, or if `disk` is given and the runner's
            keys and values are not reproducible to the bit.
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
        self.runner, self.counts = runner, Counts()
        vocab_size = runner.config.vocab_size

        self.cache = runner.new_cache(num_blocks, kv_cache_dtype, block_size)
        self._kv_cache_dtype: CacheDtype = kv_cache_dtype
        kv_dtype = runner.kv_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        self.disk = None if disk is None else DiskTier(disk, runner, self.cache, kv_dtype)
        self.prefix_index = PrefixIndex(num_blocks, block_size, self.disk)

        self._scheduler = Scheduler(
            self.prefix_index, self.cache.copy_block, max_num_seqs, most_logits(vocab_size), shares=shares and use_cache
        )
        self._sampler = Sampler(vocab_size)
        self._output = OutputProcessor(self._scheduler, self._sampler, self.counts, use_cache=use_cache)
        self.live: Collection[int] = self._scheduler.live
        self.was_mixed = False

        self._pace, self._clock = Pace(), clock
        fixed_chunk = chunk if chunk is not None or runner.is_row_exact else MAX_CHUNK_TOKENS
        self._chunk: Callable[[int, Sequence[int]], int] = (
            self._pace.chunk if fixed_chunk is None else lambda _, __: fixed_chunk
        )
        self._deadlines, self._numbers = Deadlines(), itertools.count()
        self.use_proposer(proposer)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the KV cache."""
        return self.cache.num_blocks

    def snapshot(self) -> EngineSnapshot:
        """Return the current numbers of sequences and blocks, and a copy of the counters."""
        num_live = sum(map(len, self._scheduler.live.values()))
        num_running, num_blocks = len(self._scheduler.running), self.cache.num_blocks
        num_used = num_blocks - self.prefix_index.pool.num_free
        return EngineSnapshot(num_running, num_live - num_running, num_used, num_blocks, replace(self.counts))

    @property
    def sequences(self) -> list[EngineSequence]:
        """All live sequences, by arrival; read-only, and only in the engine's thread."""
        return [sequence for sequences in self._scheduler.live.values() for sequence in sequences]

    @property
    def max_tokens(self) -> int:
        """Maximum length of a request (prompt and answer) in tokens: what both context and KV cache can hold."""
        return min(self.runner.config.max_position_embeddings, self.num_blocks * self.cache.block_size + 1)

    @property
    def is_idle(self) -> bool:
        """True if there are no live requests and no undelivered events."""
        return not self._scheduler.live and not self._output.events

    def add(self, request: Request) -> int:
        """Add a request and return its number; see `prepare` for errors."""
        return self.start(self.prepare(request))

    def prepare(self, request: Request) -> list[EngineSequence]:
        """Validate a request and return its sequences for `start`. Any thread may call this.

        Raises:
            InputError: If the prompt is empty, or has an id outside the vocabulary.
            ContextLengthError: If the prompt leaves no room in the context.
            MemoryBudgetError: If the request does not fit into the whole KV cache.
            SamplingError: If the parameters name ids or counts outside the vocabulary.
            InputError or OptionError: If this model cannot apply the request's edits.
        """
        prompt, params, config = request.prompt_ids, request.params, self.runner.config
        check_prompt(config, prompt, room=0 if request.pooling else min(1, params.max_tokens))
        limit = limit_of(config, request)
        room = max(limit, len(prompt) + 1)  # the last prompt token needs a slot, the last answer token does not
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
            sequence = EngineSequence(
                number, row, request, sampling, limit, stops, BlockTable(self.prefix_index.pool), root
            )
            if params.prompt_logprobs is not None:
                sequence.scores = PromptScores(prompt, params.prompt_logprobs)
            if request.pooling is not None:
                sequence.pool = Pool(request.pooling)
            if request.places is not None:
                sequence.states = States(request.places)
            sequences.append(sequence)
        return sequences

    def root_of(self, request: Request) -> Key:
        """Return the prefix key before a request's first block.

        With a disk tier, the adapter is identified by content, as its index means nothing to another process.
        """
        adapter = request.adapter if self.disk is None else self.disk.identity(self.runner, request.adapter)
        return root_key(adapter, request.salt, *([edits_key(request.edits)] if request.edits else ()))

    def start(self, sequences: list[EngineSequence]) -> int:
        """Start the sequences that `prepare` returned; return the request's number."""
        number = sequences[0].number
        self._scheduler.add(sequences)
        if (deadline_s := sequences[0].request.deadline_s) != math.inf:
            self._deadlines.add(deadline_s, number, self._scheduler.live)
        return number

    def abort(self, number: int, row: int | None = None) -> None:
        """Abort a request, or one of its sequences, without an event. Ended ones are ignored."""
        for sequence in list(self._scheduler.live.get(number, ())):
            if row is None or sequence.row == row:
                self._scheduler.remove(sequence)

    def step(self) -> list[TokenEvent]:
        """Run one step and return its events.

        Raises:
            MemoryBudgetError: If there is not enough memory for the step; `abort_largest` may make room for the next.
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
        """Grow the KV cache, if necessary, to hold a request of `num_tokens` tokens.

        Raises:
            MemoryBudgetError: If there is not enough memory.
        """
        num_blocks, num_before = capacity_blocks(num_tokens, self.cache.block_size), self.num_blocks
        if num_blocks > num_before:
            max_blocks = capacity_blocks(self.runner.config.max_position_embeddings, self.cache.block_size)
            self.cache.grow(max(num_blocks, min(2 * num_blocks, max_blocks)))
            self.prefix_index.pool.add(self.num_blocks - num_before)

    def use_proposer(self, policy: ProposerPolicy | None) -> None:
        """Turn speculative decoding on or off; only while no request is live. MemoryBudgetError as in `open`."""
        proposer = self._scheduler.proposer
        if proposer is None or proposer.policy is not policy:
            options = self.num_blocks, self.cache.block_size, self._kv_cache_dtype, self._clock
            self._scheduler.proposer = None if policy is None else policy.open(*options)
        else:
            proposer.reserve(self.num_blocks)

    def fill_cache_for_benchmark(self, ids: Sequence[int]) -> None:
        """Mark tokens as computed without running them: every block is a copy of the first one.

        Raises:
            MemoryBudgetError: If the KV cache has no room for them.
        """
        size, table, parent = self.cache.block_size, BlockTable(self.prefix_index.pool), root_key(-1, "")
        table.reserve(len(ids))
        self.runner.run(pack([Span(ids[:size], 0, table.blocks, num_logits=0)], size), self.cache)
        for index, block in enumerate(table.blocks):
            if index:
                self.cache.copy_block(table.blocks[0], block)
            parent = self.prefix_index.enter(parent, block, ids[index * size : (index + 1) * size])
        table.release()

    def abort_largest(self) -> int | None:
        """Abort the running request with the most uncomputed tokens; return its number, or None if none runs."""
        running = self._scheduler.running
        if not running:
            return None
        number = max(running, key=lambda sequence: (sequence.num_uncomputed, sequence.number, sequence.row)).number
        self.abort(number)
        return number

    def close(self) -> None:
        """Flush the disk tier, for a few seconds at most; does nothing without one."""
        if self.disk is not None:
            self.disk.close()

    def run(self) -> Iterator[TokenEvent]:
        """Yield events until all requests have ended."""
        while not self.is_idle:
            yield from self.step()

    def _run(self, items: list[StepItem]) -> None:
        taps = _taps(items)
        batch = pack([item.span for item in items], self.cache.block_size)
        begin = self._clock()
        logits_WV = self.runner.run(batch, self.cache, taps)
        seconds = max(1e-9, self._clock() - begin)

        self._record(items, seconds)
        self._output.process(items, logits_WV, taps)

    def _record(self, items: Sequence[StepItem], seconds: float) -> None:
        """Count a step that took `seconds`, and feed its time to what adapts to it: chunk size and draft length."""
        num_tokens = num_decode_tokens = num_decoding = num_drafted = 0
        for sequence, _, span in items:
            num_tokens += len(span.token_ids)
            if sequence.num_uncomputed == 1:
                num_decoding += 1
                num_decode_tokens += len(span.token_ids)
                num_drafted += sequence.draft.num_scheduled
        self.was_mixed = 0 < num_decode_tokens < num_tokens

        counts = self.counts
        counts.steps += 1
        counts.pass_s += seconds
        counts.drafted_tokens += num_drafted
        counts.preempted = self._scheduler.num_preempted

        self._pace.record(num_decode_tokens, num_tokens - num_decode_tokens, seconds)
        proposer = self._scheduler.proposer
        if proposer is not None and num_decoding:
            proposer.policy.count_pass(num_drafted)
            if num_decoding == len(items):  # prompt tokens would distort the measurement
                proposer.policy.record_pass(len(items), num_drafted, seconds)


def _taps(items: Sequence[StepItem]) -> Taps | None:
    """Return the taps for the hidden states that a step's sequences need, or None."""
    keys = {HIDDEN for item in items if item.sequence.pool is not None}
    for sequence, end, span in items:
        keys.update(() if sequence.states is None else sequence.states.keys(span.start, end))
    return Taps(keys) if keys else None
