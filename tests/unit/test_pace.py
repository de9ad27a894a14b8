"""engine/pace.py: how much of a prompt fits into a step, learned from steps."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from hash_runner import CONFIG, HashRunner
from llamarium.engine.engine import Engine
from llamarium.engine.pace import LEAST_CHUNK, LONGEST_STEP_S, MAX_CHUNK_TOKENS, PAUSE_S, STRETCH, Pace
from llamarium.engine.request import Request
from llamarium.runtime.batch import Batch
from llamarium.runtime.runner import Cache
from llamarium.runtime.taps import Taps
from llamarium.sampling.params import SamplingParams

pytestmark = pytest.mark.quick

GIANT = [50_000]


def taught(seconds_per_token: float, base_s: float = 0.02) -> Pace:
    pace = Pace()
    for size in (1, 4, 8, 16, 64, 128, 256, 512, 1024, 2048):
        for _ in range(3):
            pace.record(0, size, base_s + seconds_per_token * size)
    return pace


def test_a_step_with_a_prompt_is_no_longer_than_those_who_stream_bear() -> None:
    for per_token in (0.0001, 0.001, 0.005):
        pace = taught(per_token)
        alone = pace.estimate(8)
        assert alone is not None
        chunk = pace.chunk(8, GIANT)
        longer = pace.estimate(8 + chunk)
        assert longer is not None and (longer <= STRETCH[0] * alone or chunk == LEAST_CHUNK)
        free = pace.estimate(pace.chunk(0, GIANT))
        assert free is not None and free <= LONGEST_STEP_S


def test_a_prompt_that_costs_more_the_deeper_it_is_read_does_not_stretch_steps() -> None:
    pace, done, chunks = taught(0.0005, base_s=0.005), 0, list[int]()
    for _ in range(5):
        pace.record(8, 0, 0.01)
    while done < 4000:
        chunk = pace.chunk(8, [4000])
        seconds = 0.01 + chunk * (0.0005 + 0.0005 * done / 1000)
        assert seconds < 0.01 + 1.25 * (STRETCH[0] - 1) * 0.01
        pace.record(8, chunk, seconds if len(chunks) != 20 else 0.5)  # one step is slow for another reason
        chunks.append(chunk)
        done += chunk
    chunks = [chunk for chunk in chunks if chunk]  # one step in 17 has none
    assert chunks[5] > 2 * chunks[-1] >= 2 * LEAST_CHUNK or chunks[-1] == LEAST_CHUNK
    assert pace.chunk(8, [4000]) < chunks[0]
    later = [pace.chunk(8, [4000])]
    for _ in range(40):
        pace.record(8, later[-1], 0.01 + later[-1] * 0.0005)
        later.append(pace.chunk(8, [4000]))
    assert max(later) >= 0.9 * chunks[0]  # another prompt begins


def test_tokens_of_prompts_that_seem_to_cost_nothing_cost_something() -> None:
    pace = taught(0.0005)
    for _ in range(99):
        pace.record(8, pace.chunk(8, GIANT), 0.0)
    assert LEAST_CHUNK <= pace.chunk(8, GIANT) <= MAX_CHUNK_TOKENS


def test_one_slow_step_is_forgotten() -> None:
    pace = Pace()
    pace.record(0, 128, 20.0)  # the first one touches all memory
    for _ in range(60):
        chunk = pace.chunk(0, GIANT)
        pace.record(0, chunk, 0.01 + chunk * 0.0005)
    assert pace.chunk(0, GIANT) >= 256


def test_before_anything_is_known_there_is_a_step() -> None:
    assert Pace().estimate(5) is None
    assert Pace().chunk(0, GIANT) > 0 and Pace().chunk(3, GIANT) == LEAST_CHUNK


def test_a_short_prompt_is_read_at_once_and_several_only_where_all_fit_into_the_pause() -> None:
    pace = taught(0.0005, base_s=0.005)
    assert pace.chunk(4, [100]) == 100
    assert pace.chunk(4, [60, 50]) == 110
    longer = pace.estimate(4 + 100)
    assert longer is not None and STRETCH[0] * 0.007 < longer <= PAUSE_S
    assert pace.chunk(4, [100, 400]) < 100  # both would take longer than the pause
    assert pace.chunk(4, [500]) > pace.chunk(4, GIANT)  # but it is over soon
    assert pace.chunk(4, [2000]) == pace.chunk(4, GIANT)


def test_where_more_wait_than_stream_prompts_have_more_of_a_step() -> None:
    pace = taught(0.0005, base_s=0.02)
    few, many = pace.chunk(2, GIANT), pace.chunk(2, GIANT * 6)
    assert many > 2 * few
    longest = pace.estimate(2 + pace.chunk(2, GIANT * 60))
    assert longest is not None and longest <= LONGEST_STEP_S


class Timed(HashRunner):
    """Steps that only take time on a clock: like a model of 1B on two cores, for which a prompt's token is cheaper."""

    now_s, stream_s = 0.0, 0.0

    def run(self, batch: Batch, cache: Cache, taps: Taps | None = None) -> Any:
        _, counts = np.unique(batch.sequences, return_counts=True)
        num_streams = int((counts == 1).sum())
        seconds = (0.018 if num_streams else 0.0) + 0.002 * num_streams + 0.0019 * (len(batch.token_ids) - num_streams)
        self.now_s, self.stream_s = self.now_s + seconds, self.stream_s + seconds * num_streams
        return np.zeros((len(batch.logit_rows), self.config.vocab_size), np.float32)


def test_prompts_do_not_pile_up_where_they_need_more_of_the_time_than_streams() -> None:
    runner, prompts = Timed(dataclasses.replace(CONFIG, max_position_embeddings=2048)), iter(range(64))
    engine = Engine(runner, 200, max_num_seqs=16, clock=lambda: runner.now_s, shares=False)

    def ask() -> None:
        if (number := next(prompts, None)) is not None:
            engine.add(Request([number % 50] * 128, SamplingParams(temperature=0.0, max_tokens=64)))

    for _ in range(16):
        ask()
    while not engine.is_idle:
        for event in engine.step():
            if event.finish_reason is not None:
                ask()
    assert runner.stream_s / runner.now_s > 11.5, "of 16 clients, 8 waited for their prompts where these had half"


def test_the_step_in_which_a_prompt_arrives_and_is_disturbed_by_that_does_not_stretch_those_after_it() -> None:
    pace = taught(0.0005, base_s=0.005)
    for seconds in (*[0.01] * 20, 0.02):
        pace.record(8, 0, seconds)
    pace.record(8, 16, 0.018)
    alone_s = 0.01 * (1 + 0.25 / 4)  # the disturbed step counts as a quarter more, in a quarter of the average
    assert pace.chunk(8, GIANT) <= (STRETCH[0] - 1) * alone_s * 16 / (0.018 - alone_s)


def test_streams_that_go_deeper_while_a_prompt_is_read_leave_it_its_part() -> None:
    pace, alone_s = taught(0.0005, base_s=0.005), 0.01
    chunks = list[int]()
    for _ in range(400):
        chunks.append(pace.chunk(8, GIANT))
        pace.record(8, chunks[-1], alone_s + 0.0005 * chunks[-1])
        alone_s += 0.01 / 400
    assert 0.0005 * chunks[-2] > 0.75 * (STRETCH[0] - 1) * alone_s
    assert chunks[60:].count(0) == 20, "one step in 17 shows what the streams cost"


def test_one_step_that_was_slow_or_seemed_to_cost_nothing_changes_the_next_ones_little() -> None:
    pace = taught(0.0005, base_s=0.005)
    pace.record(8, 0, 0.01)
    pace.record(8, 16, 0.01001)
    for _ in range(9):
        pace.record(8, chunk := pace.chunk(8, GIANT), 0.01 + chunk * 0.0005)
        assert chunk <= 64
    for _ in range(3):
        pace.record(8, chunk := pace.chunk(8, GIANT), 0.01 + chunk * 0.0005)
    pace.record(8, chunk, 0.06)
    assert pace.chunk(8, GIANT) >= 0.75 * chunk
    pace = Pace()
    pace.record(8, 0, 0.1)  # the first one touches all memory
    pace.record(8, 16, 0.018)
    for _ in range(5):
        seconds = 0.01 + 0.0005 * (chunk := pace.chunk(8, GIANT))
        pace.record(8, chunk, seconds)
        assert seconds < 1.2 * STRETCH[0] * 0.018
