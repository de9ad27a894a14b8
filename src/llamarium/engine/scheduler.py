"""Which sequences run in the next step, and which blocks each of them has. Never torch.

- First come, first served. A request that waits for memory may be overtaken by smaller ones, `MAX_OVERTAKEN` times.
- A sequence that decodes gets its next token in every step. The rest of a step reads prompts: half of it the oldest
  one, half of it the one with the fewest uncomputed tokens. So a short prompt beside a giant takes at most twice as
  long as alone, and so does the giant.
- A sequence whose beginning is just being computed for another one waits for that, instead of computing it too.
- When blocks run out, the newest sequence is preempted: it gives its blocks back, and waits with its tokens. When there
  is room again they are computed anew: the same tokens, hence the same keys and values.
- What a prompt begins with may be on disk. Then its blocks are read from there, some in each step, before the rest of
  it is computed.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

from llamarium.engine.prefix import Key, Match, PrefixIndex, block_key
from llamarium.engine.proposers.base import Proposer
from llamarium.engine.request import Draft, EngineSequence, StepItem
from llamarium.runtime.batch import blocks_for

MAX_OVERTAKEN = 32
"""How many may overtake a request that waits for memory."""

MAX_TAPPED = 256
"""Prompt tokens of a step that hands out hidden states: a layer's of all tokens are in memory for a while."""

_MAX_SKIPPED = 8  # requests that wait for memory and are passed over in one step
_LOADED, _LOADED_BESIDE = 64, 4  # blocks from disk in a step, alone and beside streams
_order = attrgetter("number", "row")  # by arrival


class Scheduler:
    """The sequences of an engine, at most `max_num_seqs` of them running, and their blocks.

    A step computes the logits of at most `most_logits` prompt tokens. `shares` reuses keys and values of equal tokens.
    `live` are all sequences that have not ended, by request number; `running` those with blocks, by arrival; `waiting`
    the others.
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
        self.live: dict[int, list[EngineSequence]] = {}
        self.running: list[EngineSequence] = []
        self.waiting: list[EngineSequence] = []
        self.num_preempted = 0
        self.proposer: Proposer | None = None
        self._promised = Counter[Key]()

    def add(self, sequences: Sequence[EngineSequence]) -> None:
        """Take a request's sequences; the first one computes the prompt for all, if keys and values are shared."""
        first, *others = sequences
        self.live[first.number] = list(sequences)
        if self._shares:
            first.followers = others
            for sequence in others:
                sequence.leader = first
        for sequence in [first] if self._shares else sequences:
            insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: EngineSequence) -> None:
        """Remove a sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence.leader is not None:
            sequence.leader.followers.remove(sequence)
        if sequence.followers:
            self._release_followers(sequence)
        others = self.live[sequence.number]
        others.remove(sequence)
        if not others:
            del self.live[sequence.number]

    def schedule(self, chunk: Callable[[int, Sequence[int]], int]) -> list[StepItem]:
        """Return what the next step runs, with blocks for all of it; nothing if no sequence has uncomputed tokens.

        `chunk` is called with the number of decoding sequences and the prompts' lengths for the prompt tokens of the
        step.
        """
        self._make_room()
        if self.waiting:
            self._admit()
        decoding = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        if self._index.disk is not None:
            self._load(_LOADED_BESIDE if decoding else _LOADED)
        reading = [one for one in self.running if one.num_uncomputed > 1 and not one.is_on_disk]
        if self.proposer is not None:
            self._propose(self.proposer, decoding)
        items = [sequence.item(len(sequence.ids)) for sequence in decoding]
        if not reading:
            return items
        prompts = [len(sequence.ids) - max(0, sequence.num_cached) for sequence in reading]
        room, is_tapped = chunk(len(decoding), prompts), any(sequence.is_tapped for sequence in reading)
        return items + _share_out(reading, min(room, MAX_TAPPED) if is_tapped else room, self._most_logits)

    def mark_computed(self, sequence: EngineSequence, end: int) -> None:
        """Note that a sequence's tokens before `end` are computed; its whole blocks can be found from now on."""
        sequence.num_computed = end
        if not self._shares:
            return
        size, keys = self._pool.block_size, sequence.keys
        while (start := len(keys) * size) + size <= end:
            keys.append(self._enter(sequence, start, start + size))
            if sequence.promised:
                self._drop_promise(sequence.promised.pop())

    def fork(self, leader: EngineSequence) -> list[EngineSequence]:
        """Give a computed prompt to the followers; return those for which there is room, the others wait."""
        followers, leader.followers = leader.followers, []
        joined: list[EngineSequence] = []
        for sequence in followers:
            sequence.leader, sequence.scores = None, leader.scores
            sequence.num_cached, sequence.num_disk = leader.num_cached, leader.num_disk
            sequence.states = None if leader.states is None else leader.states.fork()
            if len(self.running) < self._max_num_seqs and self._pool.num_free > len(self.running):
                sequence.table = leader.table.fork(leader.num_computed, self._copy_block)
                sequence.ids, sequence.keys = list(leader.ids), list(leader.keys)
                sequence.num_computed = leader.num_computed
                insort(self.running, sequence, key=_order)
                joined.append(sequence)
            else:
                insort(self.waiting, sequence, key=_order)
        return joined

    def _release_followers(self, leader: EngineSequence) -> None:
        """Make the first follower of a sequence that leaves the leader of the others."""
        (first, *others), leader.followers = leader.followers, []
        first.leader, first.followers = None, others
        for sequence in others:
            sequence.leader = first
        insort(self.waiting, first, key=_order)

    def _make_room(self) -> None:
        """Give each running sequence the blocks of its next tokens; preempt the newest when blocks run out."""
        for sequence in list(self.running):
            if not sequence.table.blocks:  # preempted meanwhile
                continue
            while sequence.table.missing(len(sequence.ids)) > self._pool.num_free and sequence.table.blocks:
                self._preempt(self.running[-1])
            if sequence.table.blocks:
                sequence.table.reserve(len(sequence.ids))

    def _propose(self, proposer: Proposer, decoding: Sequence[EngineSequence]) -> None:
        """Give decoding sequences a draft, as far as there are blocks for it."""
        begun = [sequence for sequence in decoding if sequence.sampling.num_tokens and not sequence.is_tapped]
        for sequence, draft in zip(begun, proposer.propose(begun, len(decoding)), strict=True):
            sequence.draft = draft
            num_tokens = len(sequence.ids) + draft.num_scheduled
            others = len(self.running) - 1  # each may need a block
            if sequence.table.missing(num_tokens) + others > self._pool.num_free:
                draft.num_scheduled = 0
            else:
                sequence.table.reserve(num_tokens)

    def _preempt(self, sequence: EngineSequence) -> None:
        self.num_preempted += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        insort(self.waiting, sequence, key=_order)

    def _admit(self) -> None:
        """Begin waiting sequences, in the order of arrival; one that was refused waits for more free blocks."""
        skipped: list[EngineSequence] = []
        place = 0
        while place < len(self.waiting) and len(self.running) < self._max_num_seqs and len(skipped) < _MAX_SKIPPED:
            sequence = self.waiting[place]
            if sequence.waits_for in self._promised:
                place += 1
                continue
            has_room = self._pool.num_free > sequence.free_blocks_at_refusal
            found = Match([], [])
            if self._shares and has_room:
                sought = (sequence.ids or sequence.request.prompt_ids)[: sequence.num_searchable]
                found = self._index.find(sequence.root, sought)
                if sequence.num_cached < 0:
                    sequence.num_sought = len(sought)
            if found.missing in self._promised:
                sequence.waits_for = found.missing
                place += 1
            elif has_room and self._begin(sequence, found):
                del self.waiting[place]
                insort(self.running, sequence, key=_order)
                for other in skipped:
                    other.num_overtaken += 1
            elif sequence.num_overtaken >= MAX_OVERTAKEN:
                return
            else:
                skipped.append(sequence)
                place += 1

    def _begin(self, sequence: EngineSequence, found: Match) -> bool:
        """Give a sequence blocks for all of its tokens, found ones first; False if there is no room.

        For each running sequence a free block is left, so that the new one is not preempted at once. A partial block is
        copied; one without owners is written on in place if it holds nothing else, or if no block is free for the copy.
        """
        sequence.ids = sequence.ids or list(sequence.request.prompt_ids)
        num_free = self._pool.num_free
        if found.blocks:
            sequence.table.share(found.blocks)
        if sequence.table.missing(len(sequence.ids)) + len(self.running) > self._pool.num_free:
            sequence.free_blocks_at_refusal = num_free
            sequence.table.release()
            return False

        sequence.keys, sequence.num_computed = found.keys, len(found.keys) * self._pool.block_size
        if found.partial is not None:
            has_room = sequence.table.missing(len(sequence.ids)) < self._pool.num_free
            if not self._pool.num_owners(found.partial) and (found.is_all or not has_room):
                sequence.table.share([found.partial])
                self._index.take_out(found.partial)
                sequence.num_computed += found.num_partial
            elif has_room:
                sequence.table.copy(found.partial, self._copy_block)
                sequence.num_computed += found.num_partial
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed

        sequence.table.reserve(len(sequence.ids))
        sequence.free_blocks_at_refusal = -1
        if self._shares:
            self._promise(sequence)
            sequence.is_on_disk = self._index.disk is not None and self._index.is_on_disk(found)
        return True

    def _load(self, most: int) -> None:
        """Fill the next blocks of prompts from disk, so many at most."""
        for sequence in self.running:
            while sequence.is_on_disk and most:
                sequence.is_on_disk, most = self._load_block(sequence), most - 1
                if not sequence.is_on_disk:
                    self._index.touch(sequence.last_key)

    def _load_block(self, sequence: EngineSequence) -> bool:
        """Fill a sequence's next block from disk; return whether there may be another one."""
        start, size = len(sequence.keys) * self._pool.block_size, self._pool.block_size
        if start + size > sequence.num_searchable:
            return False
        ids, block = sequence.ids[start : start + size], sequence.table.blocks[len(sequence.keys)]
        is_there = self._index.load(sequence.last_key, block, ids)
        sequence.num_computed = start  # what was there of a block in part is overwritten
        if not sequence.sampling.num_tokens:
            sequence.num_cached = start + size * is_there
            sequence.num_disk = min(sequence.num_disk + size * is_there, sequence.num_cached)  # if loaded once more
        if is_there:
            self.mark_computed(sequence, start + size)
        return is_there

    def _promise(self, sequence: EngineSequence) -> None:
        """Note which whole blocks a sequence is going to fill with the tokens that it has."""
        size, key = self._pool.block_size, sequence.last_key
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

    def _give_back(self, sequence: EngineSequence) -> None:
        """Free a sequence's blocks; their contents can be found until they are taken for something else."""
        start = len(sequence.keys) * self._pool.block_size
        if self._shares and sequence.num_computed > start:
            self._enter(sequence, start, sequence.num_computed)
        sequence.table.release()
        if self.proposer is not None:
            self.proposer.release(sequence)
        for key in sequence.promised:
            self._drop_promise(key)
        sequence.promised = []
        sequence.keys, sequence.num_computed, sequence.draft, sequence.is_on_disk = [], 0, Draft(), False

    def _enter(self, sequence: EngineSequence, start: int, end: int) -> Key:
        block = sequence.table.blocks[start // self._pool.block_size]
        return self._index.enter(sequence.last_key, block, sequence.ids[start:end])


def _share_out(reading: Sequence[EngineSequence], room: int, most_logits: int) -> list[StepItem]:
    """Divide a step's prompt tokens among the sequences that read their prompts, in the order of arrival."""
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
    left -= give(min(reading, key=lambda one: (one.num_uncomputed - counts[one] or 1 << 30, _order(one))), left)
    for sequence in reading:
        left -= give(sequence, left)
    return [sequence.item(sequence.num_computed + count) for sequence, count in counts.items() if count]


def capacity_blocks(limit: int, block_size: int) -> int:
    """Return how many blocks a sequence of `limit` tokens has at its end: the last token is never computed."""
    return blocks_for(max(1, limit - 1), block_size)
