"""A draft model: a smaller one guesses the next tokens, and the model checks them in one pass. Never torch.

The draft says its most probable token, several times in a row, for all answers side by side. The model runs them after
the last token of each answer, as with prompt lookup (`engine/speculate.py`): no guess changes which token is chosen.

The draft has a cache of its own, as many blocks as the model's. What it has run beyond the first wrong guess is
overwritten, since a slot is a position. An answer that ends, is aborted or is sent to wait gives its blocks back; what
they hold is found again by requests with the same beginning. An answer for which there is no block is not guessed for.

Whether a guess pays depends on how often it is right and on what passes of both models cost. All of it is measured, and
`DraftModel` guesses as far ahead as brings the most tokens a second. Where that is not at all, the draft rests; a
hundredth of the time goes into trying it on one answer, so that it is taken up again when texts become easier.

Source: speculative decoding (https://arxiv.org/abs/2211.17192), with a draft that is certain of itself.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from llamarium.engine.prefix import Key, PrefixIndex, root_key
from llamarium.engine.speculate import Guess, Guesser, averaged, checked_length
from llamarium.errors import MemoryBudgetError
from llamarium.runtime.batch import Span, pack
from llamarium.runtime.blocks import BlockTable
from llamarium.runtime.runner import CacheDtype, Logits, Runner

_RATE = 0.6  # how often a guess is right, before it is known; small models of a family agree on 0.5 to 0.8 of tokens
_COST, _DRAFT_COST = 0.25, 0.25  # of a pass: one more token in it, and one pass of the draft, before they are known
_RATE_WEIGHT = 1 / 16  # of the newest guess in the moving average
_REMEASURED = 64  # passes with guesses until one without, as what guessing is compared with may have changed
_TRIAL_TOKENS, _TRIAL_SHARE = 2, 0.01  # a guess that may not pay, and how much of the time may go into such guesses
_NEAR = 16  # tokens that the draft has not run yet and reads beside its first guess
_CHUNK = 512  # tokens that it reads in a step otherwise, so that those who stream go on streaming
_ANSWER_TOKENS = 128  # what is taken for the length of an answer, to see whether reading its prompt pays


class DraftModel:
    """A model that guesses, how far ahead, and what has come of it.

    One object may serve one engine after another, and then begins with what it has learned.

    Args:
        runner: Executes it; its vocabulary is that of the model it guesses for (`generation/drafting.py` checks that).
        num_tokens: The most tokens that are guessed at once.

    Attributes:
        passes: Passes over the model that it guesses for, prompts apart.
        drafted: Tokens that were guessed and run in them.
        accepted: Guesses that were right, and so saved a pass.

    Raises:
        OptionError: If `num_tokens` is not 1 to 64.
    """

    def __init__(self, runner: Runner, num_tokens: int = 8) -> None:
        self.runner, self.num_tokens = runner, checked_length(num_tokens)
        self.passes = self.drafted = self.accepted = 0
        self._rate = _RATE
        self._single_s: dict[int, float] = {}  # a pass over one token a row, by the number of rows
        self._extra_s: float | None = None  # each further token in the same pass
        self._draft_s: dict[int, float] = {}  # a pass of the draft, by the number of rows
        self._read_s: float | None = None  # each token of a prompt that the draft reads
        self._saved_s, self._num_since, self._is_trial = 0.0, 0, False

    def counts(self) -> dict[str, int]:
        """Return `passes`, `drafted` and `accepted`."""
        return {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted}

    def open(
        self, num_blocks: int, block_size: int, kv_cache_dtype: CacheDtype, clock: Callable[[], float]
    ) -> "Drafter":
        """Return what guesses for one engine.

        Raises:
            MemoryBudgetError: If there is no memory for the draft's keys and values.
        """
        return Drafter(self, num_blocks, block_size, kv_cache_dtype, clock)

    def best_length(self, num_rows: int) -> tuple[int, float]:
        """Return how many tokens to guess in each of so many rows, and the seconds that a row's token gains by it.

        If a guess is right with probability p at each place, a pass over k of them in each row gives 1 + p + ... + p^k
        tokens a row. Both numbers are 0 where that is slower than one token at a time, and where it has to be measured
        what one at a time takes.
        """
        single_s = self._single_s.get(num_rows)
        if single_s is None or self._num_since >= _REMEASURED:
            return 0, 0.0
        extra_s = _COST * single_s / num_rows if self._extra_s is None else self._extra_s
        length_s = num_rows * max(0.0, extra_s) + self._draft_cost(num_rows, single_s)
        best, best_s = 0, single_s
        power = expected = 1.0
        for length in range(1, self.num_tokens + 1):
            power *= self._rate
            expected += power
            token_s = (single_s + length * length_s) / expected
            if token_s < best_s:
                best, best_s = length, token_s
        return best, single_s - best_s

    def trial_length(self, num_rows: int) -> int:
        """Return how many tokens to guess where guessing does not pay: 0, until the time for a trial has been saved."""
        is_due = num_rows in self._single_s and self._saved_s > 0 and self._num_since < _REMEASURED
        self._is_trial = is_due
        return min(_TRIAL_TOKENS, self.num_tokens) if is_due else 0

    def pays_reading(self, num_tokens: int, room: int, gain_s: float) -> bool:
        """Whether to read so many tokens for an answer that may get `room` more, each of which gains so much."""
        is_trial = not gain_s
        return is_trial or self._read_s is None or num_tokens * self._read_s <= gain_s * min(room, _ANSWER_TOKENS)

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note what a pass over one token of each row, and so many guessed ones, took."""
        self.passes += 1
        self.drafted += num_drafted
        single_s = self._single_s.get(num_rows)
        if not num_drafted:
            self._single_s[num_rows] = averaged(single_s, seconds)
            self._saved_s += _TRIAL_SHARE * seconds
            self._num_since = 0
        elif single_s is not None:
            self._num_since += 1
            self._extra_s = averaged(self._extra_s, (seconds - single_s) / num_drafted)
            self._spend(seconds - single_s)
        self._is_trial = False

    def record_draft(self, num_rows: int, length: int, seconds: float) -> None:
        """Note what so many passes of the draft took."""
        self._draft_s[num_rows] = averaged(self._draft_s.get(num_rows), seconds / length)
        self._spend(seconds)

    def record_reading(self, num_tokens: int, seconds: float) -> None:
        """Note what it took the draft to read tokens that it had not run."""
        self._read_s = averaged(self._read_s, seconds / num_tokens)
        self._spend(seconds)

    def record_guess(self, is_right: bool) -> None:
        """Note whether a guessed token came."""
        self._rate += _RATE_WEIGHT * (is_right - self._rate)

    def _spend(self, seconds: float) -> None:
        """Take from what was saved for trials; what is missing has to be saved before the next one."""
        if self._is_trial:
            self._saved_s -= max(0.0, seconds)

    def _draft_cost(self, num_rows: int, single_s: float) -> float:
        """Return the seconds of a pass of the draft: measured, if need be at the nearest number of rows."""
        if not self._draft_s:
            return _DRAFT_COST * single_s
        return self._draft_s[min(self._draft_s, key=lambda known: abs(known - num_rows))]


class Drafter:
    """Guesses for one engine: the draft's cache, and who has which of its blocks.

    Args:
        draft: Guesses.
        num_blocks: Of the cache.
        block_size: Slots of a block.
        kv_cache_dtype: What the draft's keys and values are kept in.
        clock: Returns seconds.

    Attributes:
        cache: The draft's keys and values.
    """

    def __init__(
        self,
        draft: DraftModel,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: CacheDtype,
        clock: Callable[[], float],
    ) -> None:
        self._draft, self._clock = draft, clock
        self.cache = draft.runner.new_cache(num_blocks, kv_cache_dtype, block_size)
        self._index = PrefixIndex(num_blocks, block_size)

    @property
    def num_used_blocks(self) -> int:
        """Those that answers have."""
        return self.cache.num_blocks - self._index.pool.num_free

    def reserve(self, num_blocks: int) -> None:
        """Have so many blocks.

        Raises:
            MemoryBudgetError: If there is not that much memory.
        """
        before = self.cache.num_blocks
        if num_blocks > before:
            self.cache.grow(num_blocks)
            self._index.pool.add(num_blocks - before)

    def begin(self, ids: list[int], salt: str) -> "DraftGuesser":
        """Return what guesses one answer's tokens; nothing is read until it is asked."""
        return DraftGuesser(self._draft, self._index, ids, root_key(-1, salt))

    def record_pass(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """Note what a pass took."""
        self._draft.record_pass(num_rows, num_drafted, seconds)

    def guess(self, rows: Sequence[tuple[Guesser, int]], num_rows: int) -> list[Guess]:
        """Guess the next tokens of some answers side by side.

        Args:
            rows: What guesses for each, and how many tokens it may still get, at least 1.
            num_rows: Answers that get a token in the same pass.
        """
        asked = [(cast(DraftGuesser, guesser), room) for guesser, room in rows]
        for guesser, _ in asked:
            guesser.settle()
        length, gain_s = self._draft.best_length(num_rows)
        able = [(guesser, room) for guesser, room in asked if room > 1]
        if not length and (length := self._draft.trial_length(num_rows)):
            able = sorted(able, key=lambda one: one[0].num_uncomputed)[:1]
        if length and able:
            with suppress(MemoryBudgetError):  # for what lies between its layers: then this step goes on without
                self._propose(self._ready(able, length, gain_s), length)
        return [guesser.told() for guesser, _ in asked]

    def _ready(
        self, rows: Sequence[tuple["DraftGuesser", int]], length: int, gain_s: float
    ) -> list[tuple["DraftGuesser", int]]:
        """Return those whose tokens the draft has read but for a few; read what is missing, a chunk in a step."""
        ready: list[tuple[DraftGuesser, int]] = []
        chunk, most = _CHUNK, self._draft.runner.config.max_position_embeddings
        for guesser, room in rows:
            guesser.open()
            num_far = 0 if guesser.num_uncomputed <= _NEAR else guesser.num_uncomputed - 1
            if len(guesser.ids) + length > most or not self._draft.pays_reading(num_far, room, gain_s):
                continue
            if not guesser.has_room(len(guesser.ids) + length):
                continue
            count = min(num_far, chunk)
            if count:
                self._read(guesser, count)
                chunk -= count
            if guesser.num_uncomputed <= _NEAR:
                ready.append((guesser, room))
        return ready

    def _read(self, guesser: "DraftGuesser", count: int) -> None:
        """Run tokens of which no guess is wanted."""
        begin, start = self._clock(), guesser.num_computed
        self._run([Span(guesser.ids[start : start + count], start, guesser.table.blocks, 0)])
        guesser.mark_computed(start + count)
        self._draft.record_reading(count, self._clock() - begin)

    def _propose(self, rows: Sequence[tuple["DraftGuesser", int]], length: int) -> None:
        """Let the draft say the next tokens of some answers, none more than its answer has room for."""
        begin, num_steps = self._clock(), 0
        for step in range(length):
            spans = [(guesser, guesser.next_span()) for guesser, room in rows if room - 1 > step]
            if not spans:
                break
            chosen = self._run([span for _, span in spans]).argmax(-1).tolist()
            for (guesser, _), token_id in zip(spans, chosen, strict=True):
                guesser.push(token_id)
            num_steps += 1
        if num_steps:
            self._draft.record_draft(len(rows), num_steps, self._clock() - begin)

    def _run(self, spans: Sequence[Span]) -> Logits:
        return self._draft.runner.run(pack(spans, self.cache.block_size), self.cache)


class DraftGuesser:
    """What a draft has run of one answer, and guesses.

    Args:
        draft: Is told which guesses are right.
        index: Of the draft's cache.
        ids: The answer's tokens, prompt included; the caller appends to them.
        root: The key that the first block goes on from.

    Attributes:
        ids: The same.
        table: Where the draft's keys and values of it lie.
        num_computed: How many of the tokens have theirs there.
    """

    def __init__(self, draft: DraftModel, index: PrefixIndex, ids: list[int], root: Key) -> None:
        self._draft, self._index, self._root = draft, index, root
        self.ids, self.table, self.num_computed = ids, BlockTable(index.pool), 0
        self._keys: list[Key] = []
        self._start, self._guessed = 0, list[int]()  # where the guess begins; all of it but the last has been run
        self._is_open = False

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the draft has not run."""
        return len(self.ids) - self.num_computed

    def open(self) -> None:
        """Take the blocks that are there of its beginning."""
        if not self._is_open:
            self._is_open = True
            found = self._index.find(self._root, self.ids[:-1])
            self.table.share(found.blocks)
            self._keys, self.num_computed = list(found.keys), len(found.keys) * self._index.pool.block_size

    def has_room(self, num_tokens: int) -> bool:
        """Have blocks for so many tokens in all; False if there are none."""
        if self.table.missing(num_tokens) > self._index.pool.num_free:
            return False
        self.table.reserve(num_tokens)
        return True

    def mark_computed(self, end: int) -> None:
        """Note up to where tokens have been run that stay; whole blocks of them can be found from now on."""
        self.num_computed = end
        size, keys = self._index.pool.block_size, self._keys
        while (start := len(keys) * size) + size <= end:
            parent, block = keys[-1] if keys else self._root, self.table.blocks[start // size]
            keys.append(self._index.enter(parent, block, self.ids[start : start + size]))

    def next_span(self) -> Span:
        """Return the tokens after which the next guess comes."""
        if not self._guessed:
            return Span(self.ids[self.num_computed :], self.num_computed, self.table.blocks)
        return Span(self._guessed[-1:], len(self.ids) + len(self._guessed) - 1, self.table.blocks)

    def push(self, token_id: int) -> None:
        """Take the next guess."""
        self._start = len(self.ids)
        self._guessed.append(token_id)

    def settle(self) -> None:
        """Keep what has been run of the guesses that came; to be called before each next guess.

        A step ends with the first token that was not guessed, so that all but the answer's last one were.
        """
        if self._guessed:
            self.mark_computed(min(self._start + len(self._guessed), len(self.ids)) - 1)
            self._guessed = []

    def told(self) -> Guess:
        """Return the guess."""
        return Guess(ids=list(self._guessed), num_scheduled=len(self._guessed))

    def check(self, guess: Guess, place: int, token_id: int) -> bool:
        """Note what came at a place of a guess; return whether the logits after it are there."""
        if place >= len(guess.ids):
            return False
        is_right = token_id == guess.ids[place]
        self._draft.record_guess(is_right)
        is_ahead = is_right and place < guess.num_scheduled
        self._draft.accepted += is_ahead
        return is_ahead

    def release(self) -> None:
        """Give its blocks back; what they hold can be found until they are taken for something else."""
        self.settle()
        self.table.release()
        self._keys, self.num_computed, self._is_open = [], 0, False
