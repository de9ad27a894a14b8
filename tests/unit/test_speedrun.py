"""bench/speedrun.py: what its rules fix, where a run ends, and that every seed has to arrive."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.torch("bench/speedrun.py trains")

BENCH = Path(__file__).parents[2] / "bench"
SMALL = {"preset": "tiny", "context": 32, "batch_rows": 2, "steps": 4, "eval_every": 2, "eval_rows": 4, "threads": 1}


@pytest.fixture
def speedrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import speedrun

    yield speedrun
    for name in ("speedrun", "learning_rates", "common"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "line",
    [
        "seed = 3",
        "eval_rows = 8",
        "validation = 0.01",
        'tokenizer = "bpe"',
        "context = 64",
        'device = "cuda"',
        "compile = true",
        'model = "letters"',
    ],
)
def test_rules_cannot_be_set(speedrun: ModuleType, tmp_path: Path, line: str) -> None:
    (tmp_path / "mine.toml").write_text(line)
    options = argparse.Namespace(settings=tmp_path / "mine.toml", recipe="record", threads=1)
    with pytest.raises(SystemExit, match=line.split()[0]):
        speedrun.settings_of(options, tmp_path, 0)


@pytest.mark.parametrize(("target", "steps"), [(9.0, [2]), (0.0, [2, 4])])
def test_a_run_ends_at_its_first_validation_at_the_target(
    speedrun: ModuleType, monkeypatch: pytest.MonkeyPatch, target: float, steps: list[int]
) -> None:
    monkeypatch.setattr(speedrun, "TARGET", target)
    found = speedrun.train({"data": "shakespeare", "sample_every": 0, **SMALL}, 1000.0)
    assert [one["step"] for one in found["validations"]] == steps and found["arrived"] == (target > 0)
    assert 0 < found["validations"][0]["seconds"] <= found["seconds"]


def test_a_run_ends_at_the_limit(speedrun: ModuleType) -> None:
    found = speedrun.train({"data": "shakespeare", "sample_every": 0, **SMALL}, 0.0)
    assert (found["arrived"], found["step"]) == (False, 0) and found["ended_s"] < 60


def test_a_large_model_is_refused_at_once(speedrun: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedrun, "PARAMETERS", 1000)
    with pytest.raises(SystemExit, match="parameters; at most 1,000 are allowed"):
        speedrun.train({"data": "shakespeare", "sample_every": 0, **SMALL}, 1000.0)


@pytest.mark.parametrize(("late", "seeds", "seconds"), [(None, [], 3.0), (1, [], None), (None, ["--seeds", "1"], None)])
def test_every_seed_has_to_arrive(
    speedrun: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    late: Any,
    seeds: list[str],
    seconds: Any,
) -> None:
    def stand_in(settings: dict[str, Any], source: Path, limit: float) -> dict[str, Any]:
        arrived = settings["seed"] != late
        return {"step": 1, "loss": 1.5, "seconds": 2.0 + settings["seed"], "arrived": arrived}

    monkeypatch.setattr(speedrun, "train_apart", stand_in)
    monkeypatch.setattr(sys, "argv", ["speedrun.py", *seeds])
    speedrun.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (results["seconds"], results["arrived"]) == (seconds, seconds is not None)
