"""A draft model: a smaller model proposes the next tokens, and the model checks them in one pass. Never torch.

The draft model proposes its most probable token, several times in a row, for all sequences side by side.

It has a cache of its own, with as many blocks as the model's. What it has computed beyond the first wrong token is
overwritten, since a slot is a position. A sequence that ends, is aborted or is preempted gives its blocks back; other
requests with the same beginning find what they hold. A sequence for which there is no block gets no draft.

Whether a draft pays depends on how often it is right, and on what passes of both models cost. All of it is measured,
and `DraftModel` proposes as many tokens as bring the most tokens a second. Where none do, the draft model rests; a
hundredth of the time goes into trying it on one sequence, so that it is taken up again when texts become easier.
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

_RATE = 0.6  # how often a token is right, before it is known; small models of a family agree on 0.5 to 0.8 of tokens
_DRAFT_COST = 0.25  # of a pass, what one pass of the draft model costs, before it is known
_RATE_WEIGHT = 1 / 16  # of the newest token in the moving average
_REMEASURED = 64  # passes with drafts until one without, as what drafts are compared with may have changed
_NEAR = 16  # uncomputed tokens that the draft model reads beside its first proposal
_CHUNK = 512  # tokens that it reads in a step otherwise, so that decoding goes on smoothly
_ANSWER_TOKENS = 128  # the assumed length of an answer, to see whether reading its prompt pays


class DraftModel(ProposerPolicy):
    """Proposes a smaller model's tokens, as many as pay, and counts what came of it.

    Its vocabulary is that of the model for which it proposes (`generation/options.py` checks that).
    """

    option = "draft_model"

    def __init__(self, runner: Runner, num_tokens: int = 8) -> None:
        super().__init__(num_tokens)
        self.runner = runner
        self._rate = _RATE
        self._draft_s: dict[int, float] = {}  # a pass of the draft model, by the number of sequences
        self._read_s: float | None = None  # each token of a prompt that the draft model reads
        self._saved_s, self._num_since, self._is_trial = 0.0, 0, False

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "DraftProposer":
        """Return the proposer of an engine with such a cache; errors as `ProposerPolicy.open`."""
        return DraftProposer(self, num_blocks, block_size, kv_cache_dtype, clock)

    def best_length(self, num_rows: int) -> tuple[int, float]:
        """Return how many tokens to propose for each of so many sequences, and the seconds that a token gains by it.

        Both numbers are 0 where one token at a time is faster, and where the time of that has to be measured.
        """
        single_s = self.single_s(num_rows)
        if single_s is None or self._num_since >= _REMEASURED:
            return 0, 0.0
        rates, token_s = repeat(self._rate, self.num_tokens), self._draft_cost(num_rows, single_s)
        length, gain_s = self.best_draft(rates, num_rows, num_drafting=num_rows, token_s=token_s)
        return length, num_rows * gain_s

    def trial_length(self, num_rows: int) -> int:
        """Return how many tokens to propose where it does not pay: 0, until the time for a trial has been saved."""
        is_due = num_rows in self._single_s and self._saved_s > 0 and self._num_since < _REMEASURED
        self._is_trial = is_due
        return min(TRIAL_TOKENS, self.num_tokens) if is_due else 0

    def pays_reading(self, num_tokens: int, room: int, gain_s: float) -> bool:
        """Whether to read so many tokens for a sequence that may get `room` more, each of which gains so much."""
        is_trial = not gain_s
        return is_trial or self._read_s is None or num_tokens * self._read_s <= gain_s * min(room, _ANSWER_TOKENS)

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note the time of a pass over one token of each sequence and `num_drafted` further ones."""
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
        """Note the time of so many passes of the draft model."""
        self._draft_s[num_rows] = averaged(self._draft_s.get(num_rows), seconds / length)
        self._spend(seconds)

    def record_reading(self, num_tokens: int, seconds: float) -> None:
        """Note the time in which the draft model read tokens that it had not computed."""
        self._read_s = averaged(self._read_s, seconds / num_tokens)
        self._spend(seconds)

    def record_token(self, is_right: bool) -> None:
        """Note whether a draft's token was chosen."""
        self._rate += _RATE_WEIGHT * (is_right - self._rate)

    def _spend(self, seconds: float) -> None:
        """Take a trial's time from what was saved; a debt has to be saved before the next one."""
        if self._is_trial:
            self._saved_s -= max(0.0, seconds)

    def _draft_cost(self, num_rows: int, single_s: float) -> float:
        """Return the seconds of a pass of the draft model, if need be at the nearest measured number of sequences."""
        if not self._draft_s:
            return _DRAFT_COST * single_s
        return self._draft_s[min(self._draft_s, key=lambda known: abs(known - num_rows))]


class DraftProposer:
    """A draft model's cache, and its blocks of an engine's sequences; `policy` is the draft model."""

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
        self._drafted: dict[EngineSequence, DraftedSequence] = {}

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences have."""
        return self.cache.num_blocks - self._index.pool.num_free

    def reserve(self, num_blocks: int) -> None:
        """Have so many blocks; MemoryBudgetError if there is not that much memory."""
        before = self.cache.num_blocks
        if num_blocks > before:
            self.cache.grow(num_blocks)
            self._index.pool.add(num_blocks - before)

    def propose(self, sequences: Sequence[EngineSequence], num_rows: int) -> list[Draft]:
        """Return a draft for each sequence; `num_rows` sequences get a token in the same pass."""
        drafted = [self._of(sequence) for sequence in sequences]
        for one in drafted:
            self._settle(one)
        length, gain_s = self.policy.best_length(num_rows)
        able = [one for one in drafted if one.room > 1]
        if not length and (length := self.policy.trial_length(num_rows)):
            able = sorted(able, key=lambda one: one.num_uncomputed)[:1]
        if length and able:
            with suppress(MemoryBudgetError):  # for what lies between its layers: then this step goes on without
                self._extend(self._ready(able, length, gain_s), length)
        return [one.draft() for one in drafted]

    def release(self, sequence: EngineSequence) -> None:
        """Give a sequence's blocks back; their contents can be found until they are taken for something else."""
        drafted = self._drafted.pop(sequence, None)
        if drafted is not None:
            self._settle(drafted)
            drafted.table.release()

    def _settle(self, drafted: "DraftedSequence") -> None:
        """Note which tokens of the last draft were right."""
        for is_right in drafted.settle():
            self.policy.record_token(is_right)

    def _of(self, sequence: EngineSequence) -> "DraftedSequence":
        if sequence not in self._drafted:
            self._drafted[sequence] = DraftedSequence(sequence, self._index)
        return self._drafted[sequence]

    def _ready(self, able: Sequence["DraftedSequence"], length: int, gain_s: float) -> list["DraftedSequence"]:
        """Return those whose tokens are computed but for a few; compute what is missing, a chunk in a step."""
        ready: list[DraftedSequence] = []
        chunk, most = _CHUNK, self.policy.runner.config.max_position_embeddings
        for one in able:
            one.open()
            num_far = 0 if one.num_uncomputed <= _NEAR else one.num_uncomputed - 1
            if len(one.ids) + length > most or not self.policy.pays_reading(num_far, one.room, gain_s):
                continue
            if not one.has_room(len(one.ids) + length):
                continue
            count = min(num_far, chunk)
            if count:
                self._read(one, count)
                chunk -= count
            if one.num_uncomputed <= _NEAR:
                ready.append(one)
        return ready

    def _read(self, one: "DraftedSequence", count: int) -> None:
        """Compute tokens after which nothing is proposed."""
        begin, start = self._clock(), one.num_computed
        self._run([Span(one.ids[start : start + count], start, one.table.blocks, 0)])
        one.mark_computed(start + count)
        self.policy.record_reading(count, self._clock() - begin)

    def _extend(self, drafted: Sequence["DraftedSequence"], length: int) -> None:
        """Propose up to `length` tokens for each sequence, none more than it has room for."""
        begin, num_steps = self._clock(), 0
        for step in range(length):
            spans = [(one, one.next_span()) for one in drafted if one.room - 1 > step]
            if not spans:
                break
            chosen = self._run([span for _, span in spans]).argmax(-1).tolist()
            for (one, _), token_id in zip(spans, chosen, strict=True):
                one.push(token_id)
            num_steps += 1
        if num_steps:
            self.policy.record_draft(len(drafted), num_steps, self._clock() - begin)

    def _run(self, spans: Sequence[Span]) -> Logits:
        return self.policy.runner.run(pack(spans, self.cache.block_size), self.cache)


class DraftedSequence:
    """A sequence in the draft model's cache: its `ids`, blocks, and how many tokens are computed there."""

    def __init__(self, sequence: EngineSequence, index: PrefixIndex) -> None:
        self._limit, self._root, self._index = sequence.limit, root_key(-1, sequence.request.salt), index
        self.ids, self.table, self.num_computed = sequence.ids, BlockTable(index.pool), 0
        self._keys: list[Key] = []
        self._start, self._proposed = 0, list[int]()  # where the draft begins; all of it but the last is computed
        self._is_open = False

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the draft model has not computed."""
        return len(self.ids) - self.num_computed

    @property
    def room(self) -> int:
        """Tokens that the sequence may still get, at least 1."""
        return self._limit - len(self.ids)

    def open(self) -> None:
        """Take the blocks that are there of its beginning."""
        if not self._is_open:
            self._is_open = True
            found = self._index.find(self._root, self.ids[:-1])
            self.table.share(found.blocks)
            self._keys, self.num_computed = list(found.keys), len(found.keys) * self._index.pool.block_size

    def has_room(self, num_tokens: int) -> bool:
        """Reserve blocks for so many tokens in all; False if there are none."""
        if self.table.missing(num_tokens) > self._index.pool.num_free:
            return False
        self.table.reserve(num_tokens)
        return True

    def mark_computed(self, end: int) -> None:
        """Note that the tokens before `end`, which stay, are computed; whole blocks can be found from now on."""
        self.num_computed = end
        size, keys = self._index.pool.block_size, self._keys
        while (start := len(keys) * size) + size <= end:
            parent, block = keys[-1] if keys else self._root, self.table.blocks[start // size]
            keys.append(self._index.enter(parent, block, self.ids[start : start + size]))

    def next_span(self) -> Span:
        """Return the tokens after which the next one is proposed."""
        if not self._proposed:
            return Span(self.ids[self.num_computed :], self.num_computed, self.table.blocks)
        return Span(self._proposed[-1:], len(self.ids) + len(self._proposed) - 1, self.table.blocks)

    def push(self, token_id: int) -> None:
        """Append a token to the draft."""
        self._start = len(self.ids)
        self._proposed.append(token_id)

    def settle(self) -> list[bool]:
        """Keep what is computed of the last draft; return which of its tokens were chosen, up to the first other one.

        A step ends with the first token that is not the draft's, so that all but the sequence's last one were.
        """
        proposed, self._proposed = self._proposed, []
        if not proposed:
            return []
        self.mark_computed(min(self._start + len(proposed), len(self.ids)) - 1)
        chosen = self.ids[self._start : self._start + len(proposed)]
        return [one == other for one, other in zip(proposed, chosen, strict=False)]

    def draft(self) -> Draft:
        """Return the draft."""
        return Draft(list(self._proposed), len(self._proposed))
