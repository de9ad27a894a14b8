"""Runs from beginning to end: resumed ones equal uninterrupted ones, and what may not be resumed is refused."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import llamarium
from llamarium.adapters.files import read_adapter_config
from llamarium.cli.main import main
from llamarium.cli.training import harmless, watching
from llamarium.errors import CheckpointError, TrainingError
from llamarium.io import file_sha256
from llamarium.model import LlamaForCausalLM
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.train.conduct import conduct
from llamarium.train.config import FinetuneConfig, PretrainConfig
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.data.bpe import train_bpe
from llamarium.train.finetune import prepare as prepare_finetuning
from llamarium.train.journal import Event, read_journal
from llamarium.train.pretrain import prepare
from llamarium.train.run import TrainingResult, run
from llamarium.train.setup import Setup
from llamarium.train.state.checkpoint import checkpoints, latest_checkpoint
from llamarium.train.state.lock import run_lock
from llamarium.train.state.signals import stop_signals
from llamarium.train.step import Evaluation
from tiny_run import WORDS, tiny_config, write_words

pytestmark = pytest.mark.torch


class KilledError(BaseException):
    """Ends a run as a kill would: nothing of it is caught."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_words(tmp_path / "text.txt")


def go(
    config: PretrainConfig, out: Path, emit: Callable[[Event], None] = lambda event: None, **options: Any
) -> TrainingResult:
    return conduct(lambda: prepare(config, out), out, **{"resume": False, "watch": nullcontext(emit), **options})


def killed_at(step: int) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        if event["event"] == "step" and event["step"] == step:
            raise KilledError

    return emit


def same_checkpoint(a: Path, b: Path) -> bool:
    files = ("model.safetensors", "resume/optimizer.safetensors")
    one, other = ([load_file(folder / name) for name in files] for folder in (a, b))
    return all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_is_killed_and_resumed_is_the_run_that_is_not(text: Path, tmp_path: Path, optimizer: str) -> None:
    """To the bit, in the middle of an epoch and across epochs, with accumulation."""
    config = tiny_config(text, optimizer=optimizer, threads=1)  # which may be chosen otherwise the next time
    straight = go(config, tmp_path / "straight")
    assert straight.position.cursor.epoch >= 1, "the run goes across epochs"
    for step in (3, 8, 17, 22):  # before the first checkpoint, and after others
        with pytest.raises(KilledError):
            go(config, tmp_path / "killed", killed_at(step), resume=True)
    resumed = go(config, tmp_path / "killed", resume=True)
    assert same_checkpoint(straight.checkpoint, resumed.checkpoint)
    assert replace(resumed.position, seconds=0.0) == replace(straight.position, seconds=0.0)
    a, b = (
        [
            (e["event"], e["step"], e.get("loss"), e.get("learning_rate"), e.get("text"))
            for e in read_journal(tmp_path / name / "metrics.jsonl")
            if e["event"] in ("step", "validation", "sample")
        ]
        for name in ("straight", "killed")
    )
    assert a == b, "the journal is the history of the weights that there are"


def test_the_newest_checkpoint_is_damaged(text: Path, tmp_path: Path) -> None:
    config, out = tiny_config(text), tmp_path / "run"
    with pytest.raises(KilledError):
        go(config, out, killed_at(13))
    newest = latest_checkpoint(out)
    assert newest is not None
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.warns(UserWarning, match="model.safetensors"):
        resumed = go(config, out, resume=True)
    assert same_checkpoint(resumed.checkpoint, go(config, tmp_path / "straight").checkpoint)


def _in_json(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "resume" / "state.json"
        state = json.loads(file.read_text())
        position = state["position"]
        position |= {name: value for name, value in changes.items() if name in position}
        state |= {name: value for name, value in changes.items() if name in state}
        file.write_text(json.dumps(state))

    return change


def _in_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return changed


WEIGHTS, OPTIMIZER = "model.safetensors", "resume/optimizer.safetensors"
FORGED = {
    "step is 4; expected that of the folder's name": _in_json(step=4),
    "step is '3'; expected int": _in_json(step="3"),
    "index is -7; expected a number from 0": _in_json(cursor={"epoch": 0, "index": -7}),
    "epoch is None": _in_json(cursor={"index": 0}),
    "Infinity is not JSON": _in_json(seconds=float("inf")),
    "NaN is not JSON": _in_json(best_loss=float("nan")),
    "position is None": _in_json(position=None),
    "settings is 5": _in_json(settings=5),
    "started with other settings": _in_json(data=None, about={"bytes": "many", "text": 1}),
    f"{OPTIMIZER}: the optimizer's exp_avg/model.norm.weight has values that are NaN, infinite or neg": _in_tensors(
        OPTIMIZER, lambda t: t["exp_avg/model.norm.weight"].fill_(float("nan"))
    ),
    "exp_avg_sq/model.norm.weight has values that are NaN, infinite or neg": _in_tensors(
        OPTIMIZER, lambda t: t["exp_avg_sq/model.norm.weight"].fill_(-1.0)
    ),
    "the optimizer's state lacks step/model.norm.weight": _in_tensors(
        OPTIMIZER, lambda t: t.pop("step/model.norm.weight")
    ),
    "step/model.norm.weight is torch.float32 (3,)": _in_tensors(
        OPTIMIZER, lambda t: t.update({"step/model.norm.weight": torch.zeros(3)})
    ),
    "model.norm.weight has weights that are NaN": _in_tensors(
        WEIGHTS, lambda t: t["model.norm.weight"][0].fill_(torch.nan)
    ),
    "model.norm.weight is torch.float16": _in_tensors(
        WEIGHTS, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()})
    ),
}


def test_a_checkpoint_is_not_believed_because_its_manifest_fits(text: Path, tmp_path: Path) -> None:
    config, out = tiny_config(text, steps=3), tmp_path / "run"
    folder = go(config, out).checkpoint
    kept = {name: (folder / name).read_bytes() for name in (WEIGHTS, OPTIMIZER, "resume/state.json")}
    for found, forge in FORGED.items():
        forge(folder)
        _reseal(folder)
        with pytest.raises(TrainingError, match=re.escape(found)):
            go(replace(config, steps=4), out, resume=True, allow_changes="other settings" not in found)
        for name, content in kept.items():
            (folder / name).write_bytes(content)
    _in_tensors(OPTIMIZER, dict.clear)(folder)
    _reseal(folder)
    with pytest.warns(UserWarning, match="the optimizer remembers nothing, and begins anew"):
        assert go(replace(config, steps=4), out, resume=True, allow_changes=True).position.step == 4


def _reseal(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    rows = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in files
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": rows}))


def test_what_changes_a_run_is_refused_with_the_difference(text: Path, tmp_path: Path) -> None:
    config, out = tiny_config(text, steps=5, optimizer="adamw"), tmp_path / "run"
    go(config, out)
    with pytest.raises(TrainingError, match=r"holds a run \(step-00000005\); resume it"):
        go(config, out)
    with pytest.raises(TrainingError, match=r"learning_rate: 0.001 -> 0.002; seed: 0 -> 1"):
        go(replace(config, learning_rate=2e-3, seed=1, log_every=2, eval_every=3), out, resume=True)
    with pytest.raises(TrainingError, match="of a run of another kind"), run_lock(out):
        setup = replace(prepare(config, out), config=FinetuneConfig(steps=5))
        run(setup, out, resume=True, emit=lambda event: None)
    with pytest.warns(UserWarning, match="the optimizer is now muon, and begins anew"):
        go(replace(config, optimizer="muon", steps=6), out, resume=True, allow_changes=True)
    text.write_text(text.read_text() + "the end\n")
    match = r"bytes: ([\d,]+) -> ([\d,]+); tokens: \1 -> \2; the text is another; the tokenizer is the same"
    with pytest.raises(TrainingError, match=match):
        go(replace(config, optimizer="muon"), out, resume=True)
    longer = go(replace(config, optimizer="muon", steps=8), out, resume=True, allow_changes=True)
    assert longer.position.step == 8


@pytest.mark.parametrize("native", [True, False])
def test_a_file_that_names_no_optimizer_resumes_with_the_checkpoints(
    native: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it goes on, and however the default was chosen where it began."""
    config, out = tiny_config(text, steps=5), tmp_path / "run"
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda: native)
    go(config, out)
    (out / "train.toml").unlink()
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda: not native)
    assert go(config, out, resume=True).position.step == 5
    found = PretrainConfig.resolve(out / "train.toml", {})
    assert found.chosen_optimizer == (("muon", 8e-3) if native else ("adamw", 1e-3))


def test_best_and_newest_are_kept(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 4.0, 1.5])  # of the validations at 6, 12, 18, 24 and 30
    monkeypatch.setattr("llamarium.train.run.measure", lambda *_, **__: Evaluation(next(losses), {}))
    ending = go(tiny_config(text, steps=30, save_total_limit=1), tmp_path / "run")
    assert (ending.position.best_step, ending.position.best_loss) == (12, 1.0)
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-00000012", "step-00000030"]
    assert (tmp_path / "run" / "best").resolve() == (tmp_path / "run" / "step-00000012").resolve()


def test_the_best_loss_is_forgotten_where_it_is_measured_on_other_rows(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([1.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr("llamarium.train.run.measure", lambda *_, **__: Evaluation(next(losses), {}))
    config, out = tiny_config(text, steps=6, eval_rows=5), tmp_path / "run"
    assert go(config, out).position.best_loss == 1.0
    with pytest.raises(TrainingError, match="steps: 6 -> 12"):
        go(replace(config, steps=12), out, resume=True)
    same = go(replace(config, steps=12), out, resume=True, allow_changes=True)
    assert (same.position.best_step, same.position.best_loss) == (6, 1.0)
    other = go(replace(config, steps=18, eval_rows=4), out, resume=True, allow_changes=True)
    assert (other.position.best_step, other.position.best_loss) == (18, 2.0)
    text.write_text(text.read_text() + "the cat\n")
    more = go(replace(config, steps=24, eval_rows=4), out, resume=True, allow_changes=True)
    assert (more.position.best_step, more.position.best_loss) == (24, 4.0)


def test_a_run_that_is_not_resumed_begins_and_what_makes_way_is_a_run_too(text: Path, tmp_path: Path) -> None:
    config, out = tiny_config(text, steps=3), tmp_path / "run"
    go(config, out)
    (out / "step-00000003").rename(out / ".old-00000003")  # killed while it was replaced
    with pytest.raises(TrainingError, match=r"holds a run \(.old-00000003\); resume it"):
        go(config, out)
    assert go(config, out, resume=True).position.step == 3


def test_a_damaged_journal_keeps_no_run_from_going_on(text: Path, tmp_path: Path) -> None:
    config, out = tiny_config(text, steps=4), tmp_path / "run"
    go(config, out)
    journal = out / "metrics.jsonl"
    lines = journal.read_text().splitlines()
    lines[1:3] = ["\0" * 50, '{"event": "step", "step": "two"}', "[" * 100_000]
    journal.write_text("\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match=r"metrics.jsonl: lines 2, 3, 4 are no events of a run, and are left out"):
        go(replace(config, steps=5), out, resume=True, allow_changes=True)
    events = [(e["event"], e["step"]) for e in read_journal(journal)]
    assert events[0] == ("start", 0) and ("step", 5) in events and ("end", 4) not in events


def test_a_disk_that_is_full_for_a_while_ends_no_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal waits, half a line included, and a picture of the embeddings is left out."""
    full, real_open = [False], Path.open

    def full_open(path: Path, *args: Any, **options: Any) -> Any:
        file = real_open(path, *args, **options)
        return _Full(file) if full[0] and path.name == "metrics.jsonl" else file

    def fill(event: Event) -> None:
        full[0] = 3 <= event["step"] < 9

    monkeypatch.setattr(Path, "open", full_open)
    with pytest.warns(UserWarning) as warned:
        assert go(tiny_config(text, steps=12, save_every=4), tmp_path / "run", fill).position.step == 12
    told = [str(w.message) for w in warned]
    assert ["the run goes on, and it is tried again" in message for message in told] == [True]
    events = list(read_journal(tmp_path / "run" / "metrics.jsonl"))
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 13))


class _Full:
    """A file on a disk with room for a few bytes."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 5

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: self.room])
        self.room = 0
        return taken

    def __enter__(self) -> "_Full":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def test_a_folder_may_have_any_name(text: Path, tmp_path: Path) -> None:
    config, out = tiny_config(text, steps=3), tmp_path / os.fsdecode(b"caf\xe9")
    go(config, out)
    assert go(replace(config, steps=4), out, resume=True, allow_changes=True).position.step == 4


def test_a_checkpoint_is_a_model(text: Path, tmp_path: Path) -> None:
    ending = go(tiny_config(text, tokenizer="bpe", vocab_size=280), tmp_path / "run")
    llama = llamarium.load(ending.checkpoint, dtype="float32")
    assert llama.tokenizer.decode(llama.tokenizer.encode("the cat")) == "the cat"
    assert llama.generate("the", max_new_tokens=5, temperature=0.0).text
    assert llama.model.lm_head.weight is llama.model.model.embed_tokens.weight


def test_a_model_of_words_says_what_it_does_not_know(text: Path, tmp_path: Path) -> None:
    config = tiny_config(text, tokenizer="words", vocab_size=8, steps=3, sample_every=3)
    samples: list[Event] = []
    with pytest.warns(UserWarning, match=r"% of the tokens of .* are <.unknown.>: the vocabulary has 8 tokens"):
        ending = go(config, tmp_path / "run", samples.append)
    assert any(event["event"] == "sample" for event in samples)
    llama = llamarium.load(ending.checkpoint, dtype="float32")
    first, second = (llama.decode([i]) for i in (2, 3))
    assert llama.config.vocab_size == 8 and llama.encode(f"{first} {second} {first}") == [2, 3, 2]
    assert llama.generate(first, max_new_tokens=4, temperature=0.0).text.startswith((" ", "<"))
    assert llama.score(f"{first} {second}").tokens[-1].text == f" {second}"
    with pytest.raises(llamarium.LlamariumError, match="' zebra'"):
        llama.generate(f"{first} zebra", max_new_tokens=4)
    known = tiny_config(text, tokenizer="words", steps=1, warmup_steps=0)
    assert prepare(known, tmp_path / "all").tokenizer.vocab_size == len({*WORDS}) + 3  # no warning: all are known


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (b"", {}, "is empty|no text"),
        (b"short", {}, "tokens"),
        (b"\x00\xff" * 500, {}, "UTF-8|binary|no text"),
        (None, {}, "no such|not found|no file"),
        (b"x" * 5000, {"tokenizer": "bpe", "vocab_size": 5000}, "280|vocab|merges"),
        (b"a b " * 500, {"hidden_size": 30}, "head_dim|multiple"),
        (b"a b " * 500, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (b"a b " * 500, {"preset": "huge"}, "no preset"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_the_first_step(
    content: bytes | None, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "data.txt"
    if content is not None:
        file.write_bytes(content)
    steps: list[Event] = []
    with pytest.raises(llamarium.LlamariumError, match=message):
        go(tiny_config(file, **changes), tmp_path / "run", steps.append)
    assert not [e for e in steps if e["event"] == "step"]


def test_gradients_that_stay_infinite_end_the_run_and_keep_the_weights(text: Path, tmp_path: Path) -> None:
    config, out = tiny_config(text, steps=100), tmp_path / "run"
    out.mkdir()
    setup = prepare(config, out)
    setup.model.model.layers[0].mlp.register_forward_hook(
        lambda module, _args, output: output * (float("inf") if module.training else 1.0)
    )
    events: list[Event] = []
    with run_lock(out), pytest.raises(TrainingError, match="20 steps in a row were not finite"):
        run(setup, out, resume=False, emit=events.append)
    assert all(p.isfinite().all() for p in setup.model.parameters())
    assert sum(e["event"] == "skipped" for e in events) == 20


def test_steps_without_labels_are_told_and_are_no_failure_unless_there_are_no_others(
    text: Path, tmp_path: Path
) -> None:
    config, out = tiny_config(text, steps=25, save_every=20, eval_every=100, sample_every=0), tmp_path / "run"
    out.mkdir()
    setup = prepare(config, out)
    batch, events = setup.train.batch, list[Event]()
    with run_lock(out):
        setup.train.batch = _learned(batch, 1)  # which a run looks at to see whether there are any
        with pytest.raises(TrainingError, match="none of 25 steps could move the weights"):
            run(setup, out, resume=False, emit=events.append)
        assert sum(e["event"] == "skipped" for e in events) == 25
        assert [folder.name for folder in checkpoints(out)] == ["step-00000020"], "what is saved stays"
        setup.train.batch = _learned(batch, 2)
        with pytest.warns(UserWarning, match="the optimizer remembers nothing"):
            assert run(setup, out, resume=True, emit=events.append).position.step == 25


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_trained(value: float, text: Path, tmp_path: Path) -> None:
    setup, events = prepare(tiny_config(text), tmp_path), list[Event]()
    with torch.no_grad():
        setup.model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(TrainingError, match=r"the model: model.layers.1.mlp.up_proj.weight has weights that"):
        run(setup, tmp_path, resume=False, emit=events.append)
    assert not events


def _learned(batch: Callable[..., TrainingBatch], count: int) -> Callable[..., TrainingBatch]:
    """Let only the first batches have labels."""
    left = [True] * count

    def masked(epoch: int, indices: Sequence[int]) -> TrainingBatch:
        found = batch(epoch, indices)
        labels_BT = found.labels_BT if left else torch.full_like(found.labels_BT, IGNORED)
        del left[:1]
        return replace(found, labels_BT=labels_BT)

    return masked


@pytest.mark.parametrize(
    ("precision", "dtype", "peak"),
    [("float32", torch.float32, "float32"), ("bfloat16", torch.float32, "bfloat16"), ("float32", None, "bfloat16")],
)
def test_the_peak_is_that_of_what_products_are_computed_in(
    precision: str, dtype: torch.dtype | None, peak: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    monkeypatch.setattr("llamarium.train.run.peak_flops", lambda device, kind: asked.add(kind))
    if dtype is None:  # as of a base that is frozen in bfloat16
        monkeypatch.setattr(LlamaForCausalLM, "dtype", property(lambda self: torch.bfloat16))
    go(tiny_config(text, steps=3, precision=precision, eval_rows=1, eval_every=9, sample_every=0), tmp_path / "run")
    assert asked == {peak}


def test_a_second_sigterm_does_not_cut_the_save_short_and_a_second_interrupt_does() -> None:
    said: list[int] = []
    with stop_signals(first=said.append) as came:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert came[0] == signal.SIGTERM and signal.SIGINT in came and said == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize(("number", "presses"), [(signal.SIGINT, "once more"), (signal.SIGTERM, "twice")])
def test_the_first_signal_says_on_stderr_how_often_ctrl_c_ends_the_run(
    number: signal.Signals, presses: str, json: bool, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with watching(30, [], json=json) as tell:

        def emit(event: Event) -> None:
            tell(event)
            if event["event"] == "step":
                signal.raise_signal(number)

        config = tiny_config(text, steps=30, eval_rows=1, eval_every=90, sample_every=0)
        ending = go(config, tmp_path / "run", emit)
    assert ending.signal == number
    assert f"Ctrl-C {presses} ends at once, and saves nothing" in " ".join(capsys.readouterr().err.split())


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def finetuning(tmp_path: Path, model_files: Callable[..., Any], **changes: Any) -> Callable[[], Setup]:
    data, base = tmp_path / "dialogs.jsonl", tmp_path / "base"
    if not base.exists():
        lines = [{"prompt": f"say {i}", "completion": f" {i} {i}"} for i in range(40)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        model_files(vocab_size=280).huggingface().rename(base)
        train_bpe([json.dumps(lines)], 262).save(base)
    shape = {"steps": 8, "batch_rows": 2, "context": 24, "save_every": 3, "eval_every": 4, "sample_every": 0}
    config = FinetuneConfig(
        **{"model": str(base), "data": str(data), "device": "cpu", "warmup_steps": 1, **shape, **changes}
    )
    return lambda: prepare_finetuning(config)


@pytest.mark.parametrize(
    "changes",
    [{"dropout": 0.2}, {"quantize": "nf4", "dora": True}, {"method": "full"}, {"quantize": "q8_0", "rslora": True}],
)
def test_fine_tuning_resumes_to_the_bit_and_moves_only_what_it_should(
    changes: dict[str, Any], tmp_path: Path, model_files: Callable[..., Any]
) -> None:
    make = finetuning(tmp_path, model_files, learning_rate=1e-2, **changes)
    ends = []
    for name, stops in (("straight", ()), ("killed", (2, 5))):
        out = tmp_path / name
        out.mkdir()
        for stop in stops:
            with run_lock(out), pytest.raises(KilledError):
                run(make(), out, resume=True, emit=killed_at_any(stop))
        setup = make()
        with run_lock(out):
            ends.append(run(setup, out, resume=True, emit=lambda event: None).checkpoint)
    name = "model.safetensors" if changes.get("method") == "full" else "adapter_model.safetensors"
    one, other = (load_file(folder / name) for folder in ends)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    trainable = {key for key, p in setup.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in key for key in trainable) == (changes.get("method") != "full")


def killed_at_any(step: int) -> Callable[[Event], None]:
    seen = [0]

    def emit(event: Event) -> None:
        seen[0] = max(seen[0], event["step"])
        if event["event"] in ("step", "validation", "saved") and event["step"] > step:
            raise KilledError

    return emit


def test_a_run_ends_when_it_gets_no_better(text: Path, tmp_path: Path) -> None:
    changes = {"steps": 40, "eval_every": 2, "patience": 3, "sample_every": 0, "warmup_steps": 0}
    changes |= {"learning_rate": 9.0, "schedule": "constant"}
    config, events, out = tiny_config(text, **changes), list[Event](), tmp_path / "run"
    ending = conduct(lambda: prepare(config, out), out, resume=False, watch=nullcontext(events.append))
    losses = [event["loss"] for event in events if event["event"] == "validation"]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 3 and ending.position.step == 2 * len(losses) < 40, "at this rate it cannot learn"
    assert ending.position.best_step == 2 * (best + 1) and events[-1]["early"] and ending.signal is None
    again = conduct(lambda: prepare(config, out), out, resume=True, watch=nullcontext(events.append))
    assert again.position.step == ending.position.step
    assert again.was_over and not ending.was_over


def test_patience_counts_validations_whatever_lies_between_them(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([1.0, *[2.0] * 9])
    monkeypatch.setattr("llamarium.train.run.measure", lambda *_, **more: Evaluation(next(losses), {}))
    changes = {"steps": 12, "sample_every": 0, "warmup_steps": 0, "patience": 3}

    def train(watch: Callable[[Event], None], eval_every: int) -> TrainingResult:
        config, out = tiny_config(text, **changes, eval_every=eval_every), tmp_path / "run"
        return conduct(lambda: prepare(config, out), out, resume=True, watch=nullcontext(watch))

    def worse(event: Event) -> None:
        if event["event"] == "validation" and not event["best"]:
            signal.raise_signal(signal.SIGTERM)

    assert train(worse, 2).position.step == 4, "after one that was not better"
    assert train(lambda event: None, 1).position.step == 6, "and two more"


def test_a_run_goes_on_from_an_adapter(tmp_path: Path, model_files: Callable[..., Any]) -> None:
    silent = nullcontext(lambda event: None)
    first = conduct(finetuning(tmp_path, model_files, steps=3), tmp_path / "one", resume=False, watch=silent).checkpoint
    setup = finetuning(tmp_path, model_files, adapter=str(first))()
    saved = load_file(first / "adapter_model.safetensors")
    held = {f"base_model.model.{key}": p for key, p in setup.model.named_parameters() if p.requires_grad}
    assert held.keys() == saved.keys() and all(torch.equal(held[key].detach(), saved[key]) for key in saved)

    make = finetuning(tmp_path, model_files, steps=2, adapter=str(first))
    second = conduct(make, tmp_path / "two", resume=False, watch=silent).checkpoint
    moved = load_file(second / "adapter_model.safetensors")
    assert moved.keys() == saved.keys() and not all(torch.equal(moved[key], saved[key]) for key in saved)
    assert read_adapter_config(second)["base_model_name_or_path"] == str(tmp_path / "base")
    with pytest.raises(TrainingError, match="rank: of no effect beside adapter"):
        finetuning(tmp_path, model_files, adapter=str(first), rank=3)()
    with pytest.raises(TrainingError, match="adapter: of no effect where method is full"):
        finetuning(tmp_path, model_files, adapter=str(first), method="full")()


def test_options_without_effect_are_refused(tmp_path: Path, model_files: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match="quantize: of no effect where method is full"):
        finetuning(tmp_path, model_files, method="full", quantize="nf4")()
    with pytest.raises(TrainingError, match="no data"):
        finetuning(tmp_path, model_files, data="")()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_any_optimizer_any_method_and_few_examples(
    optimizer: str, method: str, count: int, tmp_path: Path, model_files: Callable[..., Any]
) -> None:
    make = finetuning(tmp_path, model_files, optimizer=optimizer, method=method, steps=2, batch_rows=4, validation=0.05)
    if count < 40:
        file = tmp_path / "dialogs.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))
    if count == 1:
        with pytest.raises(TrainingError, match="--validation 0"):
            make()
        return
    out = tmp_path / "run"
    with run_lock(out):
        assert run(make(), out, resume=False, emit=lambda event: None).position.step == 2


def test_adapters_are_not_resumed_as_a_whole_model_nor_a_whole_model_as_adapters(
    tmp_path: Path, model_files: Callable[..., Any]
) -> None:
    lora, full = finetuning(tmp_path, model_files, steps=2), finetuning(tmp_path, model_files, steps=2, method="full")
    for name, first, second in (("a", lora, full), ("b", full, lora)):
        conduct(first, tmp_path / name, resume=False, watch=nullcontext(lambda event: None))
        with pytest.raises(TrainingError, match=r"method: '(lora|full)' -> '(lora|full)', which learns other weights"):
            conduct(second, tmp_path / name, resume=True, allow_changes=True, watch=nullcontext(lambda event: None))


def test_an_adapter_is_not_resumed_on_another_base(tmp_path: Path, model_files: Callable[..., Any]) -> None:
    make = finetuning(tmp_path, model_files, steps=2)
    out = tmp_path / "run"
    with run_lock(out):
        run(make(), out, resume=False, emit=lambda event: None)
        weights = tmp_path / "base" / "model.safetensors"
        tensors = load_file(weights)
        save_file({key: value + 0.1 for key, value in tensors.items()}, weights, {"format": "pt"})
        with pytest.raises(TrainingError, match="was trained on another base"):
            run(make(), out, resume=True, emit=lambda event: None)


def test_a_tokenizer_larger_than_the_base_is_refused_before_the_first_step(
    tmp_path: Path, model_files: Callable[..., Any]
) -> None:
    make = finetuning(tmp_path, model_files)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).unlink()
    CharacterTokenizer.from_text("".join(map(chr, range(32, 400)))).save(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"the tokenizer has 368 ids and the model 280 rows"):
        make()


def test_the_inputs_of_an_adapted_head_are_not_dropped_out(tmp_path: Path, model_files: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match="target_modules has lm_head"):
        finetuning(tmp_path, model_files, target_modules="q_proj,lm_head", dropout=0.1)()


def test_an_adapter_is_no_model_to_begin_with(tmp_path: Path, model_files: Callable[..., Any]) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"is a LoRA adapter; go on from it with --adapter .*adapter"):
        finetuning(tmp_path, model_files, model=str(tmp_path / "adapter"))()


# --- from the shell ---------------------------------------------------------------------------------------------------


def test_the_first_run_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns from the manual that every Python brings."""
    out = tmp_path / "run"
    words = ["pretrain", "--out", str(out), "--preset", "tiny", "--context", "32", "--steps", "2", "--batch-rows", "2"]
    assert main([*words, "--eval-rows", "4", "--sample-tokens", "5", "--num-hidden-layers", "1"]) == 0
    shown = capsys.readouterr().err
    assert "step 2/2: loss" in shown and "validation loss" in shown and "2 steps done" in shown
    assert f"continue a text with it: llamarium generate -m {out / 'best'} TEXT" in " ".join(shown.split())
    settings = (out / "train.toml").read_text()
    assert 'preset = "tiny"' in settings and "steps = 2\n" in settings and "# data =" in settings
    assert main(["generate", "-m", str(out / "step-00000002"), "class", "-n", "3"]) == 0
    assert capsys.readouterr().out.endswith("\n")  # a sampled text, which may hold line ends
    again = ["pretrain", "--config", str(out / "train.toml"), "--out", str(out), "--resume", "--json"]
    assert main(again) == 0
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["resume", "end"]


def test_ctrl_c_while_pytorch_is_loaded(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from llamarium.cli import start\n"
        "class Pressing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch.nn': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Pressing()); sys.exit(start())"
    )
    command = [sys.executable, "-c", program, "pretrain", "--preset=tiny", "--steps=1", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Ctrl-C: ended at once; nothing more was saved\n"
    assert not (tmp_path / "run").exists()


def test_sigterm_saves_and_the_resumed_run_is_the_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    settings = tiny_config(text, steps=60, save_every=1000, eval_every=1000, sample_every=0, threads=1)
    toml.write_text(settings.to_toml())
    words = ["pretrain", "--config", str(toml), "--resume", "--out"]
    program = (  # it gets the signal in the fourth step
        "import os, signal, sys; from llamarium.cli import start; from llamarium.train.journal import Journal\n"
        "append = Journal._append\n"
        "def told(journal, line):\n"
        "    append(journal, line)\n"
        '    if b\'"event": "step", "step": 4,\' in line: os.kill(os.getpid(), signal.SIGTERM)\n'
        "Journal._append = told; sys.exit(start())"
    )
    command = [sys.executable, "-c", program, *words, str(tmp_path / "stopped by it")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "step 4: stopping: the step is finished and saved; Ctrl-C twice ends at once, and saves nothing" in err
    assert "SIGTERM at step" in err and "yet: this begins one" in " ".join(err.split())
    stopped = latest_checkpoint(tmp_path / "stopped by it")
    assert stopped is not None and stopped.name != "step-00000060"
    (command,) = re.findall(r"^go on with it:\sllamarium (.*)$", err, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert main([*words, str(tmp_path / "straight")]) == 0
    assert same_checkpoint(tmp_path / "stopped by it" / "step-00000060", tmp_path / "straight" / "step-00000060")


def test_the_shell_refuses_what_the_settings_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "x.toml"
    for content, message in (
        ("stepz = 3", "unknown option stepz: did you mean steps"),
        ("steps = [", "no TOML"),
        ("steps = 0", "from 1"),
    ):
        toml.write_text(content)
        assert main(["pretrain", "--config", str(toml), "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert main(["pretrain", "--out", str(tmp_path / "file" / "run"), "--steps", "1"]) == 1
    assert "run: cannot be written: Not a directory" in capsys.readouterr().err
    assert main(["pretrain", "--out", ""]) == 2
    assert "--out: expected a folder" in capsys.readouterr().err
    assert main(["finetune", "--preview", "--json"]) == 2
    assert "--json: not allowed with --preview" in capsys.readouterr().err


def test_a_refused_start_changes_nothing_and_a_resumed_one_knows_its_settings(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, toml = tmp_path / "run", tmp_path / "x.toml"
    toml.write_text(tiny_config(text, steps=3, sample_every=0).to_toml())
    assert main(["pretrain", "--config", str(toml), "--out", str(out)]) == 0

    def content() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in out.rglob("*") if file.is_file()}

    before = content()
    for words in (["pretrain"], ["pretrain", "--preset", "tiny"], ["finetune", "--data", str(text)]):
        assert main([*words, "--out", str(out)]) == 1
        assert "holds a run (step-00000003); resume it" in capsys.readouterr().err
    assert main(["pretrain", "--preset", "nosuch", "--out", str(out)]) == 1
    assert "no preset 'nosuch'; there are" in capsys.readouterr().err
    assert main(["pretrain", "--out", str(out), "--resume", "--seed", "5"]) == 1
    assert "seed: 0 -> 5" in capsys.readouterr().err
    assert content() == before
    assert main(["pretrain", "--out", str(out), "--resume"]) == 0
    told = capsys.readouterr().err
    assert "\nnothing is left to do; 3 steps done:" in told and "continue a text with it:" in told
    (longer,) = re.findall(r"^train it for longer:\sllamarium (.*) N$", told, re.MULTILINE)
    assert main([*shlex.split(longer), "4"]) == 0
    told = capsys.readouterr().err
    assert "\n4 steps done:" in told and "for longer" not in told


def test_the_end_names_the_folder_as_it_was_given(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(tiny_config(text, steps=3, sample_every=0).to_toml())
    begin = ["pretrain", "--out", "runs/story"]
    assert main([*begin, "--config", "x.toml"]) == 0
    told = capsys.readouterr().err
    assert "\n3 steps done: runs/story/step-00000003" in told
    assert "\ncontinue a text with it: llamarium generate -m runs/story/best TEXT\n" in told
    assert main([*begin, "--resume"]) == 0
    told = capsys.readouterr().err
    assert "train it for longer: llamarium pretrain --out runs/story --resume " in " ".join(told.split())


def test_a_tracker_that_fails_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[Event] = []

    def failing(event: Event) -> None:
        calls.append(event)
        raise ValueError("no such host")

    watcher = harmless(failing)
    for step in range(3):
        watcher({"event": "step", "step": step})
    assert len(calls) == 1
    assert "ValueError: no such host: it gets no more events" in capsys.readouterr().err


@pytest.mark.parametrize("json", [True, False])
def test_a_reader_that_had_enough_ends_no_run(text: Path, tmp_path: Path, json: bool) -> None:
    """`pretrain --json | head -1`: the pipe is closed from the first event on."""
    settings = tmp_path / "settings.toml"
    settings.write_text(tiny_config(text, steps=3).to_toml())
    line = f'exec "{sys.executable}" -m llamarium pretrain --config "{settings}" --out "{tmp_path / "run"}" '
    line += "--json 2>&1" if json else "2>&1"
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(["bash", "-c", line], stdout=writer, check=False).returncode == 0
    os.close(writer)
    assert (tmp_path / "run" / "step-00000003" / "model.safetensors").exists()


def test_a_view_that_fails_ends_no_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ValueError("cannot draw")

    monkeypatch.setattr("llamarium.cli.training_view._sentence", failing)
    with watching(3, [], json=False) as tell:
        tell({"event": "end", "step": 3})
    assert "ValueError: cannot draw: it gets no more events" in capsys.readouterr().err
