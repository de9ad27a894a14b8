"""Alarms: each is raised by a run in which something goes wrong, once for each episode, and none by a healthy run."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import llamarium
from llamarium.cli.main import main
from llamarium.errors import TrainingError
from llamarium.train.alarms import WINDOW, Alarms, AlarmState
from llamarium.train.conduct import conduct
from llamarium.train.config import GRPOConfig, PretrainConfig
from llamarium.train.data.bpe import train_bpe
from llamarium.train.history import read_history
from llamarium.train.journal import Event
from llamarium.train.rewards.grpo import prepare

pytestmark = pytest.mark.torch

REWARDED = {"reward": "exact", "data": "x.jsonl", "alarm_kl": 1.0, "alarm_collapse": 0.5}


def raised(events: list[dict[str, Any]], kind: str = "alarm") -> list[tuple[str, int]]:
    return [(event["alarm"], event["step"]) for event in events if event["event"] == kind]


# --- what is compared -------------------------------------------------------------------------------------------------


def test_a_value_around_its_bound_raises_one_alarm() -> None:
    alarms, events = Alarms(GRPOConfig(**REWARDED), AlarmState()), list[dict[str, Any]]()
    values = [0.9, 1.1, 0.95, 1.2, 0.81, 1.01, 0.79, 0.9, 1.3, math.nan, 0.1, math.inf]
    for step, kl in enumerate(values, start=1):
        events += alarms.after_step(step, {"kl": kl})
    assert raised(events) == [("kl", 2), ("kl", 9), ("kl", 12)]
    assert raised(events, "alarm_over") == [("kl", 7), ("kl", 11)]
    assert events[0]["value"] == 1.1 and events[0]["bound"] == 1.0 and "alarm_kl" in events[0]["message"]


@pytest.mark.parametrize(("place", "name"), [(1, "length"), (2, "entropy")])
def test_a_collapse_counts_where_the_reward_is_up(place: int, name: str) -> None:
    def events_of(reward: float) -> list[dict[str, Any]]:
        alarms, events = Alarms(GRPOConfig(**REWARDED), AlarmState()), list[dict[str, Any]]()
        for step in range(1, 61):
            row = [0.0, 40.0, 4.0]
            if 20 < step <= 40:  # the mean of the last ten is below a half of the first from 27 on, above it from 44 on
                row[0], row[place] = reward, row[place] / 5
            metrics = dict(zip(("reward", "length", "entropy"), row, strict=True))
            events += alarms.after_step(step, metrics)
        return events

    found = events_of(1.0)
    assert raised(found) == [(name, 27)] and len(raised(found, "alarm_over")) == 1
    assert found[0]["value"] == pytest.approx(0.44 * (40, 4)[place - 1])
    assert not events_of(0.0) and not events_of(-1.0), "the reward is not up"


def test_validations_are_worse_in_a_row() -> None:
    alarms = Alarms(PretrainConfig(alarm_validations=3), AlarmState())
    best, at, events = math.inf, None, list[dict[str, Any]]()
    for step, loss in enumerate([2.0, 2.1, 2.0, 2.1, 2.2, 2.3, 2.4, 1.9, 2.0, math.nan, 2.0, 2.0], start=1):
        best, at = (loss, step) if loss < best else (best, at)
        events += alarms.after_validation(step, loss, best, at)
    assert raised(events) == [("validation", 6), ("validation", 11)], "an equal one is not worse"
    assert raised(events, "alarm_over") == [("validation", 8)]
    assert "a loss of 2 at step 1" in events[0]["message"]


def test_zero_is_off() -> None:
    off = {"alarm_kl": 0.0, "alarm_collapse": 0.0, "alarm_validations": 0}
    alarms, events = Alarms(GRPOConfig(**{**REWARDED, **off}), AlarmState()), list[dict[str, Any]]()
    for step in range(3 * WINDOW):
        shrinking = {"kl": 9.0, "reward": float(step), "length": 100.0 - 3 * step, "entropy": 1 / (1 + step)}
        events += [*alarms.after_step(step, shrinking), *alarms.after_validation(step, 3.0, 1.0, 1)]
    assert not events


def test_what_was_seen_goes_on_from_a_checkpoint() -> None:
    def steps(alarms: Alarms, steps: range) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for step in steps:
            metrics = {"kl": 2.0, "reward": float(step), "length": 40.0 - step, "entropy": 1.0}
            found += alarms.after_step(step, metrics)
        return found

    config = GRPOConfig(**REWARDED)
    whole = steps(Alarms(config, AlarmState()), range(1, 40))
    state = AlarmState()
    first = steps(Alarms(config, state), range(1, 15))
    saved = AlarmState.from_dict(json.loads(json.dumps(asdict(state))))
    assert first + steps(Alarms(config, saved), range(15, 40)) == whole and len(raised(whole)) == 2
    assert AlarmState.from_dict({}) == AlarmState(), "a checkpoint of an earlier version"
    for wrong in (
        {"active": ["x"]}, {"active": 1}, {"first": [[1.0]]}, {"last": [[1, 2, "3"]]}, {"num_worse": -1},
        {"num_worse": 1.5}, {"first": [[0.0, 0.0, 0.0]] * (WINDOW + 1)}, {"active": [["kl"]]},
    ):  # fmt: skip
        with pytest.raises(TrainingError, match="alarms is"):
            AlarmState.from_dict(wrong)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path, model_files: Callable[..., Any]) -> dict[str, Any]:
    prompts = [{"prompt": f"say {i}"} for i in range(12)]
    model_files(vocab_size=280, head_dim=32).huggingface().rename(tmp_path / "base")
    train_bpe([json.dumps(prompts)], 262).save(tmp_path / "base")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "mine.py").write_text(
        "def short(answer, row): return -len(answer.encode())\n"
        "def repeats(answer, row): return answer.count('s')\n"
        "def ascii(answer, row): return sum(c.isascii() for c in answer) / 3\n"
    )
    return {
        "model": str(tmp_path / "base"), "data": str(tmp_path / "prompts.jsonl"), "batch_rows": 32, "group_size": 16,
        "gradient_accumulation_steps": 2, "context": 24, "max_tokens": 8, "learning_rate": 1e-2, "validation": 0.0,
        "log_every": 10, "save_every": 25, "sample_every": 0, "warmup_steps": 1, "device": "cpu", "threads": 1,
        "chat_format": "none", "method": "full", "beta": 0.0, "schedule": "constant",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "changes", "expected"),
    [
        ("short", {"stop": "s", "steps": 45}, ["length"]),
        ("repeats", {"beta": 0.01, "steps": 42}, ["entropy", "kl"]),
        ("ascii", {"max_tokens": 3, "steps": 25}, []),
    ],
)
def test_runs_that_go_wrong_and_one_that_does_not(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: str,
    changes: dict[str, Any], expected: list[str],
) -> None:  # fmt: skip
    run, wanted = tmp_path / "run", {**settings, **changes, "reward": f"{tmp_path}/mine.py:{reward}"}
    assert main(["grpo", *[f"--{n.replace('_', '-')}={v}" for n, v in wanted.items()], "--out", str(run)]) == 0
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    alarms = [event for event in events if event["event"] == "alarm"]
    assert sorted(event["alarm"] for event in alarms) == expected, "once, although the condition holds for many steps"

    told = capsys.readouterr().err.replace("\n", " ")
    assert told.count("llamarium: warning: step ") == len(expected)
    assert all(event["message"] in told for event in alarms)
    assert sorted(alarm.name for alarm in read_history(run).alarms) == expected


def test_a_resumed_run_does_not_raise_an_alarm_again(settings: dict[str, Any], tmp_path: Path) -> None:
    wanted = {"reward": f"{tmp_path}/mine.py:repeats", "beta": 0.01, "steps": 6, "save_every": 3, "alarm_kl": 1e-9}
    config, events = GRPOConfig(**{**settings, **wanted}), list[Event]()

    def stop(event: Event) -> None:
        events.append(event)
        if event["event"] == "saved" and event["step"] == 3 and event["path"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conduct(lambda: prepare(config), tmp_path / "run", resume=False, watch=nullcontext(stop))
    assert len([event for event in events if event["event"] == "alarm"]) == 1
    events.clear()
    conduct(lambda: prepare(config), tmp_path / "run", resume=True, watch=nullcontext(events.append))
    assert not [event for event in events if event["event"] == "alarm"]


def test_a_run_that_overfits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc" * 400 + "".join(chr(97 + i * i % 26) for i in range(400)))
    shape = {"preset": "tiny", "context": 16, "batch_rows": 8, "hidden_size": 32, "num_hidden_layers": 1}
    settings = {
        **shape, "data": str(text), "validation": 0.25, "steps": 40, "eval_every": 4, "learning_rate": 1e-2,
        "sample_every": 0, "device": "cpu", "threads": 1, "optimizer": "adamw", "log_every": 40,
    }  # fmt: skip
    with pytest.warns(UserWarning, match="validations are worse than the best, a loss of"):
        llamarium.pretrain(tmp_path / "run", **settings)
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["alarm"] for event in events if event["event"] == "alarm"] == ["validation"]

    text.write_text("abcdefghij klm\n" * 200)
    llamarium.pretrain(tmp_path / "healthy", **settings)
    assert '"alarm"' not in (tmp_path / "healthy" / "metrics.jsonl").read_text()
