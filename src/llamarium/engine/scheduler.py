"""Who is run next: answers join, leave and wait for blocks between any two steps. Never torch.

- First come, first served. A request that waits for memory may be overtaken by smaller ones, `MAX_OVERTAKEN` times.
- Who has begun gets its next token in every step. What is left of a step reads prompts: half of it the one that came
  first, half of it the one with the least left to read. So a short prompt beside a giant takes twice as long as alone
  at most, and so does the giant.
- Who has a beginning in common with a prompt that is being read waits until that is there, instead of reading it too.
- Where blocks run out, who came last gives its own back, and waits with what it has. When there is room again its
  tokens are run anew: the same tokens, hence the same keys and values.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llamarium.engine.pooling import Pool
from llamarium.engine.prefix import Key, Match, PrefixIndex, block_key, root_key
from llamarium.engine.request import FinishReason, Request
from llamarium.engine.scoring import PromptScores
from llamarium.engine.speculate import Guess, Guesser, Guessing
from llamarium.runtime.batch import Span
from llamarium.runtime.blocks import BlockTable, blocks_for
from llamarium.sampling.row import SamplingRow

MAX_OVERTAKEN = 32
"""How many may overtake a request that waits for memory."""

_MAX_SKIPPED = 8  # requests that wait for memory, and are passed by in one step


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One answer in the making.

    Attributes:
        number: Of its request, by arrival.
        row: Which of the request's answers.
        request: What was asked.
        state: What the sampler knows of it.
        limit: Tokens, prompt included, at which it ends.
        stops: Ids that end it.
        table: Where its keys and values lie.
        ids: Its tokens: the prompt, and what was chosen.
        num_computed: How many of them have their keys and values in the cache.
        keys: Of its whole blocks, in the index.
        promised: Keys of the whole blocks that it is going to fill, the next one last.
        waits_for: The key of a block that it waits for somebody else to fill.
        num_sought: How many of the prompt's tokens were looked for in the cache.
        num_cached: How many of them were there when it began.
        leader: Of several answers to one prompt, the one that runs it for the others.
        followers: Those that wait for this one to have run the prompt.
        scores: Of its prompt, where they are asked for, until they have been told.
        guesser: Guesses its next tokens, where that is asked for.
        guess: What may come next.
        pool: Gathers its hidden states, where its vector is wanted and no token.
        finish_reason: Why it ended.
    """

    number: int
    row: int
    request: Request
    state: SamplingRow
    limit: int
    stops: frozenset[int]
    table: BlockTable
    ids: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    keys: list[Key] = field(default_factory=list[Key])
    promised: list[Key] = field(default_factory=list[Key])
    waits_for: Key | None = None
    num_sought: int = 0
    num_cached: int = -1  # before it begins
    leader: "EngineSequence | None" = None
    followers: "list[EngineSequence]" = field(default_factory=list["EngineSequence"])
    scores: PromptScores | None = None
    guesser: Guesser | None = None
    guess: Guess = field(default_factory=Guess)
    pool: Pool | None = None
    finish_reason: FinishReason | None = None
    num_overtaken: int = 0
    free_blocks_at_refusal: int = -1  # free blocks when there was last no room for it

    @property
    def order(self) -> tuple[int, int]:
        """Who came first."""
        return self.number, self.row

    @property
    def num_uncomputed(self) -> int:
        """Tokens that have not been run."""
        return len(self.ids) - self.num_computed

    def root(self) -> Key:
        """Return the key that its first block goes on from."""
        return root_key(self.request.adapter, self.request.salt)

    def span(self, end: int) -> Span:
        """Return its tokens from where it has been run to before `end`, and what is guessed after its last one."""
        is_all = end == len(self.ids)
        ids, num_logits = self.ids[self.num_computed : end], int(is_all and self.pool is None)
        num_logits += self.num_wanted(self.num_computed, end)
        if is_all and self.guess.num_scheduled:
            ids += self.guess.ids[: self.guess.num_scheduled]
            num_logits += self.guess.num_scheduled
        return Span(ids, self.num_computed, self.table.blocks, num_logits, self.request.adapter)

    def num_wanted(self, start: int, end: int) -> int:
        """Return of how many tokens from `start` to before `end` the logits score the prompt."""
        return 0 if self.scores is None else self.scores.num_wanted(start, end)


StepItem = tuple[EngineSequence, int]
"""An answer, and up to which of its tokens it is run."""


class Scheduler:
    """Who runs, who waits, and who has which blocks.

    Args:
        index: The cache's blocks, and what they hold.
        copy_block: The cache's.
        max_num_seqs: How many run side by side at most.
        most_logits: Of how many tokens of prompts the logits may be wanted in a step.
        shares: Keys and values are taken from who had the same tokens.

    Attributes:
        running: Those that have blocks, by arrival.
        waiting: Those that have none, by arrival.
        num_preempted: How often somebody had to give blocks back.
        guessing: Guesses their next tokens, if anything does.
    """

    def __init__(
        self,
        index: PrefixIndex,
        copy_block: Callable[[int, int], None],
        max_num_seqs: int,
        most_logits: int,
        *,
        shares: bool = True,
    ) -> None:
        self._index, self._pool, self._copy_block = index, index.pool, copy_block
        self._max_num_seqs, self._most_logits, self._shares = max_num_seqs, most_logits, shares
        self.running: list[EngineSequence] = []
        self.waiting: list[EngineSequence] = []
        self.num_preempted = 0
        self.guessing: Guessing | None = None
        self._promised = Counter[Key]()

    def add(self, sequences: Sequence[EngineSequence]) -> None:
        """Take the answers to one prompt; the first one runs it for all, where keys and values are shared."""
        first, *others = sequences
        insort(self.waiting, first, key=_order)
        if self._shares:
            first.followers = others
            for sequence in others:
                sequence.leader = first
        else:
            for sequence in others:
                insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: EngineSequence) -> None:
        """Let an answer go, with its blocks; nobody knows of it afterwards."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
        self._let_follow_alone(sequence)

    def schedule(self, chunk: Callable[[int, Sequence[int]], int]) -> list[StepItem]:
        """Return what the next step runs, with blocks for all of it; nothing, where nobody has anything left to run.

        Args:
            chunk: Says how many tokens of prompts may be run: beside so many that stream, of prompts of such lengths.
        """
        self._make_room()
        self._admit()
        streaming = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        reading = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        self._guess(streaming)
        work = [(sequence, len(sequence.ids)) for sequence in streaming]
        if not reading:
            return work
        prompts = [len(sequence.ids) - max(0, sequence.num_cached) for sequence in reading]
        return work + _shared_out(reading, chunk(len(streaming), prompts), self._most_logits)

    def mark_computed(self, sequence: EngineSequence, end: int) -> None:
        """Note up to where an answer has been run; its whole blocks can be found from now on."""
        sequence.num_computed = end
        if not self._shares:
            return
        size, keys = self._pool.block_size, sequence.keys
        while (start := len(keys) * size) + size <= end:
            keys.append(self._enter(sequence, start, start + size))
            if sequence.promised:
                self._drop_promise(sequence.promised.pop())

    def fork(self, leader: EngineSequence) -> list[EngineSequence]:
        """Let those that wait for this one's prompt go on from it; return those that there is room for."""
        followers, leader.followers = leader.followers, []
        joined: list[EngineSequence] = []
        for sequence in followers:
            sequence.leader, sequence.num_cached, sequence.scores = None, leader.num_cached, leader.scores
            if len(self.running) < self._max_num_seqs and self._pool.num_free > len(self.running):
                sequence.table = leader.table.fork(leader.num_computed, self._copy_block)
                sequence.ids, sequence.num_computed, sequence.keys = (
                    list(leader.ids),
                    leader.num_computed,
                    list(leader.keys),
                )
                insort(self.running, sequence, key=_order)
                joined.append(sequence)
            else:
                insort(self.waiting, sequence, key=_order)
        return joined

    def _let_follow_alone(self, leader: EngineSequence) -> None:
        """Let those that wait for an answer that goes wait for themselves."""
        if not leader.followers:
            return
        (first, *others), leader.followers = leader.followers, []
        first.leader, first.followers = None, others
        for sequence in others:
            sequence.leader = first
        insort(self.waiting, first, key=_order)

    def _make_room(self) -> None:
        """Give each of the running the blocks of its next tokens; where there are none, who came last waits."""
        for sequence in list(self.running):
            if not sequence.table.blocks:  # it has been sent to wait meanwhile
                continue
            while sequence.table.missing(len(sequence.ids)) > self._pool.num_free and sequence.table.blocks:
                self._preempt(self.running[-1])
            if sequence.table.blocks:
                sequence.table.reserve(len(sequence.ids))

    def _guess(self, streaming: Sequence[EngineSequence]) -> None:
        """Guess the next tokens of those who stream, as far as there are blocks for them."""
        begun = [(sequence, sequence.guesser) for sequence in streaming if sequence.guesser is not None]
        if self.guessing is None or not begun:
            return
        rows = [(guesser, sequence.limit - len(sequence.ids)) for sequence, guesser in begun]
        for (sequence, _), guess in zip(begun, self.guessing.guess(rows, len(streaming)), strict=True):
            sequence.guess = guess
            num_tokens = len(sequence.ids) + guess.num_scheduled
            others = len(self.running) - 1  # who may need a block each
            if sequence.table.missing(num_tokens) + others > self._pool.num_free:
                guess.num_scheduled = 0
            else:
                sequence.table.reserve(num_tokens)

    def _preempt(self, sequence: EngineSequence) -> None:
        self.num_preempted += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        insort(self.waiting, sequence, key=_order)

    def _admit(self) -> None:
        """Let those that wait begin, as far as there is room."""
        skipped: list[EngineSequence] = []
        place = 0
        while place < len(self.waiting) and len(self.running) < self._max_num_seqs and len(skipped) < _MAX_SKIPPED:
            sequence = self.waiting[place]
            if sequence.waits_for in self._promised:
                place += 1
                continue
            found = self._find(sequence)
            if found.missing in self._promised:
                sequence.waits_for = found.missing
                place += 1
            elif self._begin(sequence, found):
                del self.waiting[place]
                insort(self.running, sequence, key=_order)
                for other in skipped:
                    other.num_overtaken += 1
            elif sequence.num_overtaken >= MAX_OVERTAKEN:
                return
            else:
                skipped.append(sequence)
                place += 1

    def _find(self, sequence: EngineSequence) -> Match:
        """Return what is there of an answer's tokens; the last one is run in any case, and what is scored or counts."""
        counts_all = sequence.pool is not None and sequence.pool.kind == "mean"
        if not self._shares or counts_all or self._pool.num_free <= sequence.free_blocks_at_refusal:
            return Match([], [])
        most = None if sequence.scores is None else sequence.scores.num_skipped
        sought = (sequence.ids[:-1] or sequence.request.prompt_ids[:-1])[:most]
        if sequence.num_cached < 0:
            sequence.num_sought = len(sought)
        return self._index.find(sequence.root(), sought)

    def _begin(self, sequence: EngineSequence, found: Match) -> bool:
        """Give an answer blocks for all of its tokens, those that are there first; False if there is no room.

        Each of the running keeps a block that it may take next, so that who begins is not sent back at once.
        """
        if self._pool.num_free <= sequence.free_blocks_at_refusal:
            return False
        sequence.ids = sequence.ids or list(sequence.request.prompt_ids)
        num_free = self._pool.num_free
        sequence.table.share(found.blocks)
        if sequence.table.missing(len(sequence.ids)) + len(self.running) > self._pool.num_free:
            sequence.free_blocks_at_refusal = num_free
            sequence.table.release()
            return False
        self._take(sequence, found)
        sequence.table.reserve(len(sequence.ids))
        sequence.free_blocks_at_refusal = -1
        if self._shares:
            self._promise(sequence)
        return True

    def _promise(self, sequence: EngineSequence) -> None:
        """Note which whole blocks an answer is going to fill with the tokens that it has."""
        size, key = self._pool.block_size, sequence.keys[-1] if sequence.keys else sequence.root()
        promised: list[Key] = []
        for start in range(len(sequence.keys) * size, len(sequence.ids) - size + 1, size):
            key = block_key(key, sequence.ids[start : start + size])
            promised.append(key)
        self._promised.update(promised)
        sequence.promised = promised[::-1]

    def _drop_promise(self, key: Key) -> None:
        self._promised[key] -= 1
        if not self._promised[key]:
            del self._promised[key]

    def _take(self, sequence: EngineSequence, found: Match) -> None:
        """Go on from what was found, whose whole blocks the answer has.

        A block that holds nothing else, and that nobody has, is written on in place; so is the last one that is free.
        """
        sequence.keys, sequence.num_computed = found.keys, len(found.keys) * self._pool.block_size
        if found.partial is not None:
            has_room = sequence.table.missing(len(sequence.ids)) < self._pool.num_free
            if not self._pool.is_owned(found.partial) and (found.is_all or not has_room):
                sequence.table.share([found.partial])
                self._index.take_out(found.partial)
                sequence.num_computed += found.num_partial
            elif has_room:
                sequence.table.copy(found.partial, self._copy_block)
                sequence.num_computed += found.num_partial
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed

    def _give_back(self, sequence: EngineSequence) -> None:
        """Give an answer's blocks back; what they hold can be found until they are taken for something else."""
        start = len(sequence.keys) * self._pool.block_size
        if self._shares and sequence.num_computed > start:
            self._enter(sequence, start, sequence.num_computed)
        sequence.table.release()
        if sequence.guesser is not None:
            sequence.guesser.release()
        for key in sequence.promised:
            self._drop_promise(key)
        sequence.promised = []
        sequence.keys, sequence.num_computed, sequence.guess = [], 0, Guess()

    def _enter(self, sequence: EngineSequence, start: int, end: int) -> Key:
        parent = sequence.keys[-1] if sequence.keys else sequence.root()
        block = sequence.table.blocks[start // self._pool.block_size]
        return self._index.enter(parent, block, sequence.ids[start:end])


def _order(sequence: EngineSequence) -> tuple[int, int]:
    return sequence.order


def _shared_out(reading: Sequence[EngineSequence], room: int, most_logits: int) -> list[StepItem]:
    """Share tokens of a step out among those who read their prompts, in the order of arrival."""
    counts = dict.fromkeys(reading, 0)

    def give(sequence: EngineSequence, most: int) -> int:
        nonlocal most_logits
        start = sequence.num_computed + counts[sequence]
        count = min(most, len(sequence.ids) - start)
        if sequence.scores is not None:
            count = min(count, max(0, sequence.scores.num_skipped - start) + most_logits)
            most_logits -= sequence.scores.num_wanted(start, start + count)
        counts[sequence] += count
        return count

    left = room - give(reading[0], (room + 1) // 2)
    left -= give(
        min(reading, key=lambda sequence: (sequence.num_uncomputed - counts[sequence] or 1 << 30, sequence.order)), left
    )
    for sequence in reading:
        left -= give(sequence, left)
    return [(sequence, sequence.num_computed + count) for sequence, count in counts.items() if count]


def capacity_blocks(limit: int, block_size: int) -> int:
    """Return how many blocks an answer of so many tokens has at its end: the last token is never run."""
    return blocks_for(max(1, limit - 1), block_size)
