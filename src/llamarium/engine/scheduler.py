"""The scheduler: which sequences run in the next step, and which blocks of the KV cache each of them owns. Torch-free.

- **Order.** First come, first served. Smaller requests may overtake one that waits for memory, `MAX_OVERTAKEN` times.
- **Decode first.** Every decoding sequence gets a token in every step. Prefill gets the rest of the step: half goes to
  the oldest prompt, half to the one with the fewest uncomputed tokens. So next to a very long prompt a short one takes
  at most twice as long as alone, and so does the long one.
- **Shared prefixes.** A sequence whose prefix is being computed by another one waits for it instead of computing it
  again.
- **Preemption.** When blocks run out, the newest sequence releases its blocks and waits. Once there is room its tokens
  are computed again: the same tokens give the same keys and values.
- **Disk.** Blocks of a prompt that are on disk are read first, a few per step; then the rest is computed.
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
"""How many sequences may overtake one that waits for memory."""

MAX_TAPPED = 256
"""Prompt tokens in a step that returns hidden states, which are held in memory for all tokens of the step."""

_MAX_SKIPPED = 8  # sequences waiting for memory that one step passes over
_LOADED, _LOADED_BESIDE = 64, 4  # blocks read from disk per step, without and with decoding sequences
_order = attrgetter("number", "row")  # by arrival


class Scheduler:
    """Manages the sequences of an engine and their blocks.

    Args:
        index: The prefix cache, with the block pool.
        copy_block: Copies a block of the KV cache; called with source and target.
        max_num_seqs: Maximum number of running sequences.
        most_logits: Maximum number of prompt tokens per step whose logits are computed, for prompt log-probabilities.
        shares: Enable prefix caching.

    Attributes:
        live: All sequences that have not ended, by request number.
        running: Sequences with blocks, by arrival.
        waiting: Sequences without blocks, by arrival; followers are only in `live`.
        num_preempted: Preemptions so far.
        proposer: Proposes draft tokens; None without speculative decoding.
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
        """Add a request's sequences; with prefix caching the first one computes the prompt for all."""
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
        """Return the items of the next step, with blocks reserved; empty if no sequence has uncomputed tokens.

        Args:
            chunk: Returns how many prompt tokens the step may run, from the number of decoding sequences and the number
                of uncached tokens of each prompt in prefill.
        """
        self._make_room()
        if self.waiting:
            self._admit()

        decoding = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        if self._index.disk is not None:
            self._load(_LOADED_BESIDE if decoding else _LOADED)
        prefilling = [sequence for sequence in self.running if sequence.num_uncomputed > 1 and not sequence.is_on_disk]

        if self.proposer is not None:
            self._propose(self.proposer, decoding)
        items = [sequence.item(len(sequence.ids)) for sequence in decoding]
        if not prefilling:
            return items

        num_uncached = [len(sequence.ids) - max(0, sequence.num_cached) for sequence in prefilling]
        room = chunk(len(decoding), num_uncached)
        if any(sequence.is_tapped for sequence in prefilling):
            room = min(room, MAX_TAPPED)
        return items + _share_out(prefilling, room, self._most_logits)

    def mark_computed(self, sequence: EngineSequence, end: int) -> None:
        """Record that a sequence is computed up to `end`, and add its new whole blocks to the prefix cache."""
        sequence.num_computed = end
        if not self._shares:
            return
        size, keys = self._pool.block_size, sequence.keys
        while (start := len(keys) * size) + size <= end:
            keys.append(self._enter(sequence, start, start + size))
            if sequence.promised:
                self._drop_promise(sequence.promised.pop())

    def fork(self, leader: EngineSequence) -> list[EngineSequence]:
        """Share a computed prompt with the leader's followers; return those that run now, the others wait."""
        followers, leader.followers = leader.followers, []
        joined: list[EngineSequence] = []
        for sequence in followers:
            sequence.leader, sequence.scores = None, leader.scores
            sequence.num_cached, sequence.num_disk = leader.num_cached, leader.num_disk
            sequence.states = None if leader.states is None else leader.states.fork()

            # Each running sequence may need a block for its next token.
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
        """Make the first follower of a leader that ends the leader of the others."""
        (first, *others), leader.followers = leader.followers, []
        first.leader, first.followers = None, others
        for sequence in others:
            sequence.leader = first
        insort(self.waiting, first, key=_order)

    def _make_room(self) -> None:
        """Reserve blocks for each running sequence's next tokens; preempt the newest when blocks run out."""
        for sequence in list(self.running):
            if not sequence.table.blocks:  # this loop has preempted it
                continue
            while sequence.table.missing(len(sequence.ids)) > self._pool.num_free and sequence.table.blocks:
                self._preempt(self.running[-1])
            if sequence.table.blocks:
                sequence.table.reserve(len(sequence.ids))

    def _propose(self, proposer: Proposer, decoding: Sequence[EngineSequence]) -> None:
        """Propose draft tokens for decoding sequences, as far as there are blocks for them."""
        drafting = [sequence for sequence in decoding if sequence.sampling.num_tokens and not sequence.is_tapped]
        for sequence, draft in zip(drafting, proposer.propose(drafting, len(decoding)), strict=True):
            sequence.draft = draft
            num_tokens = len(sequence.ids) + draft.num_scheduled
            num_others = len(self.running) - 1  # each may need a block for its next token
            if sequence.table.missing(num_tokens) + num_others > self._pool.num_free:
                draft.num_scheduled = 0
            else:
                sequence.table.reserve(num_tokens)

    def _preempt(self, sequence: EngineSequence) -> None:
        self.num_preempted += 1
        self.running.remove(sequence)
        self._give_back(sequence)
        insort(self.waiting, sequence, key=_order)

    def _admit(self) -> None:
        """Admit waiting sequences in the order of arrival; a refused one is tried again when more blocks are free."""
        skipped: list[EngineSequence] = []
        index = 0
        while index < len(self.waiting) and len(self.running) < self._max_num_seqs and len(skipped) < _MAX_SKIPPED:
            sequence = self.waiting[index]
            if sequence.waits_for in self._promised:
                index += 1
                continue

            has_room = self._pool.num_free > sequence.free_blocks_at_refusal
            match = Match([], [])
            if self._shares and has_room:
                searchable_ids = (sequence.ids or sequence.request.prompt_ids)[: sequence.num_searchable]
                match = self._index.find(sequence.root, searchable_ids)
                if sequence.num_cached < 0:
                    sequence.num_sought = len(searchable_ids)

            if match.missing in self._promised:
                sequence.waits_for = match.missing
                index += 1
            elif has_room and self._begin(sequence, match):
                del self.waiting[index]
                insort(self.running, sequence, key=_order)
                for other in skipped:
                    other.num_overtaken += 1
            elif sequence.num_overtaken >= MAX_OVERTAKEN:
                return  # no later request may overtake it
            else:
                skipped.append(sequence)
                index += 1

    def _begin(self, sequence: EngineSequence, match: Match) -> bool:
        """Give a sequence blocks for all of its tokens, cached ones first; return False if there is no room.

        One free block is left for each running sequence, so that the new one is not preempted at once. A partially
        matching block is copied, unless it has no owner and either holds no other tokens or cannot be copied for lack
        of free blocks: then the sequence continues writing in it.
        """
        sequence.ids = sequence.ids or list(sequence.request.prompt_ids)
        num_free = self._pool.num_free
        if match.blocks:
            sequence.table.share(match.blocks)  # before counting free blocks: cached ones without owners are free, too
        if sequence.table.missing(len(sequence.ids)) + len(self.running) > self._pool.num_free:
            sequence.free_blocks_at_refusal = num_free
            sequence.table.release()
            return False

        sequence.keys, sequence.num_computed = match.keys, len(match.keys) * self._pool.block_size
        if match.partial is not None:
            has_room = sequence.table.missing(len(sequence.ids)) < self._pool.num_free
            if not self._pool.num_owners(match.partial) and (match.is_all or not has_room):
                sequence.table.share([match.partial])
                self._index.take_out(match.partial)
                sequence.num_computed += match.num_partial
            elif has_room:
                sequence.table.copy(match.partial, self._copy_block)
                sequence.num_computed += match.num_partial
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed

        sequence.table.reserve(len(sequence.ids))
        sequence.free_blocks_at_refusal = -1
        if self._shares:
            self._promise(sequence)
            sequence.is_on_disk = self._index.disk is not None and self._index.is_on_disk(match)
        return True

    def _load(self, max_blocks: int) -> None:
        """Read the next blocks of prompts from disk, up to `max_blocks`."""
        for sequence in self.running:
            while sequence.is_on_disk and max_blocks:
                sequence.is_on_disk, max_blocks = self._load_block(sequence), max_blocks - 1
                if not sequence.is_on_disk:
                    self._index.touch(sequence.last_key)

    def _load_block(self, sequence: EngineSequence) -> bool:
        """Read a sequence's next block from disk; return whether the one after it may be there, too."""
        start, size = len(sequence.keys) * self._pool.block_size, self._pool.block_size
        if start + size > sequence.num_searchable:
            return False
        ids, block = sequence.ids[start : start + size], sequence.table.blocks[len(sequence.keys)]
        is_hit = self._index.load(sequence.last_key, block, ids)
        sequence.num_computed = start  # a partial match from memory has been overwritten
        if not sequence.sampling.num_tokens:
            sequence.num_cached = start + size * is_hit
            # A preempted prompt may be read a second time, but its tokens count once.
            sequence.num_disk = min(sequence.num_disk + size * is_hit, sequence.num_cached)
        if is_hit:
            self.mark_computed(sequence, start + size)
        return is_hit

    def _promise(self, sequence: EngineSequence) -> None:
        """Announce the whole blocks that a sequence is going to compute, so that others can wait for them."""
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
        """Release a sequence's blocks; the prefix cache can still find their contents until they are reused."""
        start = len(sequence.keys) * self._pool.block_size
        if self._shares and sequence.num_computed > start:  # its last block, which is not full
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


def _share_out(prefilling: Sequence[EngineSequence], room: int, most_logits: int) -> list[StepItem]:
    """Divide `room` prompt tokens among the sequences in prefill, which are in the order of arrival."""
    counts = dict.fromkeys(prefilling, 0)

    def give(sequence: EngineSequence, max_count: int) -> int:
        nonlocal most_logits
        start = sequence.num_computed + counts[sequence]
        count = min(max_count, len(sequence.ids) - start)
        if sequence.scores is not None:
            count = min(count, max(0, sequence.scores.num_skipped - start) + most_logits)
            most_logits -= sequence.scores.num_wanted(start, start + count)
        counts[sequence] += count
        return count

    def num_left(sequence: EngineSequence) -> int:
        return sequence.num_uncomputed - counts[sequence]

    remaining = room - give(prefilling[0], (room + 1) // 2)
    shortest = min(prefilling, key=lambda sequence: (num_left(sequence) or 1 << 30, _order(sequence)))
    remaining -= give(shortest, remaining)
    for sequence in prefilling:
        remaining -= give(sequence, remaining)
    return [sequence.item(sequence.num_computed + count) for sequence, count in counts.items() if count]


def capacity_blocks(limit: int, block_size: int) -> int:
    """Return how many blocks a sequence of `limit` tokens needs; its last token is never computed."""
    return blocks_for(max(1, limit - 1), block_size)
