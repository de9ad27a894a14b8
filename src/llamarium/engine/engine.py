"""The engine: one step after the other, in each of them a token for everybody who is being answered. Never torch.

A request gets the same tokens whatever company it has: where the runner gives each token the bits that it has alone
(`Runner.is_row_exact`), neither the others, nor chunks, nor what was found in the cache, nor a preemption change them,
and draws belong to the request (`sampling/sampler.py`).
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from llamarium.engine.counts import Counts
from llamarium.engine.pace import MAX_CHUNK_TOKENS, Pace
from llamarium.engine.pooling import HIDDEN, Pool, Vector, gather
from llamarium.engine.prefix import PrefixIndex, root_key
from llamarium.engine.request import Deadlines, Request, TokenEvent, check_prompt, limit_of, no_room, room_of
from llamarium.engine.scheduler import EngineSequence, Scheduler, StepItem, capacity_blocks
from llamarium.engine.scoring import PromptScores, most_logits
from llamarium.engine.speculate import Guessing, Speculation
from llamarium.errors import MemoryBudgetError, OptionError, show_value
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.blocks import BlockTable
from llamarium.runtime.runner import CacheDtype, Logits, Runner
from llamarium.runtime.taps import Taps
from llamarium.sampling.constraint import NoToken
from llamarium.sampling.row import Chosen, SamplingRow
from llamarium.sampling.sampler import Sampler

SERVING_BLOCK_SIZE = 32
"""Slots of a block: half of one is wasted for each answer (docs/decisions/0014 has what smaller ones cost)."""

MAX_NUM_SEQS = 64
"""Answers side by side, unless told otherwise."""


class Engine:
    """Answers requests side by side. One thread calls it (`engine/thread.py` is for others).

    Args:
        runner: Executes the model.
        num_blocks: Of the cache.
        kv_cache_dtype: What keys and values are kept in.
        max_num_seqs: How many answers are run side by side at most; the others wait.
        block_size: Slots of a block.
        use_cache: False recomputes everything for every token: for comparison, never for speed.
        shares: Take keys and values from who had the same tokens. False is for comparison.
        chunk: Tokens of prompts in a step at most. None chooses by what steps take, so that those who stream go on
            streaming; where the runner is not row-exact, it would be a matter of chance, so it is `MAX_CHUNK_TOKENS`.
        speculation: Guess tokens ahead (`engine/speculate.py`, `engine/draft.py`): the same events, sooner.
        clock: Returns seconds.

    Raises:
        MemoryBudgetError: If there is no memory for the cache.
        OptionError: If `max_num_seqs`, `num_blocks` or `chunk` is less than 1.

    Attributes:
        runner: The same.
        cache: Keys and values.
        counts: What it has done so far.
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
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("num_blocks", num_blocks), ("chunk", chunk)):
            if value is not None and value < 1:
                raise OptionError(f"{name} is {show_value(value)}; expected at least 1")
        self.runner, self.counts = runner, Counts()
        self.cache = runner.new_cache(num_blocks, kv_cache_dtype, block_size)
        self._index = PrefixIndex(num_blocks, block_size)
        most = most_logits(runner.config.vocab_size)
        self._scheduler = Scheduler(self._index, self.cache.copy_block, max_num_seqs, most, shares=shares and use_cache)
        self._sampler = Sampler(runner.config.vocab_size, runner.device)
        self._kv_cache_dtype: CacheDtype = kv_cache_dtype
        self._use_cache, self._pace, self._clock = use_cache, Pace(), clock
        self._speculation: Speculation | None = None
        self._guessing: Guessing | None = None
        self.speculate(speculation)
        fixed = chunk if chunk is not None or runner.is_row_exact else MAX_CHUNK_TOKENS
        self._chunk: Callable[[int, Sequence[int]], int] = self._pace.chunk if fixed is None else lambda _, __: fixed
        self._sequences: dict[int, list[EngineSequence]] = {}
        self._deadlines = Deadlines()
        self._events, self._numbers = deque[TokenEvent](), itertools.count()

    @property
    def num_running(self) -> int:
        """Answers that have blocks."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Answers that wait to begin, or to go on."""
        return sum(map(len, self._sequences.values())) - self.num_running

    @property
    def num_blocks(self) -> int:
        """Of the cache."""
        return self.cache.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Those that answers have."""
        return self.num_blocks - self._index.pool.num_free

    @property
    def num_held_tokens(self) -> int:
        """Tokens of answers whose keys and values are in the cache; shared ones count for each."""
        return sum(sequence.num_computed for sequence in self._scheduler.running)

    @property
    def sequences(self) -> list[EngineSequence]:
        """Those in the making, by arrival: to look at, in the engine's thread."""
        return [sequence for sequences in self._sequences.values() for sequence in sequences]

    @property
    def max_tokens(self) -> int:
        """The most tokens of a request, prompt and answer together, that context and cache have room for."""
        return min(self.runner.config.max_position_embeddings, self.num_blocks * self.cache.block_size + 1)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is left to be answered, and nothing is left to be told."""
        return not self._sequences and not self._events

    def is_live(self, number: int) -> bool:
        """Whether a request has answers that have not ended."""
        return number in self._sequences

    def add(self, request: Request) -> int:
        """Take a request and return its number; `step` answers it.

        Raises:
            LlamariumError: As `prepare`.
        """
        return self.start(self.prepare(request))

    def prepare(self, request: Request) -> list[EngineSequence]:
        """Check a request and return the answers that `start` begins; any thread may call this.

        Raises:
            InputError: For an empty prompt or an id outside the vocabulary.
            ContextLengthError: If the prompt leaves no room in the context.
            MemoryBudgetError: If the whole cache has not room for it.
            SamplingError: If the parameters name ids or counts outside the vocabulary.
        """
        prompt, params, config = request.prompt_ids, request.params, self.runner.config
        check_prompt(config, prompt, room=0 if request.pooling else min(1, params.max_tokens))
        if capacity_blocks(room_of(config, request), self.cache.block_size) > self.num_blocks:
            raise no_room(request, self.num_blocks * self.cache.block_size, self.max_tokens)
        stops = frozenset((*request.stop_ids, *params.stop_token_ids))
        number, limit = next(self._numbers), limit_of(config, request)
        sequences: list[EngineSequence] = []
        for row, single in enumerate(params.rows()):
            constraint = None if request.grammar is None else request.grammar.begin(stops)
            state = SamplingRow(single, prompt, config.vocab_size, constraint=constraint)
            scores = None if params.prompt_logprobs is None else PromptScores(prompt, params.prompt_logprobs)
            table, pool = BlockTable(self._index.pool), None if request.pooling is None else Pool(request.pooling)
            sequences.append(EngineSequence(number, row, request, state, limit, stops, table, scores=scores, pool=pool))
        return sequences

    def start(self, sequences: list[EngineSequence]) -> int:
        """Begin what `prepare` has returned; return the request's number."""
        number, deadline_s = sequences[0].number, sequences[0].request.deadline_s
        self._sequences[number] = list(sequences)
        self._scheduler.add(sequences)
        self._deadlines.add(deadline_s, number, self._sequences)
        return number

    def abort(self, number: int, row: int | None = None) -> None:
        """End a request, or one of its answers, without a word; one that has ended already stays so."""
        for sequence in list(self._sequences.get(number, ())):
            if row is None or sequence.row == row:
                self._leave(sequence)

    def step(self) -> list[TokenEvent]:
        """Run what is next, and return what came of it: tokens of the answers that have been run to their end.

        Raises:
            MemoryBudgetError: If there is no memory for the step; after `abort_largest` the next one may have it.
        """
        self._end_late()
        work = self._scheduler.schedule(self._chunk)
        if work:
            self._run(work)
        events, self._events = list(self._events), deque[TokenEvent]()
        return events

    def reserve(self, num_tokens: int) -> None:
        """Have room for a request of so many tokens in all; the cache grows if need be.

        Raises:
            MemoryBudgetError: If there is not that much memory.
        """
        num_blocks, before = capacity_blocks(num_tokens, self.cache.block_size), self.num_blocks
        if num_blocks > before:
            most = capacity_blocks(self.runner.config.max_position_embeddings, self.cache.block_size)
            self.cache.grow(max(num_blocks, min(2 * num_blocks, most)))
            self._index.pool.add(self.num_blocks - before)

    def speculate(self, speculation: Speculation | None) -> None:
        """Guess tokens ahead from now on, or do not; while nobody is answered. A draft model needs memory."""
        if speculation is not self._speculation:
            how = self.num_blocks, self.cache.block_size, self._kv_cache_dtype, self._clock
            self._guessing = None if speculation is None else speculation.open(*how)
            self._speculation, self._scheduler.guessing = speculation, self._guessing
        elif self._guessing is not None:
            self._guessing.reserve(self.num_blocks)

    def fill_cache_for_benchmark(self, ids: Sequence[int]) -> None:
        """Act as if these tokens had been run, to measure what comes after them: each block holds what the first does.

        Raises:
            MemoryBudgetError: If the cache has no room for them.
        """
        size, table, parent = self.cache.block_size, BlockTable(self._index.pool), root_key(-1, "")
        table.reserve(len(ids))
        self.runner.run(pack([Span(ids[:size], 0, table.blocks, num_logits=0)], size), self.cache)
        for place, block in enumerate(table.blocks):
            if place:
                self.cache.copy_block(table.blocks[0], block)
            parent = self._index.enter(parent, block, ids[place * size : (place + 1) * size])
        table.release()

    def abort_largest(self) -> int | None:
        """End the request that has most left to run, of several the last, after a step had no memory; say which."""
        running = self._scheduler.running
        if not running:
            return None
        number = max(running, key=lambda sequence: (sequence.num_uncomputed, sequence.order)).number
        self.abort(number)
        return number

    def run(self) -> Iterator[TokenEvent]:
        """Yield what comes of all requests, until nobody is left."""
        while not self.is_idle:
            yield from self.step()

    def _run(self, work: list[StepItem]) -> None:
        """Run some answers' tokens, and choose one for each that has been run to its end."""
        spans = [sequence.span(end) for sequence, end in work]
        pools = [sequence.pool for sequence, _ in work]
        taps = Taps([HIDDEN]) if any(pools) else None
        begin = self._clock()
        logits = self.runner.run(pack(spans, self.cache.block_size), self.cache, taps)
        self._record(work, spans, max(1e-9, self._clock() - begin))
        starts = self._score(work, spans, logits)
        if taps is not None:
            gather(pools, spans, taps)
        rows, places = list[EngineSequence](), list[int]()
        for (sequence, end), start in zip(work, starts, strict=True):
            self._scheduler.mark_computed(sequence, end)
            if sequence.pool is not None and end == len(sequence.ids):
                self._tell_vector(sequence, sequence.pool.vector())
            elif not self._has_failed(sequence) and end == len(sequence.ids):
                joined = self._begin(sequence) if sequence.state.num_tokens == 0 else ()
                rows.extend((sequence, *joined))
                places.extend([start] * (1 + len(joined)))
        self._choose(*self._with_room(rows, places), logits)

    def _record(self, work: list[StepItem], spans: list[Span], seconds: float) -> None:
        """Learn from what a pass took."""
        self.counts.steps += 1
        self.counts.pass_s += seconds
        self.counts.preempted = self._scheduler.num_preempted
        num_streaming = sum(
            len(span.token_ids) for (sequence, _), span in zip(work, spans, strict=True) if sequence.num_uncomputed == 1
        )
        self._pace.record(num_streaming, sum(len(span.token_ids) for span in spans) - num_streaming, seconds)
        num_guessed = sum(sequence.guess.num_scheduled for sequence, end in work if end == len(sequence.ids))
        self.counts.drafted_tokens += num_guessed
        if self._guessing is not None and all(
            sequence.num_uncomputed == 1 for sequence, _ in work
        ):  # nobody's prompt was in it
            self._guessing.record_pass(len(spans), num_guessed, seconds)

    def _score(self, work: list[StepItem], spans: list[Span], logits_WV: Logits) -> list[int]:
        """Score prompts' tokens; return in which row of the logits those for each answer's next token are."""
        starts, row = list[int](), 0
        for (sequence, end), span in zip(work, spans, strict=True):
            num_wanted = sequence.num_wanted(span.start, end)
            if sequence.scores is not None and num_wanted:
                sequence.scores.take(logits_WV[row : row + num_wanted], self._sampler)
            starts.append(row + num_wanted)
            row += span.num_logits
        return starts

    def _has_failed(self, sequence: EngineSequence) -> bool:
        """Whether an answer's prompt has no scores, as its logits were no numbers; it ends then."""
        if sequence.scores is None or sequence.scores.is_finite:
            return False
        sequence.finish_reason = "error"
        self._tell(sequence, Chosen(NoToken.NOT_FINITE))
        return True

    def _with_room(self, sequences: list[EngineSequence], places: list[int]) -> tuple[list[EngineSequence], list[int]]:
        """Return those of the answers that may have a token, and their places; end those that only wanted scores."""
        for sequence in sequences:
            if len(sequence.ids) >= sequence.limit:
                sequence.finish_reason = "length"
                self._tell(sequence, Chosen(NoToken.NOT_ASKED))
        kept = [row for row, sequence in enumerate(sequences) if sequence.finish_reason is None]
        return [sequences[row] for row in kept], [places[row] for row in kept]

    def _begin(self, sequence: EngineSequence) -> list[EngineSequence]:
        """Note that a prompt has been run; return the other answers to it, which go on from here."""
        self.counts.note_prompt(len(sequence.ids), sequence.num_sought, sequence.num_cached)
        joined = self._scheduler.fork(sequence)
        if self._guessing is not None:
            for one in (sequence, *joined):
                one.guesser = self._guessing.begin(one.ids, one.request.salt)
        return joined

    def _choose(self, sequences: list[EngineSequence], places: list[int], logits_WV: Logits) -> None:
        """Choose the next token of each answer, and as many more as were guessed.

        Args:
            sequences: Those whose tokens have all been computed.
            places: The row of the logits that follow each one's last token; those after its guess are the next ones.
            logits_WV: Of the pass.
        """
        place = 0  # of the guesses
        while sequences:
            logits_BV = logits_WV if places == list(range(len(logits_WV))) else logits_WV[places]
            found = self._sample(sequences, logits_BV)
            ahead: list[int] = []
            for row, (sequence, chosen) in enumerate(zip(sequences, found, strict=True)):
                self._accept(sequence, chosen)
                if sequence.finish_reason is None and self._is_ahead(sequence, place, chosen):
                    ahead.append(row)
            sequences, places = [sequences[row] for row in ahead], [places[row] + 1 for row in ahead]
            place += 1

    def _sample(self, sequences: list[EngineSequence], logits_BV: Logits) -> list[Chosen]:
        try:
            return self._sampler.sample([sequence.state for sequence in sequences], logits_BV)
        except MemoryBudgetError:
            for sequence in sequences:
                sequence.num_computed -= 1  # its last token is run again in the next step, to the same logits
            raise

    def _is_ahead(self, sequence: EngineSequence, place: int, chosen: Chosen) -> bool:
        """Whether the token was guessed and run, so that the logits after it are there."""
        if sequence.guesser is None or not sequence.guesser.check(sequence.guess, place, chosen.token_id):
            return False
        self.counts.accepted_tokens += 1
        self._scheduler.mark_computed(sequence, len(sequence.ids))
        return True

    def _accept(self, sequence: EngineSequence, chosen: Chosen) -> None:
        """Append a token, decide whether the answer ends, and tell."""
        if chosen.token_id < 0:
            sequence.finish_reason = "error"
        else:
            self.counts.generated_tokens += 1
            sequence.ids.append(chosen.token_id)
            if chosen.token_id in sequence.stops or sequence.state.is_finished:
                sequence.finish_reason = "stop"
            elif len(sequence.ids) >= sequence.limit:
                sequence.finish_reason = "length"
        self._tell(sequence, chosen)

    def _tell(self, sequence: EngineSequence, chosen: Chosen, vector: Vector | None = None) -> None:
        num_cached = max(0, sequence.num_cached)
        event = TokenEvent(sequence.number, sequence.row, *chosen, sequence.finish_reason, num_cached, vector=vector)
        if sequence.scores is not None and sequence.scores.is_complete:
            event, sequence.scores = event._replace(prompt_scores=sequence.scores), None
        self._events.append(event)
        if sequence.finish_reason is not None:
            self._leave(sequence)
        elif not self._use_cache:
            sequence.num_computed = 0

    def _tell_vector(self, sequence: EngineSequence, vector: Vector | None) -> None:
        self.counts.note_prompt(len(sequence.ids), sequence.num_sought, sequence.num_cached)
        sequence.finish_reason = "error" if vector is None else "stop"
        self._tell(sequence, Chosen(NoToken.NOT_ASKED), vector)

    def _leave(self, sequence: EngineSequence) -> None:
        self._scheduler.remove(sequence)
        sequences = self._sequences[sequence.number]
        sequences.remove(sequence)
        if not sequences:
            del self._sequences[sequence.number]

    def _end_late(self) -> None:
        """End the requests whose deadline has passed."""
        for number in self._deadlines.due(self._clock()):
            for sequence in list(self._sequences.get(number, ())):
                sequence.finish_reason = "timeout"
                self._tell(sequence, Chosen(-1))
