"""Speculative decoding with a draft model: a smaller model proposes tokens, the model verifies them. Torch-free.

The draft model generates greedily, for all sequences in one batch.

It has its own KV cache with as many blocks as the model's. Slots beyond the first rejected token are overwritten before
they are read. A sequence that ends, is aborted or is preempted releases its blocks, which later requests with the same
prefix can reuse. A sequence for which no block is free gets no draft.

Whether a draft pays off depends on the acceptance rate and on the cost of passes of both models. `DraftModel` measures
both and chooses the draft length with the highest throughput. If none pays off, the draft model pauses, except for
trials with one sequence that take 1 % of the time, so that it resumes when the text becomes more predictable.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat

from llamarium.engine.prefix import Key, PrefixIndex, root_key
from llamarium.engine.proposers.base import MAX_COST, TRIAL_TOKENS, ProposerPolicy, averaged
from llamarium.engine.request import Draft, EngineSequence
from llamarium.errors import MemoryBudgetError
from llamarium.runtime.batch import BlockTable, Span, pack
from llamarium.runtime.runner import CacheDtype, Logits, Runner

_RATE = 0.6  # assumed acceptance rate until measured; small models of a family reach 0.5 to 0.8
_DRAFT_COST = 0.25  # of a pass: assumed cost of a pass of the draft model until measured
_RATE_WEIGHT = 1 / 16  # of the newest token in the moving average
_REMEASURED = 64  # passes with drafts after which one without measures the baseline again
_NEAR = 16  # uncomputed tokens that the draft model runs together with its first proposal
_CHUNK = 512  # prompt tokens that it runs per step otherwise, so that decoding does not stall
_ANSWER_TOKENS = 128  # assumed length of an answer, to decide whether running its prompt pays off


class DraftModel(ProposerPolicy):
    """The policy of a draft model: measures its cost and acceptance rate, and chooses the draft length.

    Its vocabulary must be the model's (`generation/options.py` checks that).
    """

    option = "draft_model"

    def __init__(self, runner: Runner, num_tokens: int = 8) -> None:
        super().__init__(num_tokens)
        self.runner = runner
        self._rate = _RATE
        self._draft_s: dict[int, float] = {}  # seconds of a pass of the draft model, by number of sequences
        self._read_s: float | None = None  # seconds per prompt token of the draft model
        self._saved_s = 0.0  # the time budget of trials
        self._num_since = 0  # passes with drafts since the last one without
        self._is_trial = False

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "DraftProposer":
        """Return a proposer for an engine with such a KV cache; errors as `ProposerPolicy.open`."""
        return DraftProposer(self, num_blocks, block_size, kv_cache_dtype, clock)

    def best_length(self, num_rows: int) -> tuple[int, float]:
        """Return the best draft length for `num_rows` sequences, and the seconds that it saves per token.

        Both are 0 if decoding without drafts is faster, or if its time has to be measured again.
        """
        single_s = self.single_s(num_rows)
        if single_s is None or self._num_since >= _REMEASURED:
            return 0, 0.0
        rates, token_s = repeat(self._rate, self.num_tokens), self._draft_cost(num_rows, single_s)
        length, gain_s = self.best_draft(rates, num_rows, num_drafting=num_rows, token_s=token_s)
        return length, num_rows * gain_s

    def trial_length(self, num_rows: int) -> int:
        """Return the draft length of a trial when drafts do not pay off: 0 until its time budget allows one."""
        is_due = num_rows in self._single_s and self._saved_s > 0 and self._num_since < _REMEASURED
        self._is_trial = is_due
        return min(TRIAL_TOKENS, self.num_tokens) if is_due else 0

    def pays_reading(self, num_tokens: int, room: int, gain_s: float) -> bool:
        """Return whether running a prompt in the draft model pays off.

        Args:
            num_tokens: Uncomputed tokens of the prompt.
            room: Tokens that the sequence may still generate.
            gain_s: Seconds saved per generated token; 0 is a trial.
        """
        is_trial = not gain_s
        return is_trial or self._read_s is None or num_tokens * self._read_s <= gain_s * min(room, _ANSWER_TOKENS)

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Record the time of a pass over one token per sequence and `num_drafted` draft tokens."""
        super().record_pass(num_rows, num_drafted, seconds)
        single_s = self._single_s.get(num_rows)
        if not num_drafted:
            self._saved_s += MAX_COST * seconds
            self._num_since = 0
        elif single_s is not None:
            self._num_since += 1
            self._spend(seconds - single_s)
        self._is_trial = False

    def record_draft(self, num_rows: int, length: int, seconds: float) -> None:
        """Record the time of `length` passes of the draft model."""
        self._draft_s[num_rows] = averaged(self._draft_s.get(num_rows), seconds / length)
        self._spend(seconds)

    def record_reading(self, num_tokens: int, seconds: float) -> None:
        """Record the time of running `num_tokens` prompt tokens in the draft model."""
        self._read_s = averaged(self._read_s, seconds / num_tokens)
        self._spend(seconds)

    def record_token(self, is_right: bool) -> None:
        """Update the acceptance rate with one draft token."""
        self._rate += _RATE_WEIGHT * (is_right - self._rate)

    def _spend(self, seconds: float) -> None:
        """Take a trial's time from what was saved; a debt has to be saved before the next one."""
        if self._is_trial:
            self._saved_s -= max(0.0, seconds)

    def _draft_cost(self, num_rows: int, single_s: float) -> float:
        """Return the seconds of a pass of the draft model, measured at the nearest number of sequences."""
        if not self._draft_s:
            return _DRAFT_COST * single_s
        return self._draft_s[min(self._draft_s, key=lambda measured: abs(measured - num_rows))]


class DraftProposer:
    """Runs a draft model for an engine's sequences, with its own KV cache; `policy` is the draft model."""

    def __init__(
        self,
        policy: DraftModel,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: CacheDtype,
        clock: Callable[[], float],
    ) -> None:
        self.policy, self._clock = policy, clock
        self.cache = policy.runner.new_cache(num_blocks, kv_cache_dtype, block_size)
        self._index = PrefixIndex(num_blocks, block_size)
        self._states: dict[EngineSequence, DraftedSequence] = {}

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that sequences own."""
        return self.cache.num_blocks - self._index.pool.num_free

    def reserve(self, num_blocks: int) -> None:
        """Grow the KV cache to `num_blocks` blocks; MemoryBudgetError if there is not enough memory."""
        before = self.cache.num_blocks
        if num_blocks > before:
            self.cache.grow(num_blocks)
            self._index.pool.add(num_blocks - before)

    def propose(self, sequences: Sequence[EngineSequence], num_rows: int) -> list[Draft]:
        """Return a draft for each sequence; `num_rows` sequences decode in the same pass."""
        states = [self._state_of(sequence) for sequence in sequences]
        for state in states:
            self._settle(state)

        length, gain_s = self.policy.best_length(num_rows)
        eligible = [state for state in states if state.room > 1]
        if not length and (length := self.policy.trial_length(num_rows)):
            eligible = sorted(eligible, key=lambda state: state.num_uncomputed)[:1]
        if length and eligible:
            with suppress(MemoryBudgetError):  # no memory for activations: this step runs with fewer drafts
                self._extend(self._ready(eligible, length, gain_s), length)
        return [state.draft() for state in states]

    def release(self, sequence: EngineSequence) -> None:
        """Release a sequence's blocks; their contents can be reused until they are overwritten."""
        state = self._states.pop(sequence, None)
        if state is not None:
            self._settle(state)
            state.table.release()

    def _settle(self, state: "DraftedSequence") -> None:
        """Record which tokens of the last draft were accepted."""
        for is_right in state.settle():
            self.policy.record_token(is_right)

    def _state_of(self, sequence: EngineSequence) -> "DraftedSequence":
        if sequence not in self._states:
            self._states[sequence] = DraftedSequence(sequence, self._index)
        return self._states[sequence]

    def _ready(self, eligible: Sequence["DraftedSequence"], length: int, gain_s: float) -> list["DraftedSequence"]:
        """Return the sequences that can propose now; run prompt tokens of the others, one chunk per step."""
        ready: list[DraftedSequence] = []
        chunk, max_length = _CHUNK, self.policy.runner.config.max_position_embeddings
        for state in eligible:
            state.open()
            num_far = 0 if state.num_uncomputed <= _NEAR else state.num_uncomputed - 1
            if len(state.ids) + length > max_length or not self.policy.pays_reading(num_far, state.room, gain_s):
                continue
            if not state.has_room(len(state.ids) + length):
                continue
            count = min(num_far, chunk)
            if count:
                self._read(state, count)
                chunk -= count
            if state.num_uncomputed <= _NEAR:
                ready.append(state)
        return ready

    def _read(self, state: "DraftedSequence", count: int) -> None:
        """Run `count` uncomputed tokens without proposing anything."""
        begin, start = self._clock(), state.num_computed
        self._run([Span(state.ids[start : start + count], start, state.table.blocks, 0)])
        state.mark_computed(start + count)
        self.policy.record_reading(count, self._clock() - begin)

    def _extend(self, states: Sequence["DraftedSequence"], length: int) -> None:
        """Propose up to `length` tokens for each sequence, within its limit."""
        begin, num_steps = self._clock(), 0
        for step in range(length):
            spans = [(state, state.next_span()) for state in states if state.room - 1 > step]
            if not spans:
                break
            chosen = self._run([span for _, span in spans]).argmax(-1).tolist()
            for (state, _), token_id in zip(spans, chosen, strict=True):
                state.push(token_id)
            num_steps += 1
        if num_steps:
            self.policy.record_draft(len(states), num_steps, self._clock() - begin)

    def _run(self, spans: Sequence[Span]) -> Logits:
        return self.policy.runner.run(pack(spans, self.cache.block_size), self.cache)


class DraftedSequence:
    """A sequence's state in the draft model: its ids, its blocks, and how many tokens are computed."""

    def __init__(self, sequence: EngineSequence, index: PrefixIndex) -> None:
        self._limit, self._root, self._index = sequence.limit, root_key(-1, sequence.request.salt), index
        self.ids, self.table, self.num_computed = sequence.ids, BlockTable(index.pool), 0
        self._keys: list[Key] = []
        self._start, self._proposed = (
            0,
            list[int](),
        )  # the draft and its position; all but its last token are computed
        self._is_open = False

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that the draft model has not computed."""
        return len(self.ids) - self.num_computed

    @property
    def room(self) -> int:
        """Number of tokens that the sequence may still generate, at least 1."""
        return self._limit - len(self.ids)

    def open(self) -> None:
        """Share the cached blocks of its prefix, once."""
        if not self._is_open:
            self._is_open = True
            match = self._index.find(self._root, self.ids[:-1])
            self.table.share(match.blocks)
            self._keys, self.num_computed = list(match.keys), len(match.keys) * self._index.pool.block_size

    def has_room(self, num_tokens: int) -> bool:
        """Reserve blocks for `num_tokens` tokens in total; return False if not enough are free."""
        if self.table.missing(num_tokens) > self._index.pool.num_free:
            return False
        self.table.reserve(num_tokens)
        return True

    def mark_computed(self, end: int) -> None:
        """Record that the tokens before `end`, which are final, are computed; add whole blocks to the prefix cache."""
        self.num_computed = end
        size, keys = self._index.pool.block_size, self._keys
        while (start := len(keys) * size) + size <= end:
            parent, block = keys[-1] if keys else self._root, self.table.blocks[start // size]
            keys.append(self._index.enter(parent, block, self.ids[start : start + size]))

    def next_span(self) -> Span:
        """Return the span whose last token predicts the next draft token."""
        if not self._proposed:
            return Span(self.ids[self.num_computed :], self.num_computed, self.table.blocks)
        return Span(self._proposed[-1:], len(self.ids) + len(self._proposed) - 1, self.table.blocks)

    def push(self, token_id: int) -> None:
        """Append a token to the draft."""
        self._start = len(self.ids)
        self._proposed.append(token_id)

    def settle(self) -> list[bool]:
        """Settle the last draft: return which of its tokens were accepted, up to the first rejected one.

        A step ends at the first rejected token, so all of the sequence's new tokens but the last one match the draft,
        and the draft model has computed them.
        """
        proposed, self._proposed = self._proposed, []
        if not proposed:
            return []
        self.mark_computed(min(self._start + len(proposed), len(self.ids)) - 1)
        chosen = self.ids[self._start : self._start + len(proposed)]
        return [draft_id == token_id for draft_id, token_id in zip(proposed, chosen, strict=False)]

    def draft(self) -> Draft:
        """Return the proposed tokens as a draft that runs completely."""
        return Draft(list(self._proposed), len(self._proposed))
