"""N-gram drafts: propose what followed the last few tokens when they stood in a text before. Never torch.

The texts are the sequence itself (prompt lookup), earlier prompts and answers of the same user (a pool, `ngrams.py`),
and a corpus. Where an answer repeats one of them (a text is summarised, a program edited, a list continued), a draft
costs some microseconds. How often it is right depends on the text, and what a wider pass costs on model and machine.
Both are measured all the time, and `PromptLookup` proposes as many tokens as bring the most tokens a second.

Drafts that do not pay cost up to 1 % of the time, for each sequence and for each pool: what drafts and look-ups cost is
taken from a balance, and what they save is added to it. Where it is used up, they rest.

A pool and what was learned from its texts belong to one user (`Request.ngram_pool`). Only what passes cost is common
to all.

Source: prompt lookup decoding (A. Saxena, 2023).
"""

from collections.abc import Callable, Iterator, Sequence

from llamarium.engine.proposers.base import MAX_COST, TRIAL_TOKENS, ProposerPolicy
from llamarium.engine.proposers.ngrams import MAX_MATCH, NgramIndex, NgramPool
from llamarium.engine.request import Draft, EngineSequence
from llamarium.errors import OptionError, show_value
from llamarium.runtime.runner import CacheDtype

POOL_BYTES = 12 * 2**20
"""Memory of each pool, by default, for a million tokens."""

ALL_POOLS_BYTES = 256 * 2**20
"""Memory of all pools together, by default: of the 21 users whose requests came last."""

# How often the token after a match is the proposed one, before anything is known, by the source and the number of
# tokens that agree: fewer than 3 (near the place where a copy was left), 3, 6, 12 and 24. On this project's own guides
# and sources it is 0.32 to 0.40 after 3 tokens, and 0.68 to 0.94 from 5 on.
_BOUNDS = (3, 6, 12, 24)
_RATES_OF_OWN = (0.5, 0.4, 0.7, 0.85, 0.95)
_RATES_OF_POOL = (0.3, 0.25, 0.5, 0.75, 0.9)
_CLASSES = [sum(length >= bound for bound in _BOUNDS) for length in range(MAX_MATCH + 1)]
_SURE = 12  # tokens that agree, from which on no other place is looked for

_WEIGHT, _WEIGHT_OF_POOL = 1 / 6, 1 / 16  # of the newest token in the rates of a sequence, and of all of a pool
_OPENING, _MOST = 1.0, 4.0  # of a balance, in passes
_STREAK, _ADVANCE = 4, 2.0  # right tokens in a row, and what they allow beyond the balance
_REST = -3.0  # below it nothing is looked up
_NEAR = 16  # tokens around the place where a copy was left, in which its continuation is looked for
_REMEASURED = 256  # passes until the cost of a draft is measured again


class PromptLookup(ProposerPolicy):
    """Proposes tokens that were said before, as many as pay, and counts what came of it.

    >>> lookup = llamarium.PromptLookup(num_tokens=4)
    >>> llama.generate("To be, or not to b", temperature=0, max_tokens=6, prompt_lookup=lookup).text
    'e so m'

    Args:
        num_tokens: Of a draft, at most.
        pool_bytes: Memory of each pool of earlier texts; 0 is none, so that only the sequence itself is looked up.
        all_pools_bytes: Memory of all pools together; the pool whose user's last request is longest ago is dropped
            first. One pool may be larger than that.
        corpus: Token ids of a text that is looked up for all requests.

    Raises:
        OptionError: If a number of bytes is none.
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
        self._pools: dict[str, LookupPool] = {}  # the one that was used last is the last
        self.corpus = NgramPool(NgramPool.bytes_for(len(corpus)) if len(corpus) else 0)
        self.corpus.add(corpus)
        self._num_measured = self._num_since = 0

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "LookupProposer":
        """Return the proposer of an engine; it needs no cache."""
        return LookupProposer(self, clock)

    def pool(self, name: str | None) -> "LookupPool":
        """Return the pool of this name; None is one of a single sequence, which keeps no text."""
        if name is None:
            return LookupPool(0)
        pool = self._pools.pop(name, None) or LookupPool(self.pool_bytes)
        self._pools[name] = pool

        while len(self._pools) > 1 and self.pools_bytes > self._all_pools_bytes:
            oldest = next(iter(self._pools))
            self._pools.pop(oldest).texts.clear()  # now, though running requests may still look it up
        return pool

    @property
    def keeps_texts(self) -> bool:
        """Whether there are pools."""
        return self.pool_bytes > 0

    @property
    def pools_bytes(self) -> int:
        """Memory of all pools."""
        return sum(pool.texts.num_bytes for pool in self._pools.values())

    @property
    def num_pool_tokens(self) -> int:
        """Tokens in all pools."""
        return sum(pool.texts.num_tokens for pool in list(self._pools.values()))

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note the time of a pass over one token of each sequence and `num_drafted` further ones."""
        super().record_pass(num_rows, num_drafted, seconds)
        self._num_since += 1
        if num_drafted:
            self._num_measured, self._num_since = self._num_measured + 1, 0

    def best_length(self, rates: Iterator[float], num_rows: int, most: float) -> int:
        """Return how many tokens to run of a draft of one of so many sequences; 0 if that does not pay.

        `rates` are as for `best_draft`, and `most` is how many tokens the balance pays for. Where drafts do not pay,
        one is run now and then to measure what they cost: how often they are right is seen without running them.
        """
        length, _ = self.best_draft(rates, num_rows)
        is_due = self._num_since >= min(_REMEASURED, 1 << min(8, self._num_measured))
        if not length and is_due and most >= TRIAL_TOKENS:
            return min(TRIAL_TOKENS, self.num_tokens)
        return int(min(length, max(0.0, most)))


class LookupPool:
    """Earlier texts of one user, how often drafts were right for them, and what drafts may cost.

    Attributes:
        rates: By source and class of match.
        balance: In passes.
    """

    def __init__(self, num_bytes: int) -> None:
        self.texts = NgramPool(num_bytes)
        self.rates = [list(rates) for rates in (_RATES_OF_OWN, _RATES_OF_POOL, _RATES_OF_POOL)]
        self.balance = _OPENING


class LookupProposer:
    """Proposes by looking up each sequence's last tokens."""

    def __init__(self, policy: PromptLookup, clock: Callable[[], float]) -> None:
        self.policy, self._clock = policy, clock
        self._sequences: dict[EngineSequence, LookupSequence] = {}

    def reserve(self, num_blocks: int) -> None:
        """Do nothing: there is no cache."""

    def propose(self, sequences: Sequence[EngineSequence], num_rows: int) -> list[Draft]:
        """Return a draft for each sequence."""
        single_s, begin_s = self.policy.single_s(num_rows), self._clock()
        looked_up = [self._of(sequence) for sequence in sequences]
        if single_s is None:  # nothing can be weighed yet, but what came of the drafts before it is noted
            for one in looked_up:
                one.rest()
            return [Draft() for _ in sequences]
        drafts = [one.propose(num_rows) for one in looked_up]
        if looked_up:
            cost = (self._clock() - begin_s) / len(looked_up) * num_rows / single_s
            for one in looked_up:
                one.pay(cost)
        return drafts

    def release(self, sequence: EngineSequence) -> None:
        """Forget a sequence, and add its answer to its pool."""
        found = self._sequences.pop(sequence, None)
        if found is not None:
            found.end()

    def _of(self, sequence: EngineSequence) -> "LookupSequence":
        if sequence not in self._sequences:
            request = sequence.request
            pool = self.policy.pool(None if request.salt else request.ngram_pool)
            self._sequences[sequence] = LookupSequence(sequence, self.policy, pool)
        return self._sequences[sequence]


class LookupSequence:
    """A sequence whose last tokens are looked up in itself, its pool and the corpus.

    What it copies at present is a source and the place there of what comes next. Where an answer leaves a copy, the
    place stays for a while, since an edited text often goes on near it.
    """

    def __init__(self, sequence: EngineSequence, policy: PromptLookup, pool: LookupPool) -> None:
        self.ids, self._limit, self._num_prompt = sequence.ids, sequence.limit, len(sequence.request.prompt_ids)
        self._policy, self._pool = policy, pool
        pool.texts.add(self.ids[: self._num_prompt])
        self._sources = NgramIndex(self.ids, self._limit), pool.texts, policy.corpus
        self._rates = [list(rates) for rates in pool.rates]
        self._balance, self._streak = _OPENING, 0
        self._draft, self._start, self._num_rows = Draft(), len(self.ids), 1  # the last one, and where it begins
        self._source, self._place, self._length = -1, 0, 0  # what it is from, and how many tokens agree before it
        self._left, self._num_lost = 0, 0  # the place of the first other token, and how many have come since

    def propose(self, num_rows: int) -> Draft:
        """Return a draft of the next tokens."""
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
        most = balance * single_s / max(num_rows * extra_s, 1e-9)
        length = min(self._policy.best_length(self._next_rates(), num_rows, most), room)
        ids = self._sources[self._source].following(self._place, length + 1)
        self._draft = Draft(ids, min(length, len(ids)))
        return self._draft

    def rest(self) -> None:
        """Note what came of the last draft, and propose none."""
        self._settle()

    def pay(self, cost: float) -> None:
        """Take so many passes from the balances."""
        self._balance -= cost
        self._pool.balance -= cost

    def end(self) -> None:
        """Add the answer to the pool."""
        self._settle()
        self._pool.texts.add(self.ids, self._num_prompt)

    def _settle(self) -> None:
        """Note what came of the last draft."""
        chosen, draft = self.ids[self._start :], self._draft
        num_right, most_right = 0, min(len(chosen), len(draft.ids))
        while num_right < most_right and chosen[num_right] == draft.ids[num_right]:
            self._note(self._length + num_right, True)
            num_right += 1
        if num_right < most_right:
            self._note(self._length + num_right, False)
        if most_right:
            self._streak = self._streak + num_right if num_right == most_right else 0
        self._follow(len(chosen), num_right, most_right)
        self._settle_balance(len(chosen), draft.num_scheduled)
        self._draft, self._start = Draft(), len(self.ids)

    def _follow(self, num_chosen: int, num_right: int, most_right: int) -> None:
        """Go on in the source of the last draft; of its tokens some were right, out of `most_right`."""
        if most_right and num_right == most_right:
            self._place, self._num_lost = self._place + num_chosen, 0
        elif num_right or (most_right and not self._num_lost):
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
        """Note whether a token after a match of so many tokens was right, whether it was run or not."""
        kind = _CLASSES[min(length, MAX_MATCH)]
        for rates, weight in ((self._rates, _WEIGHT), (self._pool.rates, _WEIGHT_OF_POOL)):
            rates[self._source][kind] += weight * (is_right - rates[self._source][kind])

    def _next_rates(self) -> Iterator[float]:
        """Yield how often the next tokens of a draft are right: the more often, the more tokens agree before them."""
        rates = self._rates[self._source]
        for length in range(self._length, self._length + self._policy.num_tokens):
            yield rates[_CLASSES[min(length, MAX_MATCH)]]

    def _rate(self, source: int, length: int) -> float:
        """Return how often the token after a match of so many tokens is right; 0 without one."""
        return self._rates[source][_CLASSES[length]] if length else 0.0

    def _find(self) -> None:
        """Find the source and place of the next draft: where the last one goes on, or where more can be expected."""
        ids, end = self.ids, len(self.ids)
        source, place, length = self._source, self._place, 0
        if source >= 0:
            place = self._near() if self._num_lost else place
            length = self._sources[source].length_at(place, ids, end)
        best = self._rate(source, length)
        for number, other in enumerate(self._sources):
            if length >= _SURE:
                break
            found, num_equal = other.find(ids, end)
            if (rate := self._rate(number, num_equal)) > best:
                best, source, place, length = rate, number, found, num_equal
                self._num_lost = 0
        self._source, self._place, self._length = source, place, length

    def _near(self) -> int:
        """Return where a copy that was left may go on: after the last token, near the place where it was left."""
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
