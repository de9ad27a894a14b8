"""engine/pace.py: how much of a prompt fits into a step, learned from steps."""

from llamarium.engine.pace import LEAST_CHUNK, LONGEST_STEP_S, MAX_CHUNK_TOKENS, PAUSE_S, STRETCH, Pace

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
        assert longer is not None and (longer <= STRETCH * alone or chunk == LEAST_CHUNK)
        free = pace.estimate(pace.chunk(0, GIANT))
        assert free is not None and free <= LONGEST_STEP_S


def test_a_prompt_that_costs_more_the_deeper_it_is_read_does_not_stretch_steps() -> None:
    pace, done, chunks = taught(0.0005, base_s=0.005), 0, list[int]()
    for _ in range(5):
        pace.record(8, 0, 0.01)
    while done < 4000:
        chunk = pace.chunk(8, [4000])
        seconds = 0.01 + chunk * (0.0005 + 0.0005 * done / 1000)
        assert seconds < 1.1 * STRETCH * 0.01
        pace.record(8, chunk, seconds if len(chunks) != 20 else 0.5)  # one step is slow for another reason
        chunks.append(chunk)
        done += chunk
    assert chunks[5] > 2 * chunks[-1] >= 2 * LEAST_CHUNK or chunks[-1] == LEAST_CHUNK
    assert pace.chunk(8, [4000]) < chunks[0]
    for _ in range(40):
        pace.record(8, chunk := pace.chunk(8, [4000]), 0.01 + chunk * 0.0005)
    assert chunk >= 0.9 * chunks[0]  # another prompt begins


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
    assert longer is not None and STRETCH * 0.007 < longer <= PAUSE_S
    assert pace.chunk(4, [100, 400]) < 100  # both would take longer than the pause
    assert pace.chunk(4, [2000]) == pace.chunk(4, GIANT)


def test_where_more_wait_than_stream_prompts_have_more_of_a_step() -> None:
    pace = taught(0.0005, base_s=0.02)
    few, many = pace.chunk(2, GIANT), pace.chunk(2, GIANT * 6)
    assert many > 2 * few
    longest = pace.estimate(2 + pace.chunk(2, GIANT * 60))
    assert longest is not None and longest <= LONGEST_STEP_S
