"""A run's history is what its journal says; values that are no numbers are left out, whatever the file has."""

import json
from pathlib import Path
from typing import Any

import pytest

from llamarium.errors import TrainingError
from llamarium.presets import PRESETS
from llamarium.train.history import Alarm, Curve, RewardedAnswer, Sample, read_history, spread


def journal(run: Path, *events: dict[str, Any], **start: Any) -> Path:
    run.mkdir(exist_ok=True)
    first = {
        "event": "start", "step": 0, "settings": {"steps": 30, "epochs": None}, "model": PRESETS["tiny"].to_hf(),
        "parameters": 1234, "trainable": 1234, "device": "cpu",
    }  # fmt: skip
    lines = [{**first, **start}, *events]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def steps(*losses: Any) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": i * 10, "loss": loss, "tokens_per_s": 900.0 + i, "num_tokens": i * 100,
         "seconds": 3.0 * i, "mfu": None}
        for i, loss in enumerate(losses, start=1)
    ]  # fmt: skip


def validation(step: int, loss: float) -> dict[str, Any]:
    return {"event": "validation", "step": step, "loss": loss, "best": True}


END = {"event": "end", "step": 30, "signal": None, "early": False}


def test_curves_and_key_figures(tmp_path: Path) -> None:
    run = journal(tmp_path, *steps(4.5, 3.25, 2.125), validation(10, 2.5), validation(30, 4.0), END, threads=2)
    history = read_history(run)
    assert history.curves == (
        Curve("step", "loss", (10, 20, 30), (4.5, 3.25, 2.125)),
        Curve("step", "tokens_per_s", (10, 20, 30), (901, 902, 903)),
        Curve("validation", "loss", (10, 30), (2.5, 4.0)),
    )
    assert (history.state, history.step, history.num_steps, history.threads) == ("finished", 30, 30, 2)
    assert (history.best_step, history.best_loss, history.loss) == (10, 2.5, 2.125)
    assert (history.tokens_per_s, history.num_tokens, history.seconds) == (902.5, 300, 9), "without the first step"
    assert (history.parameters, history.kv_bytes) == (1234, 512)
    assert history.settings == {"steps": "30", "epochs": "-"}


def test_key_figures_of_a_long_run_are_those_of_steps_and_no_means(tmp_path: Path) -> None:
    events = [
        *({"event": "step", "step": i, "loss": 1000.0 - i, "mfu": i / 1000} for i in range(1, 1000)),
        *({"event": "validation", "step": i, "reward": 5.0 if i == 500 else 0.0, "loss": 0.0} for i in range(1, 1000)),
    ]
    history = read_history(journal(tmp_path, *events)).thinned(points=400, texts=10)
    assert max(len(curve.steps) for curve in history.curves) <= 400
    assert (history.loss, history.mfu, history.best_reward, history.best_step) == (1.0, 0.999, 5.0, 500)


@pytest.mark.parametrize(
    ("end", "state"),
    [([], "open"), ([END], "finished"), ([{**END, "signal": 15}], "stopped"), ([{**END, "early": True}], "stopped"),
     ([END, *steps(1.0)], "open")],
)  # fmt: skip
def test_how_a_run_ended(end: list[dict[str, Any]], state: str, tmp_path: Path) -> None:
    assert read_history(journal(tmp_path, *steps(4.5), *end)).state == state


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    odd = steps(None, True, [1], 1e300, -1e-300, 10**400, 2.0)
    odd[0]["step"], odd[1]["step"] = "one", None
    history = read_history(journal(tmp_path, *odd, model=[], settings=7, device=None, parameters="many"))
    assert history.values("step", "loss") == (0.0, 2.0)
    assert (history.kv_bytes, history.parameters, history.num_steps, history.settings) == (None, None, None, {})


def test_texts_stay_texts_that_utf_8_can_hold(tmp_path: Path) -> None:
    evil = "<script>\ud800\x00\u202e"
    sample = {"event": "sample", "step": 10, "prompt": evil, "text": ["no text"]}
    failed = {"event": "sample", "step": 20, "prompt": "", "error": "cannot be encoded"}
    history = read_history(journal(tmp_path, sample, failed, settings={evil: evil}, device=evil))
    clean = evil.replace("\ud800", "?")
    assert history.samples == (Sample(10, clean, "['no text']", ""), Sample(20, "", "", "cannot be encoded"))
    assert (history.device, history.settings) == (clean, {clean: clean})


def test_alarms_have_their_end_and_skipped_updates_their_reason(tmp_path: Path) -> None:
    raised = [{"event": "alarm", "step": step, "alarm": "kl", "message": "too far"} for step in (10, 20)]
    skipped = [{"event": "skipped", "step": 5, "reason": reason} for reason in ("no signal", "no signal", "no labels")]
    over = {"event": "alarm_over", "step": 15, "alarm": "kl"}
    history = read_history(journal(tmp_path, *skipped, raised[0], over, {**over, "alarm": "other"}, raised[1]))
    assert history.alarms == (Alarm("kl", 10, 15, "too far"), Alarm("kl", 20, None, "too far"))
    assert history.skipped == {"no signal": 2, "no labels": 1}


def test_groups_have_the_best_answer_first(tmp_path: Path) -> None:
    worse = {"text": "<b>", "reward": 0, "advantage": -1.0, "parts": {"exact": 0, "odd": "much"}}
    better = {"text": "12", "reward": 1, "advantage": 1.0}
    odd = {"text": 3, "reward": None, "advantage": "much"}
    group = {"event": "group", "step": 7, "prompt": "5+7=", "answers": [worse, odd, "no", better]}
    (found,) = read_history(journal(tmp_path, group, {"event": "step", "step": 8})).groups
    assert (found.step, found.prompt) == (7, "5+7=")
    assert found.answers == (
        RewardedAnswer("12", 1, 1, {}),
        RewardedAnswer("3", None, None, {}),
        RewardedAnswer("<b>", 0, -1, {"exact": 0}),
    )


def test_the_newest_start_has_the_settings_and_a_counted_model_a_level_line(tmp_path: Path) -> None:
    resumed = {"event": "resume", "step": 10, "settings": {"steps": 90}, "device": "cuda:0"}
    history = read_history(journal(tmp_path / "resumed", *steps(4.5), resumed))
    assert (history.num_steps, history.device) == (90, "cuda:0")
    counted = read_history(journal(tmp_path / "ngram", validation(0, 1.5), END, is_counted=True))
    assert counted.curves == (Curve("validation", "loss", (0, 30), (1.5, 1.5)),)


def test_long_curves_are_averaged_and_many_texts_are_spread(tmp_path: Path) -> None:
    samples = [{"event": "sample", "step": i, "prompt": "", "text": str(i)} for i in range(10)]
    thin = read_history(journal(tmp_path, *steps(*map(float, range(1000))), *samples)).thinned(points=100, texts=3)
    loss = thin.values("step", "loss")
    assert len(loss) == 100 and (loss[0], loss[-1]) == (4.5, 994.5)
    assert [sample.step for sample in thin.samples] == spread(range(10), 3) == [0, 4, 9]
    assert spread("ab", 3) == ["a", "b"]


@pytest.mark.parametrize("text", [None, "", '{"event": "step", "step": 1}\n', "junk\n"])
def test_a_folder_without_a_run_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(TrainingError):
        read_history(tmp_path)
