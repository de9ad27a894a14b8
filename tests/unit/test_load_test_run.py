"""When the load generator sends, and what it makes of what came: arrivals, loops, percentiles, goodput."""

import asyncio
import math
import statistics
from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from itertools import islice, pairwise, repeat
from typing import Any

import pytest

import stand_in
from llamarium.errors import OptionError
from llamarium.load_test.client import Client, Target
from llamarium.load_test.drive import LoadRun, closed_loop, open_loop, poisson
from llamarium.load_test.exchange import Exchange, Failure, ReportedUsage
from llamarium.load_test.summary import Goal, Spread, summarize
from llamarium.load_test.workload import LoadRequest
from stand_in import Asked, StandIn

HELLO = LoadRequest("say hello", 3)
Steps = AsyncIterator[bytes | float]


def drive(answer: stand_in.Answer, loop: Any, *load: Any, **options: Any) -> tuple[LoadRun, StandIn]:
    """Send a load to a stand-in."""
    with StandIn(answer) as server:

        async def run() -> LoadRun:
            with closing(Client(Target(url=server.url, model="m"))) as client:
                return await loop(client, *load, **options)

        return asyncio.run(run()), server


slow = partial(stand_in.good, first_s=0.1)

# --- when -------------------------------------------------------------------------------------------------------------


def test_a_closed_loop_has_as_many_requests_under_way_as_clients() -> None:
    seen: list[int] = []
    run, server = drive(
        slow, closed_loop, repeat(HELLO, 10), num_clients=4, progress=lambda r: seen.append(len(r.exchanges))
    )
    assert len(run.exchanges) == run.num_started == len(server.asked) == 10
    assert server.most_open == server.num_connections == 4
    assert seen == list(range(1, 11))
    assert not run.was_interrupted
    assert 0.3 <= run.duration_s < 5  # three turns of four, four and two
    assert run.cpu_s > 0


def test_clients_think_between_answers_but_not_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    thought, sleep = list[float](), asyncio.sleep

    async def think(seconds: float) -> None:
        if seconds == 0.2:
            thought.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr("asyncio.sleep", think)
    run, _ = drive(stand_in.good, closed_loop, repeat(HELLO, 3), num_clients=1, think_s=0.2)
    gaps = [later.start - earlier.end for earlier, later in pairwise(run.exchanges)]
    assert min(gaps) >= 0.195
    assert len(thought) == 2


def test_a_loops_duration_lets_answers_end() -> None:
    run, _ = drive(slow, closed_loop, repeat(HELLO), num_clients=2, duration_s=0.25)
    assert 2 <= run.num_started == len(run.exchanges) <= 6
    assert max(exchange.start for exchange in run.exchanges) - run.start < 0.25
    assert all(exchange.failure is None for exchange in run.exchanges)


def test_poisson_arrivals_are_exponential_and_follow_the_seed() -> None:
    times = [due for due, _ in poisson(repeat(HELLO, 20_001), 5.0, seed=1)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.03)  # as an exponential distribution has it
    assert sum(gap < 0.2 * math.log(2) for gap in gaps) == pytest.approx(10_000, rel=0.03)
    assert times == [due for due, _ in poisson(repeat(HELLO, 20_001), 5.0, seed=1)]
    assert times[1] != next(islice(poisson(repeat(HELLO), 5.0, seed=2), 1, None))[0]


def test_an_open_loop_waits_for_nobody() -> None:
    timetable, num_asked = [(0.0, HELLO), (0.05, HELLO), (0.1, HELLO), (0.15, HELLO)], 0

    async def answer(asked: Asked) -> Steps:
        nonlocal num_asked
        num_asked += 1
        for _ in range(500):
            yield 0.01 if num_asked < 4 else 0.0
        async for step in stand_in.good(asked, first_s=0.4):
            yield step

    run, server = drive(answer, open_loop, timetable)
    assert server.most_open == 4
    starts = sorted(exchange.start - run.start for exchange in run.exchanges)
    assert starts == pytest.approx([0.0, 0.05, 0.1, 0.15])  # when they were due, however late they were sent
    assert run.duration_s >= 0.55


def test_an_open_loops_duration_ends_its_timetable() -> None:
    run, _ = drive(stand_in.good, open_loop, zip([0.0, 0.05, 9.0], repeat(HELLO), strict=False), duration_s=0.5)
    assert len(run.exchanges) == 2


@pytest.mark.parametrize("is_open", [False, True])
def test_an_interruption_leaves_what_there_is(is_open: bool) -> None:
    num_late, num_answered = 0, 0

    async def answer(asked: Asked) -> Steps:
        nonlocal num_late
        num_late += asked.number >= 2
        async for step in stand_in.good(asked, first_s=30.0 if asked.number >= 2 else 0.0):
            yield step

    def count(run: LoadRun) -> None:
        nonlocal num_answered
        num_answered = len(run.exchanges)

    async def interrupted(client: Client) -> LoadRun:
        if is_open:
            loop = open_loop(client, zip([0.0, 0.02, 0.04, 0.06], repeat(HELLO), strict=False), progress=count)
        else:
            loop = closed_loop(client, repeat(HELLO), num_clients=2, progress=count)
        task = asyncio.create_task(loop)
        async with asyncio.timeout(20):
            while (num_answered, num_late) != (2, 2):
                await asyncio.sleep(0.01)
        task.cancel()
        return await task

    run, _ = drive(answer, interrupted)
    assert run.was_interrupted
    assert len(run.exchanges) == 2
    assert run.num_started == 4
    assert summarize(run).num_unfinished == 2


# --- what comes of it -------------------------------------------------------------------------------------------------


def answered(start: float, *arrivals: float, end: float | None = None, counts: ReportedUsage | None = None) -> Exchange:
    return Exchange(HELLO, start, list(arrivals), arrivals[-1] if end is None else end, counts)


def failed(start: float, end: float, kind: str, message: str) -> Exchange:
    return Exchange(HELLO, start, [], end, failure=Failure(kind, message))


def test_a_spread_worked_out_by_hand() -> None:
    assert Spread.of([]) is None
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 5.0, 5.0)
    spread = Spread.of([4.0, 1.0, 3.0, 2.0])
    assert spread is not None
    assert (spread.mean, spread.p50, spread.max) == (2.5, 2.5, 4.0)
    assert spread.p90 == pytest.approx(3.7)  # place 2.7 between the third and the fourth
    assert spread.p99 == pytest.approx(3.97)


def test_a_run_worked_out_by_hand() -> None:
    exchanges = [
        answered(100.0, 100.5, 100.7, 101.1, end=101.2, counts=ReportedUsage(10, 4, 8)),  # two tokens came in one piece
        answered(101.0, 102.0, 102.1, counts=ReportedUsage(30, 2, 0)),
        failed(100.0, 103.0, "http 429", "slow down"),
        failed(103.0, 104.0, "http 429", "slower"),
        failed(100.0, 110.0, "timeout", "not complete within 10 s"),
    ]
    run = LoadRun(exchanges, start=100.0, end=110.0, cpu_s=0.3, num_started=6)
    found = summarize(run, Goal(ttft_s=0.6))
    assert (found.num_requests, found.num_answered, found.num_unfinished) == (5, 2, 1)
    assert list(found.errors.items()) == [("http 429", 2), ("timeout", 1)]
    assert found.examples["http 429"] == "slow down"
    assert found.duration_s == 10
    assert found.requests_per_s == pytest.approx(0.2)
    assert found.output_tokens_per_s == pytest.approx(0.6)
    assert found.total_tokens_per_s == pytest.approx(4.6)
    assert found.mean_concurrency == pytest.approx((1.2 + 1.1 + 3 + 1 + 10) / 10)
    assert (found.num_good, found.goodput_per_s) == (1, pytest.approx(0.1))
    assert found.server_counts
    assert found.cpu_s_per_token == pytest.approx(0.05)
    assert found.cpu_share == pytest.approx(0.03)
    means = {
        name: spread.mean
        for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "prompt_tokens", "cached_tokens", "output_tokens")
        if (spread := getattr(found, name)) is not None
    }
    assert means == pytest.approx(
        {
            "ttft_s": (0.5 + 1.0) / 2,
            "itl_s": (0.2 + 0.4 + 0.1) / 3,  # of all gaps, not of the answers' means
            "tpot_s": (0.6 / 3 + 0.1) / 2,
            "e2e_s": (1.2 + 1.1) / 2,
            "prompt_tokens": 20,
            "cached_tokens": 4,
            "output_tokens": 3,
        }
    )


def test_where_a_server_counts_only_sometimes_the_sum_is_not_known() -> None:
    run = LoadRun([answered(0, 1, 2, counts=ReportedUsage(10, 5)), answered(0, 1, 2)], start=0.0, end=2.0)
    found = summarize(run)
    assert found.total_tokens_per_s is None
    assert not found.server_counts
    assert found.output_tokens_per_s == pytest.approx((5 + 2) / 2)
    assert found.goodput_per_s is None


def test_a_run_without_an_answer() -> None:
    found = summarize(LoadRun([failed(0, 1, "timeout", "x")], start=0.0, end=1.0), Goal(ttft_s=1))
    assert found.ttft_s is found.itl_s is found.tpot_s is found.e2e_s is found.cpu_s_per_token is None
    assert (found.num_good, found.requests_per_s, found.output_tokens_per_s) == (0, 0, 0)
    assert not found.server_counts


@pytest.mark.parametrize(
    ("words", "is_met"),
    [
        (["ttft:500"], True),  # a limit itself is kept to
        (["ttft:499"], False),
        (["itl:375"], True),  # its longest pause
        (["itl:374"], False),
        (["tpot:250"], True),  # 0.125 s and 0.375 s on average
        (["tpot:249"], False),
        (["e2e:1250"], True),
        (["e2e:1249"], False),
        (["ttft:500", "itl:375", "e2e:1249"], False),
        ([], True),
    ],
)
def test_goals(words: list[str], is_met: bool) -> None:
    exchange = answered(0.0, 0.5, 0.625, 1.0, end=1.25)
    assert Goal.parse(words).is_met(exchange) is is_met


def test_an_answer_of_one_piece_has_no_pauses() -> None:
    exchange = answered(0.0, 0.5)
    assert exchange.tpot_s is None
    assert Goal.parse(["itl:1", "tpot:1"]).is_met(exchange)


@pytest.mark.parametrize("words", [["ttft"], ["ttft:x"], ["ttft:0"], ["ttft:inf"], ["p99:5"], ["ttft:5", "ttft:6"]])
def test_what_is_no_goal_is_refused(words: list[str]) -> None:
    with pytest.raises(OptionError, match="expected ttft, itl, tpot, e2e, each once with milliseconds"):
        Goal.parse(words)
