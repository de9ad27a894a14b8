"""How many threads a run computes with: timed, given or kept; and what it says of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarium.cli.main import main
from llamarium.cli.training_view import view
from llamarium.train import threads
from llamarium.train.config import PretrainConfig
from llamarium.train.journal import read_journal
from llamarium.train.pretrain import prepare
from llamarium.train.setup import Setup
from llamarium.train.state.checkpoint import latest_checkpoint
from llamarium.train.state.resume import saved_threads
from llamarium.train.threads import Threads, choose, fewest_of_the_fastest, halves, time_each

pytestmark = pytest.mark.torch

TINY = "--preset tiny --context 16 --batch-rows 2 --steps 2 --eval-every 2 --sample-every 0 --device cpu"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and looked at the moon. " * 20)
    return file


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of four cores, on which nobody has asked for a number of threads."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("llamarium.train.threads.default_threads", lambda: 4)
    monkeypatch.setattr("llamarium.train.threads.num_threads", lambda: 4)
    monkeypatch.setattr("llamarium.train.threads.allowed_cpus", lambda: 4)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def _not_timed(_: Setup, rows: int) -> None:
    pytest.fail(f"{rows} rows are timed")


def setup_of(text: Path, tmp_path: Path, **changes: Any) -> Setup:
    options: dict[str, Any] = {"data": str(text), "preset": "tiny", "context": 16, "batch_rows": 8, "device": "cpu"}
    return prepare(PretrainConfig(**{**options, **changes}), tmp_path)


class Time:
    """A clock on which work takes what it is said to take on the threads of the moment, in turn."""

    def __init__(self, **seconds: list[float]) -> None:
        self.now, self.counts = 0.0, list[int]()
        self.seconds = {int(count.removeprefix("on_")): iter(values) for count, values in seconds.items()}

    def __call__(self) -> float:
        return self.now

    def work(self, *_: object) -> None:
        self.counts.append(torch.get_num_threads())
        self.now += next(self.seconds[self.counts[-1]])


def test_all_threads_a_half_and_so_on_to_one() -> None:
    assert [halves(count) for count in (1, 2, 6, 16)] == [[1], [2, 1], [6, 3, 1], [16, 8, 4, 2, 1]]


def test_numbers_take_turns_and_the_median_counts() -> None:
    before = torch.get_num_threads()
    time = Time(on_2=[0.4, 4.0, 0.5], on_1=[0.6, 0.7, 0.1])
    assert time_each(time.work, [2, 1], time) == pytest.approx({2: 0.5, 1: 0.6})
    assert time.counts == [2, 1] * 3 and torch.get_num_threads() == before


def test_no_round_is_begun_after_ten_seconds() -> None:
    time = Time(on_2=[40.0], on_1=[30.0])
    assert time_each(time.work, [2, 1], time) == {2: 40.0, 1: 30.0}


def test_fewer_threads_are_taken_where_more_hardly_help() -> None:
    assert fewest_of_the_fastest({4: 1.0, 2: 1.04, 1: 1.9}) == 2
    assert fewest_of_the_fastest({4: 1.0, 2: 1.5, 1: 1.9}) == 4
    assert fewest_of_the_fastest({2: 13.4, 1: 4.9}) == 1, "beside a busy neighbour"


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(("busy", "best"), [(False, 4), (True, 1)])
def test_the_fastest_number_is_chosen(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool, best: int
) -> None:
    four, two, one = (2.0, 0.5, 0.25) if busy else (0.25, 0.5, 1.0)
    time = Time(on_4=[four] * 4, on_2=[two] * 3, on_1=[one] * 3)
    monkeypatch.setattr(threads, "_pass", time.work)
    found = choose(setup_of(text, tmp_path), None, resumed=False, clock=time)
    assert found == Threads(best, "fastest", {4: four, 2: two, 1: one}, 1 if busy else 4), "rows for a second"


@pytest.mark.usefixtures("four_threads")
def test_timing_leaves_the_model_and_the_random_numbers_alone(text: Path, tmp_path: Path) -> None:
    setup = setup_of(text, tmp_path)
    weights = {key: value.clone() for key, value in setup.model.state_dict().items()}
    state = torch.get_rng_state()
    found = choose(setup, None, resumed=False)
    assert found.why == "fastest" and list(found.seconds) == [4, 2, 1] and 1 <= found.rows <= 8
    assert all(torch.equal(weights[key], value) for key, value in setup.model.state_dict().items())
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    assert torch.equal(state, torch.get_rng_state()) and torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_who_gives_a_number_gets_it(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_pass", _not_timed)
    assert choose(setup_of(text, tmp_path, threads=3), None, resumed=False) == Threads(3, "given")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert choose(setup_of(text, tmp_path), None, resumed=False) == Threads(4, "given")
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)  # as a program may that calls us
    assert choose(setup_of(text, tmp_path), None, resumed=False) == Threads(2, "given")


@pytest.mark.usefixtures("four_threads")
def test_runs_that_are_compared_have_the_number_of_the_first(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_pass", _not_timed)
    later = replace(setup_of(text, tmp_path), threads=2)
    assert choose(later, None, resumed=False) == Threads(2, "as the first")
    assert choose(later, 2, resumed=True) == Threads(2, "as before")
    with pytest.warns(UserWarning, match="threads: 1 -> 2"):
        assert choose(later, 1, resumed=True) == Threads(2, "as the first")


@pytest.mark.usefixtures("four_threads")
def test_a_compiled_step_is_not_timed(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_pass", _not_timed)
    setup = setup_of(text, tmp_path, compile=True)
    assert choose(setup, None, resumed=False) == Threads(4, "compiled"), "what could be timed is not what will run"
    assert choose(setup, 2, resumed=True) == Threads(2, "as before")


@pytest.mark.usefixtures("four_threads")
def test_a_resumed_run_keeps_its_number(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_pass", _not_timed)
    setup = setup_of(text, tmp_path)
    assert choose(setup, 1, resumed=True) == Threads(1, "as before")
    assert choose(setup, None, resumed=True) == Threads(4, "as before"), "a checkpoint of earlier versions"
    with pytest.warns(UserWarning, match=r"threads: 1 -> 2: from here on sums may have other last bits.*--threads 1"):
        assert choose(setup_of(text, tmp_path, threads=2), 1, resumed=True) == Threads(2, "given")


@pytest.mark.usefixtures("four_threads")
def test_more_threads_than_may_run_here_are_chosen_anew(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 128)  # of the machine; a container's quota is what counts
    time = Time(on_4=[0.25] * 4, on_2=[0.5] * 3, on_1=[0.9] * 3)
    monkeypatch.setattr(threads, "_pass", time.work)
    with pytest.warns(UserWarning, match=r"threads: 64 -> 4"):
        assert choose(setup_of(text, tmp_path), 64, resumed=True, clock=time).count == 4


def test_the_shell_says_it_and_the_checkpoint_holds_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, before = tmp_path / "run", torch.get_num_threads()
    command = ["pretrain", "--data", str(text), "--out", str(out), *TINY.split()]
    assert main([*command, "--threads", "2", "--precision", "float32", "--optimizer", "adamw"]) == 0
    assert "\n2 threads, given\n" in capsys.readouterr().err
    newest = latest_checkpoint(out)
    assert newest is not None and saved_threads(newest) == 2 and torch.get_num_threads() == before
    assert next(read_journal(out / "metrics.jsonl"))["threads"] == 2


def test_a_run_on_a_cpu_keeps_the_memory_that_it_frees(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    monkeypatch.setattr("llamarium.train.run.keep_freed", lambda: calls.append(1))
    assert main(["pretrain", "--data", str(text), "--out", str(tmp_path / "run"), *TINY.split()]) == 0
    assert calls == [1]


def test_where_none_was_chosen_the_checkpoint_holds_none(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamarium.train.threads._ours", lambda _: False)  # as on a GPU
    assert main(["pretrain", "--data", str(text), "--out", str(tmp_path / "run"), *TINY.split()]) == 0
    newest = latest_checkpoint(tmp_path / "run")
    assert newest is not None and saved_threads(newest) is None
    assert "threads" not in next(read_journal(tmp_path / "run/metrics.jsonl"))


ABOUT = {
    "parameters": 12345, "trainable": 12345, "rows": 10, "tokens_per_step": 160, "device": "cpu",
    "settings": {"precision": "float32", "optimizer": "adamw", "learning_rate": 1e-3, "muon_learning_rate": None},
    "optimizer_reason": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            Threads(1, "fastest", {2: 1.25, 1: 0.53}, 3),
            "1 thread, chosen by timing 3 rows: 0.53 s (2 threads: 1.2 s)",
        ),
        (
            Threads(2, "fastest", {2: 0.4, 1: 0.53}, 1),
            "2 threads, chosen by timing 1 row: 0.4 s (1 thread: 0.53 s)",
        ),
        (Threads(1, "all"), "1 thread"),
        (Threads(2, "as before"), "2 threads, as before"),
        (Threads(2, "as the first"), "2 threads, as the first run"),
        (Threads(4, "compiled"), "4 threads, not timed as the step is compiled"),
    ],
)
def test_a_run_says_how_many_and_why(found: Threads, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "start", "step": 0, **ABOUT, **found.describe()}
    with view(10, quiet=False) as show:
        show(event)
    assert capsys.readouterr().err.endswith(f"\n{said}\n")
