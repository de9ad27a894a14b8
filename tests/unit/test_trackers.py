"""Trackers: TensorBoard's own reader sees what a run told; trackio is a stand-in of the same interface."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llamarium.cli.main import main
from llamarium.errors import OptionError, OutputError, TrainingError
from llamarium.train.trackers import trackers

pytestmark = pytest.mark.torch("TensorBoard, of the dev extra")

SETTINGS = {"steps": 6, "learning_rate": 0.001}


def step(number: int, loss: float = 2.0, mfu: float | None = None) -> dict[str, Any]:
    numbers = {"learning_rate": 0.5, "grad_norm": 1.5, "tokens_per_s": 100.0, "mfu": mfu, "epoch": 0.1}
    return {"event": "step", "step": number, "loss": loss, **numbers}


def tell(names: list[str], run: Path, *events: dict[str, Any]) -> None:
    with trackers(names, run) as watchers:
        for event in events:
            for watcher in watchers:
                watcher(event)


START = {"event": "start", "step": 0, "settings": SETTINGS}
SAMPLE = {"event": "sample", "step": 2, "prompt": "The", "text": "# cat\n<b>sat</b>"}


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def texts(run: Path) -> dict[str, list[tuple[int, str]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    tags = [tag for tag in found.Tags()["tensors"] if tag.endswith("text_summary")]
    return {
        tag.partition("/")[0]: [(e.step, e.tensor_proto.string_val[0].decode()) for e in found.Tensors(tag)]
        for tag in tags
    }


def test_tensorboard_has_every_number_and_the_samples(tmp_path: Path):
    validation = {"event": "validation", "step": 2, "loss": 3.25, "best": True}
    tell(["tensorboard"], tmp_path, START, step(1), step(2, mfu=0.25), validation, SAMPLE, {"event": "end", "step": 2})
    assert scalars(tmp_path) == {
        "train/loss": [(1, 2.0), (2, 2.0)],
        "train/learning_rate": [(1, 0.5), (2, 0.5)],
        "train/grad_norm": [(1, 1.5), (2, 1.5)],
        "train/tokens_per_s": [(1, 100.0), (2, 100.0)],
        "train/mfu": [(2, 0.25)],
        "validation/loss": [(2, 3.25)],
    }
    shown = texts(tmp_path)
    assert shown["sample"] == [(2, "prompt\n\n    The\n\ntext\n\n    # cat\n    <b>sat</b>")]
    assert '"steps": 6' in shown["settings"][0][1]


def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path: Path):
    tell(["tensorboard"], tmp_path, START, *(step(n, 10.0 + n) for n in (1, 2, 3, 4)))
    tell(["tensorboard"], tmp_path, {"event": "resume", "step": 2, "settings": SETTINGS}, step(3, 23.0), step(4, 24.0))
    assert scalars(tmp_path)["train/loss"] == [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0)]
    tell(["tensorboard"], tmp_path, START, step(1, 31.0))  # a run that begins again, as it has no checkpoint
    assert scalars(tmp_path)["train/loss"] == [(1, 31.0)]


def test_what_was_told_is_there_before_the_end(tmp_path: Path):
    with trackers(["tensorboard"], tmp_path) as (watcher,):
        watcher(START)
        watcher(step(1))
        assert scalars(tmp_path)["train/loss"] == [(1, 2.0)]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(OutputError, match=r"tensorboard: cannot be written"):
        tell(["tensorboard"], tmp_path, START)


class FakeTrackio(SimpleNamespace):
    """trackio's interface: `init` gives a run with `log` and `finish`; it prints, as the real one does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def init(self, **options: Any) -> Any:
        print("* Trackio project initialized")
        self.calls.append(("init", options))
        return self

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", step, metrics))

    def finish(self) -> None:
        print("* Run finished")
        self.calls.append(("finish",))

    def Markdown(self, text: str) -> tuple[str, str]:
        return ("Markdown", text)


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> FakeTrackio:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def test_trackio_gets_the_same(tmp_path: Path, trackio: FakeTrackio, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "mine"
    tell(["trackio", "trackio"], run, START, step(1), SAMPLE, {"event": "saved", "step": 2, "path": "x"})
    numbers = {"train/loss": 2.0, "train/learning_rate": 0.5, "train/grad_norm": 1.5, "train/tokens_per_s": 100.0}
    assert trackio.calls == [
        ("init", {"project": "llamarium", "name": "mine", "config": SETTINGS, "resume": "never"}),
        ("log", 1, numbers),
        ("log", 2, {"sample": ("Markdown", "prompt\n\n    The\n\ntext\n\n    # cat\n    <b>sat</b>")}),
        ("finish",),
    ]
    assert capsys.readouterr().out == ""  # stdout is for results
    trackio.calls.clear()
    tell(["trackio"], run, {"event": "resume", "step": 2, "settings": SETTINGS})
    assert trackio.calls[0][1]["resume"] == "allow"


def test_trackers_are_closed_when_a_run_fails(tmp_path: Path, trackio: FakeTrackio):
    with pytest.raises(TrainingError, match="not finite"), trackers(["trackio", "tensorboard"], tmp_path) as watchers:
        for watcher in watchers:
            watcher(START)
        raise TrainingError("not finite")
    assert trackio.calls[-1] == ("finish",)


def test_a_sample_that_could_not_be_made_says_why(tmp_path: Path):
    tell(["tensorboard"], tmp_path, START, {"event": "sample", "step": 1, "prompt": "x", "error": "no such character"})
    assert texts(tmp_path)["sample"][0][1].endswith("    not made: no such character")


@pytest.mark.parametrize(("name", "modules"), [("tensorboard", ["tensorboard"]), ("trackio", ["trackio"])])
def test_missing_packages_are_named_before_the_run_begins(
    name: str, modules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for loaded in [m for m in sys.modules if m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionError, match=rf"--report-to needs the package {name}: pip install 'llamarium\[{name}\]'"):
        tell([name], tmp_path)


def test_unknown_trackers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(TrainingError, match="there is no tracker wandb; there are: tensorboard, trackio"):
        tell(["wandb"], tmp_path)
    assert main(["pretrain", "--report-to", "wandb"]) == 2
    assert "--report-to" in capsys.readouterr().err


def test_a_run_reports_and_goes_on(tmp_path: Path, trackio: FakeTrackio):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and so did every other cat " * 40)
    shape = {"hidden-size": 16, "intermediate-size": 16, "num-hidden-layers": 1, "num-attention-heads": 2}
    settings = {"context": 16, "num-key-value-heads": 1, "sample-every": 2, "sample-tokens": 2, "log-every": 1}
    run = {"data": text, "out": tmp_path / "run", "preset": "tiny", "device": "cpu", "batch-rows": 2, "save-every": 2}
    words = [word for name, value in {**shape, **settings, **run}.items() for word in (f"--{name}", str(value))]
    words = ["pretrain", *words, "--report-to", "tensorboard", "--report-to", "trackio", "--json", "--allow-changes"]
    assert main([*words, "--steps", "2", "--warmup-steps", "0"]) == 0
    assert main([*words, "--steps", "4", "--warmup-steps", "0", "--resume"]) == 0
    found = scalars(tmp_path / "run")
    assert [number for number, _ in found["train/loss"]] == [1, 2, 3, 4]
    assert found["validation/loss"][-1][0] == 4
    assert [call[1]["resume"] for call in trackio.calls if call[0] == "init"] == ["never", "allow"]
    assert [call[1] for call in trackio.calls if call[0] == "log" and "train/loss" in call[2]] == [1, 2, 3, 4]
