"""What an engine is doing, as plain data: who has which blocks, who shares them, and what comes next."""

import pytest

from hash_runner import SLOTS, HashRunner, alone, answers
from llamarium.engine.counts import BlockRun, open_sequence, states_of
from llamarium.engine.engine import Engine
from llamarium.engine.request import Request
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.quick

BEGINNING = list(range(10, 22))  # three blocks
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def test_blocks_that_two_have_are_shared_until_one_of_them_goes() -> None:
    engine = Engine(HashRunner(), 60, block_size=SLOTS)
    first = engine.add(Request([*BEGINNING, 1], GREEDY))
    engine.step()
    engine.add(Request([*BEGINNING, 2, 3], GREEDY, adapter=0))
    second = engine.add(Request([*BEGINNING, 2, 3], GREEDY))
    engine.step()
    one, other, two = states_of(engine.sequences, 8, 8)
    assert (one.num_shared, other.num_shared, two.num_shared) == (3, 0, 3)  # an adapter's keys are others
    assert [state.blocks for state in (one, two)] == [
        (BlockRun(0, 3, owners=2), BlockRun(3, 1, owners=1)),
        (BlockRun(0, 3, owners=2), BlockRun(two.blocks[1].first, 1, owners=1)),
    ]
    assert (one.adapter, other.adapter) == (-1, 0)
    assert (two.num_prompt, two.num_cached, two.num_tokens, two.num_computed, two.limit) == (14, 12, 15, 14, 20)
    assert (one.stage, two.stage, one.num_tokens) == ("decode", "decode", 15)
    engine.abort(first)
    assert [(state.number, state.num_shared) for state in states_of(engine.sequences, 8, 8)] == [(1, 0), (second, 0)]
    list(engine.run())
    assert states_of(engine.sequences, 8, 8) == []


def test_who_waits_and_who_reads_is_told_in_the_order_of_arrival_and_bounded() -> None:
    engine = Engine(HashRunner(), 200, block_size=SLOTS, max_num_seqs=2, chunk=8)
    for number in range(3):
        engine.add(Request([number] * 30, SamplingParams(temperature=0.5, max_tokens=4, n=2, seed=1)))
    engine.step()
    told = states_of(engine.sequences, 99, 99)
    assert [(state.number, state.row) for state in told] == [(i, row) for i in range(3) for row in (0, 1)]
    assert [state.stage for state in told] == ["prefill", "waiting", "prefill", "waiting", "waiting", "waiting"]
    assert told[0].num_computed + told[2].num_computed == 8
    assert (told[4].num_blocks, told[4].blocks, told[4].num_tokens, told[4].num_cached) == (0, (), 30, 0)
    assert states_of(engine.sequences, 2, 99) == told[:2]
    assert told[0].num_blocks == 8 and states_of(engine.sequences, 1, 0)[0].blocks == ()


def test_an_opened_answer_has_all_that_its_next_token_follows_from() -> None:
    """Its ids so far, and parameters with the seed that it got though it asked for none: the same answer again."""
    engine = Engine(HashRunner(), 60, block_size=SLOTS)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3, max_tokens=9, n=2)
    number = engine.add(Request(BEGINNING, params))
    events = [event for _ in range(4) for event in engine.step()]
    opened = [open_sequence(engine.sequences, number, row, 8) for row in (0, 1)]
    events += engine.run()
    whole = answers(events, [number])[0]
    for row, found in enumerate(opened):
        assert found is not None and found.params.seed is not None
        assert (found.prompt_ids, found.answer_ids) == (tuple(BEGINNING), tuple(whole[row][:4]))
        assert alone(Request(found.prompt_ids, found.params))[0] == whole[row]
        assert found.state.row == row and found.grammar is None
    assert opened[0] != opened[1]
    assert open_sequence(engine.sequences, number, 0, 8) is None, "it has come to its end"
