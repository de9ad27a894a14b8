"""Speculative decoding by n-gram lookup: propose what followed the last few tokens earlier in a text. Torch-free.

The texts are the sequence itself (prompt lookup), earlier prompts and answers of the same user (a pool, `ngrams.py`)
and a corpus. If an answer repeats one of them (summarizing a text, editing a program, continuing a list), a draft costs
a few microseconds. The acceptance rate depends on the text, the cost of a larger pass on model and machine;
`PromptLookup` measures both continuously and chooses the draft length with the highest throughput.

Drafts that do not pay off cost up to 1 % of the time, per sequence and per pool: costs of drafts and lookups are taken
from a balance, savings are added to it, and lookups pause when it is used up.

A pool and the acceptance rates of its texts belong to one user (`Request.ngram_pool`); only the cost of passes is
shared by all.

Source: prompt lookup decoding (A. Saxena, 2023).
"""

from collections.abc import Callable, Iterator, Sequence

from llamarium.engine.proposers.base import MAX_COST, TRIAL_TOKENS, ProposerPolicy
from llamarium.engine.proposers.ngrams import MAX_MATCH, NgramIndex, NgramPool
from llamarium.engine.request import Draft, EngineSequence
from llamarium.errors import OptionError, show_value
from llamarium.runtime.runner import CacheDtype

POOL_BYTES = 12 * 2**20
"""Default size of a pool, enough for a million tokens."""

ALL_POOLS_BYTES = 256 * 2**20
"""Default size of all pools together: those of the 21 most recently active users."""

# Assumed acceptance rates until measured, by source and by length of the match: fewer than 3 tokens (near the place
# where the answer last diverged from its source), 3, 6, 12 and 24. On this project's guides and sources the rate is
# 0.32 to 0.40 after 3 tokens, and 0.68 to 0.94 from 5 on.
_BOUNDS = (3, 6, 12, 24)
_RATES_OF_OWN = (0.5, 0.4, 0.7, 0.85, 0.95)
_RATES_OF_POOL = (0.3, 0.25, 0.5, 0.75, 0.9)
_CLASSES = [sum(length >= bound for bound in _BOUNDS) for length in range(MAX_MATCH + 1)]
_SURE = 12  # tokens: a match this long is kept without searching for a better one

_WEIGHT, _WEIGHT_OF_POOL = 1 / 6, 1 / 16  # of the newest token in the rates of a sequence and of a pool
_OPENING, _MOST = 1.0, 4.0  # initial and maximum balance, in passes
_STREAK, _ADVANCE = 4, 2.0  # after so many accepted tokens in a row, a draft may exceed the balance by so many passes
_REST = -3.0  # below this balance, nothing is looked up
_NEAR = 16  # tokens after the point of divergence in which the continuation is searched
_REMEASURED = 256  # passes after which the cost of a draft is measured again


class PromptLookup(ProposerPolicy):
    """Speculative decoding that proposes tokens from earlier text (n-gram lookup).

    >>> lookup = llamarium.PromptLookup(num_tokens=4)
    >>> llama.generate("To be, or not to b", temperature=0, max_tokens=6, prompt_lookup=lookup).text
    'e so m'

    Args:
        num_tokens: Maximum draft length.
        pool_bytes: Memory of each user's pool of earlier texts; 0 disables pools, so that only the sequence and
            `corpus` are searched.
        all_pools_bytes: Memory of all pools together; the least recently used pool is dropped first. A single pool may
            exceed it.
        corpus: Token ids of a text that is searched for all requests.

    Raises:
        OptionError: If a size is negative or not an integer, or `num_tokens` is out of range.
    """

    option = "prompt_lookup"

    def __init__(
        self,
        num_tokens: int = 31,
        *,
        pool_bytes: int = POOL_BYTES,
        all_pools_bytes: int = ALL_POOLS_BYTES,
        corpus: Sequence[int] = (),
    ) -> None:
        super().__init__(num_tokens)
        self.pool_bytes = _checked_bytes("pool_bytes", pool_bytes)
        self._all_pools_bytes = _checked_bytes("all_pools_bytes", all_pools_bytes)
        self._pools: dict[str, LookupPool] = {}  # least recently used first
        self.corpus = NgramPool(NgramPool.bytes_for(len(corpus)) if len(corpus) else 0)
        self.corpus.add(corpus)
        self._num_measured = self._num_since = 0

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "LookupProposer":
        """Return a proposer for an engine; it needs no KV cache."""
        return LookupProposer(self, clock)

    def pool(self, name: str | None) -> "LookupPool":
        """Return the pool with this name; None returns a new pool that keeps no text."""
        if name is None:
            return LookupPool(0)
        pool = self._pools.pop(name, None) or LookupPool(self.pool_bytes)
        self._pools[name] = pool

        while len(self._pools) > 1 and self.pools_bytes > self._all_pools_bytes:
            oldest = next(iter(self._pools))
            self._pools.pop(oldest).texts.clear()  # running requests may still hold the pool, so free its memory now
        return pool

    @property
    def keeps_texts(self) -> bool:
        """Whether prompts and answers stay in memory for later drafts."""
        return self.pool_bytes > 0

    @property
    def pools_bytes(self) -> int:
        """Size of all pools, in bytes."""
        return sum(pool.texts.num_bytes for pool in self._pools.values())

    @property
    def num_pool_tokens(self) -> int:
        """Number of tokens in all pools."""
        return sum(pool.texts.num_tokens for pool in list(self._pools.values()))

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Record the time of a pass over one token per sequence and `num_drafted` draft tokens."""
        super().record_pass(num_rows, num_drafted, seconds)
        self._num_since += 1
        if num_drafted:
            self._num_measured, self._num_since = self._num_measured + 1, 0

    def best_length(self, rates: Iterator[float], num_rows: int, max_tokens: float) -> int:
        """Return the best draft length for one of `num_rows` sequences; 0 if drafts do not pay off.

        `rates` are as for `best_draft`, and `max_tokens` is how many tokens the balance allows. When drafts do not pay
        off, a short one runs now and then to measure their cost; the acceptance rate is known without running them.
        """
        length, _ = self.best_draft(rates, num_rows)
        is_due = self._num_since >= min(_REMEASURED, 1 << min(8, self._num_measured))
        if not length and is_due and max_tokens >= TRIAL_TOKENS:
            return min(TRIAL_TOKENS, self.num_tokens)
        return int(min(length, max(0.0, max_tokens)))


class LookupPool:
    """Earlier texts of one user, with their acceptance rates and time budget.

    Attributes:
        texts: The texts.
        rates: Acceptance rates by source and class of match length.
        balance: Time that drafts may cost, in passes.
    """

    def __init__(self, num_bytes: int) -> None:
        self.texts = NgramPool(num_bytes)
        self.rates = [list(rates) for rates in (_RATES_OF_OWN, _RATES_OF_POOL, _RATES_OF_POOL)]
        self.balance = _OPENING


class LookupProposer:
    """Proposes drafts by looking up the last tokens of each sequence."""

    def __init__(self, policy: PromptLookup, clock: Callable[[], float]) -> None:
        self.policy, self._clock = policy, clock
        self._sequences: dict[EngineSequence, LookupSequence] = {}

    def reserve(self, num_blocks: int) -> None:
        """Do nothing, as lookups need no KV cache."""

    def propose(self, sequences: Sequence[EngineSequence], num_rows: int) -> list[Draft]:
        """Return a draft for each sequence."""
        single_s, begin_s = self.policy.single_s(num_rows), self._clock()
        states = [self._state_of(sequence) for sequence in sequences]
        if single_s is None:  # costs cannot be compared yet, but the previous drafts' results count
            for state in states:
                state.rest()
            return [Draft() for _ in sequences]
        drafts = [state.propose(num_rows) for state in states]
        if states:
            cost = (self._clock() - begin_s) / len(states) * num_rows / single_s
            for state in states:
                state.pay(cost)
        return drafts

    def release(self, sequence: EngineSequence) -> None:
        """Drop a sequence and add its answer to its pool."""
        state = self._sequences.pop(sequence, None)
        if state is not None:
            state.end()

    def _state_of(self, sequence: EngineSequence) -> "LookupSequence":
        if sequence not in self._sequences:
            request = sequence.request
            pool = self.policy.pool(None if request.salt else request.ngram_pool)
            self._sequences[sequence] = LookupSequence(sequence, self.policy, pool)
        return self._sequences[sequence]


class LookupSequence:
    """The lookup state of a sequence, whose last tokens are searched in itself, its pool and the corpus.

    While an answer copies from a source, the state is the source and the position there of the next token. When the
    answer diverges, the position is kept for a while, because an edited text often continues near it.
    """

    def __init__(self, sequence: EngineSequence, policy: PromptLookup, pool: LookupPool) -> None:
        self.ids, self._limit, self._num_prompt = sequence.ids, sequence.limit, len(sequence.request.prompt_ids)
        self._policy, self._pool = policy, pool
        pool.texts.add(self.ids[: self._num_prompt])
        self._sources = NgramIndex(self.ids, self._limit), pool.texts, policy.corpus
        self._rates = [list(rates) for rates in pool.rates]
        self._balance, self._streak = _OPENING, 0
        self._draft, self._start, self._num_rows = Draft(), len(self.ids), 1  # the last draft and its position
        self._source, self._place, self._length = -1, 0, 0  # its source, its place there, and the length of the match
        self._left, self._num_lost = 0, 0  # the place in the source of the last divergence, and tokens since then

    def propose(self, num_rows: int) -> Draft:
        """Return a draft for a pass in which `num_rows` sequences decode."""
        self._settle()
        self._start, self._num_rows = len(self.ids), num_rows
        room, balance = self._limit - self._start - 1, min(self._balance, self._pool.balance)
        if balance < _REST or room < 1:
            self._draft, self._source = Draft(), -1
            return self._draft
        self._find()
        if not self._length:
            self._draft = Draft()
            return self._draft

        if self._streak >= _STREAK:
            balance += _ADVANCE
        extra_s, single_s = self._policy.extra_s(num_rows), self._policy.single_s(num_rows) or 0.0
        max_tokens = balance * single_s / max(num_rows * extra_s, 1e-9)
        length = min(self._policy.best_length(self._next_rates(), num_rows, max_tokens), room)
        ids = self._sources[self._source].following(self._place, length + 1)
        self._draft = Draft(ids, min(length, len(ids)))
        return self._draft

    def rest(self) -> None:
        """Settle the last draft and propose none."""
        self._settle()

    def pay(self, cost: float) -> None:
        """Subtract a cost, in passes, from the balances."""
        self._balance -= cost
        self._pool.balance -= cost

    def end(self) -> None:
        """Settle the last draft and add the answer to the pool."""
        self._settle()
        self._pool.texts.add(self.ids, self._num_prompt)

    def _settle(self) -> None:
        """Compare the last draft with the generated tokens; update acceptance rates, place and balances.

        All proposed tokens count, also those that were not run in the model.
        """
        chosen, draft = self.ids[self._start :], self._draft
        num_right, num_comparable = 0, min(len(chosen), len(draft.ids))
        while num_right < num_comparable and chosen[num_right] == draft.ids[num_right]:
            self._note(self._length + num_right, True)
            num_right += 1
        if num_right < num_comparable:
            self._note(self._length + num_right, False)
        if num_comparable:
            self._streak = self._streak + num_right if num_right == num_comparable else 0
        self._follow(len(chosen), num_right, num_comparable)
        self._settle_balance(len(chosen), draft.num_scheduled)
        self._draft, self._start = Draft(), len(self.ids)

    def _follow(self, num_chosen: int, num_right: int, num_comparable: int) -> None:
        """Advance in the source after `num_right` of `num_comparable` tokens matched, or remember the divergence."""
        if num_comparable and num_right == num_comparable:
            self._place, self._num_lost = self._place + num_chosen, 0
        elif num_right or (num_comparable and not self._num_lost):
            self._place = self._left = self._place + num_right
            self._num_lost = num_chosen - num_right
        elif self._num_lost:
            self._num_lost += num_chosen

    def _settle_balance(self, num_chosen: int, num_drafted: int) -> None:
        saved = MAX_COST * num_chosen
        single_s, num_rows = self._policy.single_s(self._num_rows), self._num_rows
        if num_drafted and single_s:
            saved += num_chosen - 1 - num_drafted * self._policy.extra_s(num_rows) * num_rows / single_s
        self._balance = min(_MOST, self._balance + saved)
        self._pool.balance = min(_MOST, self._pool.balance + saved)

    def _note(self, length: int, is_right: bool) -> None:
        """Update the acceptance rates after a match of `length` tokens."""
        length_class = _CLASSES[min(length, MAX_MATCH)]
        for rates, weight in ((self._rates, _WEIGHT), (self._pool.rates, _WEIGHT_OF_POOL)):
            rates[self._source][length_class] += weight * (is_right - rates[self._source][length_class])

    def _next_rates(self) -> Iterator[float]:
        """Yield the acceptance rates of the next draft tokens; each one lengthens the match for the next."""
        rates = self._rates[self._source]
        for length in range(self._length, self._length + self._policy.num_tokens):
            yield rates[_CLASSES[min(length, MAX_MATCH)]]

    def _rate(self, source: int, length: int) -> float:
        """Return the acceptance rate after a match of `length` tokens; 0 without a match."""
        return self._rates[source][_CLASSES[length]] if length else 0.0

    def _find(self) -> None:
        """Find the source and place of the next draft: the current one, or one with a higher acceptance rate."""
        ids, end = self.ids, len(self.ids)
        source, place, length = self._source, self._place, 0
        if source >= 0:
            place = self._near() if self._num_lost else place
            length = self._sources[source].length_at(place, ids, end)
        best = self._rate(source, length)
        for source_index, candidate in enumerate(self._sources):
            if length >= _SURE:
                break
            found_place, num_equal = candidate.find(ids, end)
            if (rate := self._rate(source_index, num_equal)) > best:
                best, source, place, length = rate, source_index, found_place, num_equal
                self._num_lost = 0
        self._source, self._place, self._length = source, place, length

    def _near(self) -> int:
        """Return where copying may resume: after the last token's next occurrence near the divergence."""
        last = self.ids[-1]
        if self._num_lost <= _NEAR:
            window = self._sources[self._source].following(self._left, _NEAR)
            if last in window:
                return self._left + window.index(last) + 1
        return self._left


def _checked_bytes(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{name} is {show_value(value)}; expected a number of bytes, 0 or more")
    return value
