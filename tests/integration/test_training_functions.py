"""Training, merging and exporting from Python: from a text to a model, an adapter for it, and files for others."""

import json
from pathlib import Path
from typing import Any

import pytest

import llamarium
from llamarium.errors import OptionError, OutputError, TrainingError

pytestmark = pytest.mark.torch("it trains")

TEXT = "the cat sat on the mat and looked at the moon. " * 60
SMALL: dict[str, Any] = {
    "device": "cpu", "steps": 3, "batch_rows": 2, "eval_every": 2, "sample_every": 0, "save_every": 2,
    "warmup_steps": 1,
}  # fmt: skip


def test_from_a_text_to_an_adapter_to_a_model_for_others(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    seen: list[str] = []
    ending = llamarium.pretrain(
        tmp_path / "base", data=tmp_path / "text.txt", preset="tiny", context=32, tokenizer="bpe",
        vocab_size=280, watch=lambda event: seen.append(event["event"]), **SMALL,
    )  # fmt: skip
    assert ending.position.step == 3 and ending.signal is None and "start" in seen and "step" in seen
    base = tmp_path / "base" / "best"
    assert llamarium.load(base, device="cpu").generate("the", max_new_tokens=3, temperature=0.0).text
    with pytest.raises(TrainingError, match="resume"):
        llamarium.pretrain(tmp_path / "base", data=str(tmp_path / "text.txt"), preset="tiny", context=32, **SMALL)
    resumed = llamarium.pretrain(tmp_path / "base", resume=True, steps=5, allow_changes=True)
    assert resumed.position.step == 5, "the other settings are the run's own"

    rows = [{"prompt": "the cat", "completion": " sat on the mat"}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuning: dict[str, Any] = {**SMALL, "model": base, "chat_format": "none", "context": 32, "rank": 2}
    llamarium.finetune(tmp_path / "tuned", data=tmp_path / "rows.jsonl", learning_rate=0.05, **tuning)
    adapter = tmp_path / "tuned" / "best"
    tuned = llamarium.load(adapter=adapter, device="cpu")
    assert tuned.encode("the cat") == llamarium.load(base, device="cpu").encode("the cat")

    report = llamarium.merge(adapter, tmp_path / "merged", dtype="float32", device="cpu")
    assert report.kept == pytest.approx(1, abs=1e-3) and report.difference < 1e-3
    with pytest.raises(OutputError, match="force"):
        llamarium.merge(adapter, tmp_path / "merged", device="cpu")

    pairs = [{"prompt": "the", "chosen": " cat", "rejected": " mat"}] * 8
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    ending = llamarium.dpo(tmp_path / "dpo", data=str(tmp_path / "pairs.jsonl"), threads=1, **tuning)
    assert ending.position.step == 3 and ending.checkpoint.is_dir()


def test_export(tmp_path: Path) -> None:
    file = llamarium.export("shakespeare-char", tmp_path / "s.gguf", format="gguf", type="q8_0", with_tokenizer=False)
    assert llamarium.load(file, device="cpu").config == llamarium.load("shakespeare-char", device="cpu").config
    folder = llamarium.export("shakespeare-char", tmp_path / "hf", format="hf", type="F32")
    assert (folder / "model.safetensors").exists()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"format": "hf", "type": "Q8_0"}, "type is 'Q8_0'"),
        ({"format": "onnx"}, "format is 'onnx'"),
        ({"format": "gguf"}, r"ends in \.gguf"),
    ]
    for options, word in wrong:
        with pytest.raises(OptionError, match=word):
            llamarium.export("shakespeare-char", tmp_path / "x", **options)


def test_settings_that_there_are_not_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="unknown option stepz"):
        llamarium.pretrain(tmp_path / "r", stepz=3)  # type: ignore[call-arg]
    assert not (tmp_path / "r").exists()
