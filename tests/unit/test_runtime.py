"""Batches, blocks and what moves between them; as state machines where order matters."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from llamarium.errors import MemoryBudgetError
from llamarium.kernels.memory import reserve
from llamarium.runtime.batch import BLOCK_SIZE, BlockPool, BlockTable, Span, blocks_for, pack

pytestmark = pytest.mark.quick


def test_spans_are_packed_in_order() -> None:
    batch = pack([Span([5, 6, 7], 60, [3, 1]), Span([8], 0, [0]), Span([9, 9], 10, [2], num_logits=0, adapter=4)])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 9] and batch.token_ids.dtype == np.int64
    assert batch.positions.tolist() == [60, 61, 62, 0, 10, 11]
    assert batch.sequences.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.block_tables.tolist() == [[3], [0], [2]], "no longer than the longest needs"
    assert batch.logit_rows.tolist() == [2, 3]
    assert batch.adapters is not None and batch.adapters.tolist() == [-1, -1, 4]
    crossing = pack([Span([1] * 8, BLOCK_SIZE - 4, [7, 9, 11], num_logits=8)])
    assert crossing.block_tables.tolist() == [[7, 9]] and crossing.logit_rows.tolist() == list(range(8))
    assert crossing.adapters is None


def test_single_tokens_are_packed_alike() -> None:
    far = 2 * BLOCK_SIZE + 2
    spans = [Span([5], 3, [2]), Span([6], far, [4, 0, 1])]
    fast = pack(spans)
    assert fast.token_ids.tolist() == [5, 6] and fast.positions.tolist() == [3, far]
    assert fast.block_tables.tolist() == [[2, 0, 0], [4, 0, 1]] and fast.logit_rows.tolist() == [0, 1]
    assert all(array.flags.c_contiguous for array in (fast.token_ids, fast.positions, fast.block_tables))


def test_reserved_memory_costs_what_is_written() -> None:
    array = reserve((2**40,), np.uint8)  # a terabyte
    array[2**39] = 7
    assert array[2**39] == 7 and array[2**39 + 1] == 0
    with pytest.raises(MemoryError):
        reserve((2**62,), np.uint8)


class Blocks(RuleBasedStateMachine):
    """Sequences begin, grow, fork and leave in any order: no block is lost, given twice, or written to while shared."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.content = [0] * 12  # which sequence wrote a block last
        self.live: list[BlockTable] = []

    def copy(self, source: int, target: int) -> None:
        self.content[target] = self.content[source]

    @rule(target=tables, count=st.integers(0, 3 * BLOCK_SIZE))
    def begin(self, count: int) -> BlockTable:
        table = BlockTable(self.pool)
        self.live.append(table)
        self.reserve(table, count)
        return table

    @rule(table=tables, count=st.integers(0, 5 * BLOCK_SIZE))
    def reserve(self, table: BlockTable, count: int) -> None:
        missing = max(0, blocks_for(count) - len(table.blocks))
        if missing > self.pool.num_free:
            before = list(table.blocks)
            with pytest.raises(MemoryBudgetError):
                table.reserve(count)
            assert table.blocks == before
        else:
            table.reserve(count)
            assert len(table.blocks) >= blocks_for(count)

    @rule(target=tables, table=tables, share=st.floats(0, 1))
    def fork(self, table: BlockTable, share: float) -> BlockTable:
        count = int(share * len(table.blocks) * BLOCK_SIZE)
        if count % BLOCK_SIZE and not self.pool.num_free:
            with pytest.raises(MemoryBudgetError):
                table.fork(count, self.copy)
            other = BlockTable(self.pool)
        else:
            other = table.fork(count, self.copy)
            assert other.blocks[: count // BLOCK_SIZE] == table.blocks[: count // BLOCK_SIZE]
            assert len(other.blocks) == blocks_for(count)
        self.live.append(other)
        return other

    @rule(table=consumes(tables))
    def leave(self, table: BlockTable) -> None:
        table.release()
        self.live = [other for other in self.live if other is not table]

    @rule(count=st.integers(1, 3))
    def grow(self, count: int) -> None:
        if len(self.content) < 40:
            self.pool.add(count)
            self.content.extend([0] * count)

    @invariant()
    def nothing_is_lost(self) -> None:
        held = {block for table in self.live for block in table.blocks}
        assert len(held) + self.pool.num_free == len(self.content)
        assert all(len(set(table.blocks)) == len(table.blocks) for table in self.live)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_blocks = Blocks.TestCase
