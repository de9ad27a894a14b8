"""An engine's steps and longer work alternate: steps have priority, and both finish."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from llamarium.kernels.step_priority import MOST_PIECE_S, SHARE, StepPriority, pause

pytestmark = pytest.mark.quick


class Clock:
    """Stands still but for what is computed; `seconds` is now."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run something in a thread; it ends with the block."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def test_a_step_waits_for_the_piece_that_runs_and_the_next_piece_for_the_step() -> None:
    priority, order = StepPriority(Clock()), list[str]()
    has_begun, may_go_on, stepping, may_end = (threading.Event() for _ in range(4))

    def work() -> None:
        with priority.working():
            order.append("piece")
            has_begun.set()
            assert may_go_on.wait(10)
            order.append("pause")
            pause()
            order.append("next piece")

    def step() -> None:
        with priority.step():
            order.append("step")
            stepping.set()
            assert may_end.wait(10)
            order.append("end")
        priority.release()

    with beside(work):
        assert has_begun.wait(10)
        with beside(step):
            assert not stepping.wait(0.1)
            may_go_on.set()
            assert stepping.wait(10)
            may_end.set()
    assert order == ["piece", "pause", "step", "end", "next piece"]


@pytest.mark.parametrize("piece_s", [0.001, 0.01, 0.04])
def test_while_requests_run_pieces_have_their_share_of_the_time(piece_s: float) -> None:
    """So a request takes at most 1 + `SHARE` times as long as alone, and a piece."""
    clock, step_s, num_steps = Clock(), 0.01, 200
    priority, is_over = StepPriority(clock), threading.Event()
    pieces_s = 0.0

    def work() -> None:
        nonlocal pieces_s
        with priority.working():
            while not is_over.is_set():
                clock.seconds += piece_s
                pieces_s += piece_s
                pause()

    with priority.step():  # so that the first piece comes after it
        clock.seconds += step_s
    with beside(work):
        for _ in range(num_steps):
            with priority.step():
                clock.seconds += step_s
        found_s = pieces_s
        is_over.set()
        priority.release()
    share_s = SHARE * (num_steps + 1) * step_s
    assert 0.8 * share_s <= found_s <= share_s + 2 * piece_s


def test_a_piece_that_cannot_be_cut_holds_a_step_for_a_moment_alone() -> None:
    clock, has_begun, may_end = Clock(), threading.Event(), threading.Event()
    priority = StepPriority(clock)

    def work() -> None:
        with priority.working():
            has_begun.set()
            assert may_end.wait(10)

    with beside(work):
        assert has_begun.wait(10)
        clock.seconds += 2 * MOST_PIECE_S
        for _ in range(100):  # it does not wait again
            with priority.step():
                pass
        assert clock.seconds == 2 * MOST_PIECE_S
        may_end.set()


def test_no_piece_begins_in_a_step_even_with_time_left_for_it() -> None:
    clock, has_begun = Clock(), threading.Event()
    priority = StepPriority(clock)

    def work() -> None:
        with priority.working():
            has_begun.set()

    with priority.step():
        clock.seconds += 1
    with priority.step():
        thread = threading.Thread(target=work)
        thread.start()
        assert not has_begun.wait(0.1)
    assert has_begun.wait(10)
    thread.join()


def test_work_goes_on_when_the_engine_has_nothing_to_do_or_work_has_failed() -> None:
    priority = StepPriority(Clock())
    with pytest.raises(ValueError, match="failed"), priority.working():
        raise ValueError("failed")
    with priority.step():
        pause()  # nothing in a thread without longer work
    with priority.step():
        pass  # does not wait for what has failed
    priority.release()
    with priority.working():
        pause()


def test_work_that_is_not_wanted_ends_at_its_next_pause() -> None:
    """Other threads stop waiting for its piece."""
    priority, gone, done = StepPriority(Clock()), threading.Event(), list[str]()

    def check() -> None:
        if gone.is_set():
            raise KeyError("gone")

    def work() -> None:
        with pytest.raises(KeyError, match="gone"), priority.working(check):
            pause()
            done.append("a piece that is wanted")
            gone.set()
            pause()
            done.append("one that is not")
        pause()  # of a thread without longer work it is nothing
        with priority.working():
            pause()  # another piece of work has its own check
            done.append("other work")

    with beside(work):
        pass
    assert done == ["a piece that is wanted", "other work"]
    with priority.step():
        done.append("step")
    assert done[-1] == "step"
