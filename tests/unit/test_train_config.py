"""Settings, the journal and what a run looks like on a terminal."""

import argparse
import dataclasses
import io
import json
import re
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from llamarium.cli import training, training_view
from llamarium.cli.main import main
from llamarium.cli.settings import add_settings, given_settings
from llamarium.errors import LlamariumError, TrainingError
from llamarium.options.declare import declared
from llamarium.presets import preset
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.train import finetune
from llamarium.train.config import DPOConfig, ExperimentConfig, FinetuneConfig, GRPOConfig, PretrainConfig, RunConfig
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.journal import Journal, read_journal
from llamarium.train.pretrain import prepare, resolve_model
from llamarium.train.setup import multiplies_bfloat16, with_optimizer, with_precision

pytestmark = pytest.mark.torch

KINDS = (PretrainConfig, FinetuneConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_is_read(kind: type[RunConfig], tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(kind().to_toml())
    assert kind.resolve(file, {}) == kind()
    assert len(file.read_text().splitlines()) == len(dataclasses.fields(kind))


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.floats(1e-9, 10),
    st.booleans(),
    st.integers(1, 99),
)
def test_any_text_and_number_survive_the_file(text: str, rate: float, flag: bool, count: int) -> None:
    mixed = {text or "-": 2, "b.parquet": rate}
    config = PretrainConfig(sample_prompt=text, data=mixed, learning_rate=rate, compile=flag, steps=count)
    assert config.data == mixed and PretrainConfig(**tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", 0, "a whole number from 1"),
        ("steps", 1.0, "a whole number"),
        ("steps", True, "a whole number"),
        ("learning_rate", float("nan"), "a number from 1e-12 to 10"),
        ("learning_rate", 0, "a number from 1e-12 to 10"),
        ("muon_learning_rate", 0, "a number from 1e-12 to 10"),
        ("max_grad_norm", float("inf"), "a number from 0"),
        ("optimizer", "sgd", "adamw, muon"),
        ("compile", 1, "true or false"),
        ("preset", 5, "a text"),
        ("hidden_size", 1, "a whole number from 2"),
        pytest.param("seed", 10**5000, "a whole number from 0", id="huge"),
        pytest.param("warmup_steps", 10**400, "a whole number from 0 to 2^63", id="huge for a float"),
        pytest.param("max_grad_norm", 10**400, "a number from 0 to 2^63", id="huge for a float, where one is wanted"),
        ("initializer_range", 1e30, "a number from 0 to 10"),
        ("data", "caf\udce9.txt", "a text that is valid Unicode (rename a file whose name is not)"),
        ("data", {"caf\udce9.txt": 1, "b.txt": 2}, "a text that is valid Unicode"),
        ("sample_prompt", "\udcff", "a text that is valid Unicode"),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: object, expected: str) -> None:
    with pytest.raises(TrainingError, match=f"^{name} is .*; expected {re.escape(expected)}"):
        PretrainConfig(**{name: value})


def test_a_file_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text("steps = " + "[" * 5000)
    with pytest.raises(TrainingError, match="is no TOML"):
        PretrainConfig.resolve(file, {})


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('steps = 5\nseed = 7\ndata = "a.txt"\n')
    parser = argparse.ArgumentParser()
    add_settings(parser, PretrainConfig)
    words = ["--steps", "6", "--no-compile", "--optimizer", "muon", "--learning-rate", "1e-2"]
    config = PretrainConfig.resolve(file, given_settings(parser.parse_args(words), PretrainConfig))
    assert (config.steps, config.seed, config.data, config.optimizer) == (6, 7, "a.txt", "muon")
    assert (config.learning_rate, config.compile, config.batch_rows) == (0.01, False, 32)
    with pytest.raises(TrainingError, match=r"x.toml: unknown option stepz: did you mean steps"):
        file.write_text("stepz = 5")
        PretrainConfig.resolve(file, {})
    with pytest.raises(TrainingError, match=r"nowhere.toml: cannot be read: No such file"):
        PretrainConfig.resolve(tmp_path / "nowhere.toml", {})


def test_data_given_twice_is_a_mixture() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, PretrainConfig)
    args = parser.parse_args(["--data", "a.txt=2", "--data", "b.txt=1"])
    assert PretrainConfig(**given_settings(args, PretrainConfig)).data == {"a.txt": 2.0, "b.txt": 1.0}
    args = parser.parse_args(["--data", "a.txt", "--data", "b.txt"])
    with pytest.raises(TrainingError, match=r"'a\.txt' has no weight"):
        PretrainConfig(**given_settings(args, PretrainConfig))


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_a_flag_with_help(kind: type[RunConfig]) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser, kind)
    text = parser.format_help()
    assert [*declared(kind)] == [item.name for item in dataclasses.fields(kind)]
    for one in declared(kind).values():
        assert f"--{one.flag}" in text and one.help
        assert one.accepts(one.default)


def test_only_what_changes_the_weights_counts_as_a_difference() -> None:
    one = PretrainConfig()
    before = dataclasses.asdict(one)
    assert PretrainConfig(threads=2, log_every=3, save_every=7, device="cpu", data="moved").differences(before) == []
    assert PretrainConfig(beta2=0.99).differences(before) == ["beta2: 0.95 -> 0.99"]
    del before["max_grad_norm"]  # of a version that had no such setting, and another one
    assert one.differences(before | {"dropout": 0.1}) == ["dropout: 0.1 -> None"]


@pytest.mark.parametrize(
    "idle",
    [
        {"rank": 8}, {"alpha": 8.0}, {"dropout": 0.1}, {"target_modules": "q_proj"}, {"rslora": True}, {"dora": True},
        {"quantize": "nf4"}, {"dtype": "bfloat16"},
    ],
)  # fmt: skip
def test_what_adapters_need_is_refused_without_them(idle: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match=f"{next(iter(idle))}: of no effect where method is full"):
        FinetuneConfig(method="full", **idle)
    FinetuneConfig(**idle)


@pytest.mark.parametrize("data", [None, "shakespeare"])
def test_what_is_built_in_has_no_text_field(data: str | None, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="text_field: of no effect on a text that is built in"):
        prepare(PretrainConfig(data=data, text_field="body"), tmp_path)


@pytest.mark.parametrize("kind", [PretrainConfig, FinetuneConfig, DPOConfig, GRPOConfig])
def test_patience_needs_a_validation(kind: type[RunConfig]) -> None:
    with pytest.raises(TrainingError, match="patience: of no effect where validation is 0"):
        kind.resolve(None, {"patience": 3, "validation": 0.0})
    assert kind.resolve(None, {"patience": 3}).patience == 3


def test_the_warmup_is_a_tenth_of_a_short_run() -> None:
    assert [PretrainConfig(steps=n).num_warmup_steps for n in (5, 60, 5000)] == [0, 6, 100]
    assert PretrainConfig(steps=60, warmup_steps=60).num_warmup_steps == 60
    with pytest.raises(TrainingError, match="warmup_steps is 61; expected at most steps, which is 60"):
        PretrainConfig(steps=60, warmup_steps=61)


def test_widths_that_are_not_given_follow_the_presets_proportions() -> None:
    def width(**shape: Any) -> int:
        return resolve_model(
            PretrainConfig(preset="small", **shape), CharacterTokenizer.from_text("ab")
        ).intermediate_size

    assert width() == width(hidden_size=256) == 704
    assert width(hidden_size=512) == 2 * 704
    assert width(hidden_size=192) == 576  # 528, and on to a multiple of 64
    assert width(hidden_size=192, intermediate_size=500) == width(intermediate_size=500) == 500


def test_a_published_models_whole_context_must_be_asked_for(tmp_path: Path) -> None:
    for context, found in ((None, "whole context of llama-3.2-1b, 131072 tokens; give context"), (4096, "missing.txt")):
        config = PretrainConfig(preset="llama-3.2-1b", data="missing.txt", context=context)
        with pytest.raises(TrainingError, match=found):
            prepare(config, tmp_path)


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_resumed_journal_forgets_what_never_happened(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for event in ({"event": "start", "step": 0}, *({"event": "step", "step": i, "loss": 1.0 / i} for i in range(1, 6))):
        journal(event)
    journal({"event": "step", "step": 6, "loss": float("nan")})
    with journal.path.open("a") as file:
        file.write('{"event": "step", "st')  # the machine went down
    assert [e["step"] for e in read_journal(journal.path)] == [0, 1, 2, 3, 4, 5, 6]
    Journal(tmp_path)({"event": "resume", "step": 4})
    journal({"event": "end", "step": 4})
    assert [(e["event"], e["step"]) for e in read_journal(journal.path)] == [
        ("start", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("resume", 4), ("end", 4)
    ]  # fmt: skip
    journal({"event": "start", "step": 0})
    assert len(journal.path.read_text().splitlines()) == 1


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"step": 3}', "5"])
def test_a_journal_of_something_else_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"event": "start", "step": 0}}\n{line}\n')
    with pytest.raises(TrainingError, match=r"metrics.jsonl:2: is no"):
        list(read_journal(tmp_path / "metrics.jsonl"))


# --- the view ---------------------------------------------------------------------------------------------------------

STEP = {
    "event": "step", "step": 250, "loss": 1.2345, "grad_norm": 0.5, "learning_rate": 1e-3, "epoch": 1.5,
    "num_tokens": 10**6, "tokens_per_s": 12345.6, "mfu": 0.42, "seconds": 75.0, "seconds_left": 4000.0,
}  # fmt: skip


ABOUT = {
    "parameters": 12345, "trainable": 12345, "rows": 10, "tokens_per_step": 160, "device": "cpu",
    "settings": {"precision": "float32", "optimizer": "adamw", "learning_rate": 1e-3, "muon_learning_rate": None},
    "optimizer_reason": "",
}  # fmt: skip


@pytest.mark.parametrize("fast", [True, False])
def test_a_run_takes_bfloat16_where_it_is_faster_and_says_so(
    fast: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamarium.train.setup.multiplies_bfloat16", lambda: fast)
    chosen = with_precision(PretrainConfig(device="cpu"), SINGLE_PROCESS).chosen_precision
    assert chosen == ("bfloat16" if fast else "float32")
    assert with_precision(PretrainConfig(device="meta", precision=chosen), SINGLE_PROCESS).precision == chosen
    two = ProcessGroup()
    two.world_size = 2
    assert with_precision(PretrainConfig(device="cpu"), two).precision == "float32", "two could measure differently"
    monkeypatch.setattr("llamarium.train.setup.choose_device", lambda name: "cuda")
    assert with_precision(FinetuneConfig(), SINGLE_PROCESS).precision == "float32"
    with training_view.view(10, quiet=False) as show:
        show({"event": "start", "step": 0, **ABOUT, "settings": {**ABOUT["settings"], "precision": chosen}})
    assert ("\nmatrix products in bfloat16 (--precision float32 for float32)\n" in capsys.readouterr().err) is fast


@pytest.mark.parametrize(
    ("named", "shape", "fast", "optimizer", "rate", "why"),
    [
        ({}, "tiny", True, "muon", 8e-3, "small and from scratch; --optimizer adamw for AdamW"),
        ({}, "nano-gpt", True, "muon", 8e-3, "small and from scratch; --optimizer adamw for AdamW"),
        ({}, "smollm2-135m", True, "adamw", 1e-3, "more than 11M parameters"),
        ({}, "tiny", False, "adamw", 1e-3, "Muon was measured in one process on a CPU with instructions for bfloat16"),
        ({"learning_rate": 3e-3}, "tiny", True, "adamw", 3e-3, "a rate alone is AdamW's"),
        (
            {"muon_learning_rate": 1e-2},
            "tiny",
            True,
            "muon",
            8e-3,
            "small and from scratch; --optimizer adamw for AdamW",
        ),
        ({"optimizer": "muon"}, "tiny", False, "muon", 8e-3, ""),
        ({"optimizer": "muon"}, "smollm2-135m", True, "muon", 1e-3, ""),
        ({"optimizer": "muon", "learning_rate": 2e-3}, "tiny", True, "muon", 2e-3, ""),
        ({"optimizer": "adamw"}, "tiny", True, "adamw", 1e-3, ""),
        ({"model": "x"}, "tiny", True, "adamw", 1e-4, "going on from a model"),
        ({"model": "x", "learning_rate": 1e-3}, "tiny", True, "adamw", 1e-3, "going on from a model"),
        ({"model": "x", "optimizer": "muon"}, "tiny", True, "muon", 1e-4, ""),
    ],
)
def test_optimizer_and_rate_that_are_left_out_follow_from_the_size(
    named: Any, shape: str, fast: bool, optimizer: str, rate: float, why: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    """The first line of a run names them, and why; its file has them, so that a resumed run keeps them."""
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda: fast)
    left_out = PretrainConfig.resolve(None, {"device": "cpu", **named})
    config, found = with_optimizer(left_out, preset(shape), SINGLE_PROCESS, {})
    assert (config.optimizer, config.learning_rate, found) == (optimizer, rate, why)
    (tmp_path / "train.toml").write_text(config.to_toml())
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda: not fast)
    again = PretrainConfig.resolve(tmp_path / "train.toml", {})
    assert again == config and with_optimizer(again, preset("llama-3.2-1b"), SINGLE_PROCESS, {}) == (config, "")
    with training_view.view(10, quiet=False) as show:
        show({"event": "start", "step": 0, **ABOUT, "settings": dataclasses.asdict(config), "optimizer_reason": why})
    name, peak = {"adamw": "AdamW", "muon": "Muon"}[optimizer], config.muon_learning_rate or rate
    said = " ".join(capsys.readouterr().err.split())  # in lines of 80 columns
    assert said.endswith(f" {name}, learning rate {peak:g}" + f" ({why})" * bool(why))


def test_several_processes_and_a_gpu_have_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon was measured in neither."""
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda: True)
    two = ProcessGroup()
    two.world_size = 2
    assert with_optimizer(PretrainConfig(device="cpu"), preset("tiny"), two, {})[0].optimizer == "adamw"
    monkeypatch.setattr("llamarium.train.setup.choose_device", lambda name: "cuda")
    assert with_optimizer(PretrainConfig(), preset("tiny"), SINGLE_PROCESS, {})[0].optimizer == "adamw"


def test_the_optimizer_asks_the_processor_for_its_instructions_and_times_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy machine could turn what is timed; and where the choice is given the processor is not asked either."""
    monkeypatch.setattr("llamarium.train.setup.multiplies_bfloat16", None)
    for native, name in ((True, "muon"), (False, "adamw")):
        monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda native=native: native)
        assert with_optimizer(PretrainConfig(device="cpu"), preset("tiny"), SINGLE_PROCESS, {})[0].optimizer == name
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", None)
    given = PretrainConfig(device="cpu", optimizer="adamw", learning_rate=1e-3)
    assert with_optimizer(given, preset("tiny"), SINGLE_PROCESS, {}) == (given, "")


def test_what_is_left_out_of_a_run_that_goes_on_is_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda: True)
    for named, before, expected in (
        ({}, {"optimizer": "adamw", "learning_rate": 2e-3}, ("adamw", 2e-3)),
        ({}, {"optimizer": "muon", "learning_rate": 4e-3}, ("muon", 4e-3)),
        ({"learning_rate": 1e-3}, {"optimizer": "muon", "learning_rate": 4e-3}, ("muon", 1e-3)),
        ({"optimizer": "muon"}, {"optimizer": "muon", "learning_rate": 4e-3}, ("muon", 4e-3)),
        ({"optimizer": "adamw"}, {"optimizer": "muon", "learning_rate": 8e-3}, ("adamw", 1e-3)),  # not at muon's rate
    ):
        config = PretrainConfig(device="cpu", **named)
        found, reason = with_optimizer(config, preset("tiny"), SINGLE_PROCESS, before)
        assert (found.chosen_optimizer, reason) == (expected, "")
    with pytest.raises(TrainingError, match=r"optimizer is .*sgd.*; expected adamw, muon"):
        with_optimizer(PretrainConfig(device="cpu"), preset("tiny"), SINGLE_PROCESS, {"optimizer": "sgd"})


def test_muons_rate_needs_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.train.setup.cpu_has_native_bf16", lambda: False)
    with pytest.raises(TrainingError, match="muon_learning_rate: of no effect where optimizer is adamw"):
        with_optimizer(PretrainConfig(device="cpu", muon_learning_rate=1e-2), preset("tiny"), SINGLE_PROCESS, {})


def test_a_rate_of_a_file_is_that_of_the_optimizer_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('optimizer = "muon"\nlearning_rate = 0.008\n')
    with pytest.raises(TrainingError, match=r"train.toml: learning_rate is that of muon; give one beside .* adamw"):
        PretrainConfig.resolve(file, {"optimizer": "adamw"})
    both = PretrainConfig.resolve(file, {"optimizer": "adamw", "learning_rate": 1e-3})
    assert both.chosen_optimizer == ("adamw", 1e-3)
    assert PretrainConfig.resolve(file, {"optimizer": "muon"}).chosen_optimizer == ("muon", 8e-3)
    file.write_text("learning_rate = 0.002\n")
    assert PretrainConfig.resolve(file, {"optimizer": "muon"}).chosen_optimizer == ("muon", 2e-3)


@pytest.mark.parametrize("kind", [PretrainConfig, FinetuneConfig, DPOConfig, GRPOConfig, ExperimentConfig])
def test_none_is_allowed_exactly_where_the_annotation_allows_it(kind: type[RunConfig]) -> None:
    for name, hint in get_type_hints(kind).items():
        refused: Any = nullcontext() if type(None) in get_args(hint) else pytest.raises(LlamariumError, match=name)
        left_out: dict[str, Any] = {name: None}
        with refused:
            kind(**left_out)
        assert (kind.default(name) is None) is (type(None) in get_args(hint)), "TOML has no None: it is left out"


def test_which_is_faster_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fastest of some products, in turn; one that another program has held up counts for nothing."""
    costs = {torch.float32: iter([9.0, 2.0, 2.0, 2.0, 2.0]), torch.bfloat16: iter([1.0, 1.0, 70.0, 1.0, 1.0])}
    now = [0.0]

    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now[0] += next(costs[x.dtype])
        return y

    monkeypatch.setattr("llamarium.train.setup.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", multiply)
    assert multiplies_bfloat16.__wrapped__()


@pytest.mark.parametrize(
    ("files", "talks", "said"),
    [
        (("adapter_config.json",), True, "talk to it: llamarium chat --adapter run/best\n"),
        (("adapter_config.json",), False, "continue a text with it: llamarium generate --adapter run/best TEXT\n"),
        ((), True, "talk to it: llamarium chat -m run/best\n"),
        ((), False, "continue a text with it: llamarium generate -m run/best TEXT\n"),
    ],
)
def test_a_run_without_dialogs_is_not_one_to_talk_to(
    files: tuple[str, ...], talks: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "best").mkdir()
    for name in files:
        (tmp_path / "best" / name).write_text("{}")
    training._advise(tmp_path / "best", Path("run"), talks=talks)
    err = capsys.readouterr().err
    assert err.startswith(said) and ("merge it into a model" in err) == bool(files)


def test_elsewhere_than_on_a_terminal_a_line_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with training_view.view(1000, quiet=False) as show:
        show({"event": "start", "step": 0, **ABOUT})
        show({**STEP, "event": "progress"})
        show({"event": "progress", "step": 250, "doing": "saving"})
        show(STEP)
        show({**STEP, "mfu": None})
        show({"event": "validation", "step": 250, "loss": 1.5, "best": True})
        show({"event": "sample", "step": 250, "prompt": "\n", "text": "To be\x1b[2J"})
        show({"event": "skipped", "step": 251, "loss": float("nan"), "reason": "not finite", "in_a_row": 1})
        show({"event": "skipped", "step": 252, "loss": float("nan"), "reason": "no labels", "in_a_row": 2})
        show({"event": "end", "step": 1000})
    out, err = capsys.readouterr()
    assert out == "" and "\x1b" not in err
    assert err.splitlines() == [
        "12,345 parameters, 10 rows an epoch, 160 tokens a step, on cpu",
        "AdamW, learning rate 0.001",
        "step 250/1000: loss 1.2345, norm 0.50, lr 0.001, 12,346 tokens/s, MFU 42.0%, 1 h 06 min left",
        "step 250/1000: loss 1.2345, norm 0.50, lr 0.001, 12,346 tokens/s, 1 h 06 min left",
        "step 250: validation loss 1.5000, the best so far",
        r"step 250: sample: To be\x1b[2J",
        "step 251: gradients are not finite (loss nan); the weights were left alone",
        "step 252: no token of its rows has a label; the weights were left alone",
    ]
    with training_view.view(1000, quiet=True) as show:
        show(STEP)
    assert capsys.readouterr() == ("", "")


def test_the_board_fits_eighty_columns_and_drives_no_terminal() -> None:
    board = training_view.Board(1000)
    out = io.StringIO()
    console = Console(file=out, width=80, markup=False, emoji=False, highlight=False)
    console.print(board.draw())
    for i in range(500):
        board.take({**STEP, "event": "step" if i % 10 == 0 else "progress", "step": i + 1, "loss": 4.0 - i / 200})
    board.take({"event": "validation", "step": 250, "loss": 1.5, "best": True})
    board.take({"event": "validation", "step": 500, "loss": 1.6, "best": False})
    board.take({"event": "sample", "step": 500, "prompt": "", "text": "[red]x\x1b]0;evil\x07" + "long " * 200})
    board.take({"event": "progress", "step": 500, "doing": "saving a checkpoint"})
    console.print(board.draw())
    assert "saving a checkpoint …" in out.getvalue()
    board.take({"event": "saved", "step": 500, "path": "/home/runs/x/step\x1b]0;evil\x07-00000500"})
    console.print(board.draw())
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b]" not in shown and "\x07" not in shown
    for text in ("0 of 1,000", "500 of 1,000, epoch 1.50", "1.6000; best 1.5000 at step 250", "12,346, MFU 42.0%"):
        assert text in shown
    assert "1 min 15 s, 1 h 06 min left" in shown and r"step 500: saved step\x1b]0;evil\x07-00000500" in shown
    assert re.search("^loss █+▇+▆+▅+▄+▃+▂+▁+ *$", shown, re.MULTILINE)
    assert re.search("^sample: .red.x", shown, re.MULTILINE), "a prompt of blanks is not shown"


def test_the_board_of_rewards_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = {
        "reward": -25.9,
        "reward_spread": 0.43,
        "equal_groups": 0.25,
        "rewards_failed": 0,
        "cut": 1.0,
        "kl": 0.01,
    }
    event = {**STEP, **rewards, "length": 32.0, "largest_difference": 1.2e-7}
    board, out = training_view.Board(1000), io.StringIO()
    board.take(event)
    Console(file=out, width=80).print(board.draw())
    said = {
        "reward": "-25.900 (spread 0.430; 25% of the groups have equal rewards)",
        "length": "32.0 tokens (100% of the answers cut off at --max-tokens)",
        "KL": "0.0100",
        "log P": "differs by 1.2e-07 at most between sampling and training",
    }
    for name, text in said.items():
        assert re.search(f"^{name} +{re.escape(text)} *$", out.getvalue(), re.MULTILINE)
    with training_view.view(1000, quiet=False) as show:
        show({**event, "cut": 0.0, "equal_groups": 0.0, "rewards_failed": 2})
    told = "reward -25.900 (spread 0.430; 2 without one), length 32.0 tokens, KL 0.0100, log P differs by 1.2e-07 "
    assert capsys.readouterr().err.startswith(f"step 250/1000: {told}")


REWARDED = {
    **STEP, "reward": 0.5, "reward_spread": 0.5, "equal_groups": 0.0, "rewards_failed": 0, "cut": 0.0, "kl": 0.0,
    "length": 32.0, "largest_difference": 1.2e-7,
}  # fmt: skip


def drawn(*events: dict[str, Any]) -> str:
    """What a board shows after these events, at 80 columns."""
    board, out = training_view.Board(1000), io.StringIO()
    for event in events:
        board.take(event)
    Console(file=out, width=80, markup=False, emoji=False, highlight=False).print(board.draw())
    return out.getvalue()


def test_each_answer_of_a_group_is_a_line_under_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    """However long the answers before it are, and whatever line ends they have."""
    texts = ["4\n2", "long " * 300, "41\x1b[2J", "", "[b]7"]
    answers = [
        {"text": t, "reward": (1.0, None, 0.0, 0.0, -0.0001)[i], "advantage": (1.29, 0.0, -0.4, -0.4, -0.001)[i]}
        for i, t in enumerate(texts)
    ]
    group = {"event": "group", "step": 250, "prompt": "17+25=\n", "answers": answers}
    lines = [line.rstrip() for line in drawn(REWARDED, group).splitlines()]
    assert lines[-6:] == [
        r'   reward advantage  answer to "17+25=\n"',
        r"        1     +1.29  4\n2",
        "        -     +0.00  " + ("long " * 300)[:58] + "…",
        "  -0.0001     +0.00  [b]7",
        r"        0     -0.40  41\x1b[2J",
        "        0     -0.40",
    ]
    with training_view.view(1000, quiet=False) as show:
        show(group)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "step 250: answers to a prompt, best first" and len(told) == 7
    assert told[3] == f"        -     +0.00  {'long ' * 300}", "nothing is cut where no terminal is"


def test_the_curve_of_rewards_is_the_rewards() -> None:
    rising = [{**REWARDED, "event": "progress", "loss": 1.0 - i / 8, "reward": i / 8} for i in range(8)]
    assert "\nreward ▁▂▃▄▅▆▇█" in drawn(*rising)


def test_no_number_is_a_negative_zero() -> None:
    tiny = {**REWARDED, "loss": -1e-6, "kl": -1e-6, "reward": -1e-6}
    shown = drawn(tiny, {"event": "validation", "step": 250, "loss": 0.0, "best": True, "reward": 0.0})
    assert "-0.0" not in shown and all(f"{name}   " in shown for name in ("KL", "loss", "reward"))
    assert re.search(r"validation reward +0\.0000; best 0\.0000 at step 250", shown)


def test_a_step_whose_groups_are_all_equal_says_that_nothing_is_learned() -> None:
    shown = drawn({**REWARDED, "reward_spread": 0.0, "equal_groups": 1.0})
    assert "0.500 (spread 0.000; all groups equal: nothing is learned)" in shown
    assert "nothing" not in drawn({**REWARDED, "equal_groups": 0.5})


def test_a_sample_names_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    sample = {"event": "sample", "step": 250, "prompt": 'Once\n"upon', "text": " a time"}
    assert r"""sample of 'Once\n"upon':  a time""" in drawn(STEP, sample)
    with training_view.view(1000, quiet=False) as show:
        show(sample)
    assert capsys.readouterr().err == """step 250: sample of 'Once\\n"upon':  a time\n"""


def test_before_the_first_event_nothing_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is refused has none."""
    monkeypatch.setattr(training_view, "draws", lambda stream: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(TrainingError), training_view.view(80, quiet=False):
        raise TrainingError("refused")
    assert capsys.readouterr().err == ""
    with training_view.view(80, quiet=False) as show:
        show({"event": "start", "step": 0, **ABOUT})
        show(STEP)
    told = capsys.readouterr().err
    assert "250 of 80" in told and "80 in all" in told
    assert told.startswith(
        "12,345 parameters, 10 rows an epoch, 160 tokens a step, on cpu\nAdamW, learning rate 0.001\n"
    )
    assert told.count("AdamW") == 1, "it stands above what is drawn again and again"


def test_a_board_of_eight_answers_fits_twenty_four_lines() -> None:
    answers = [{"text": "long " * 50, "reward": i, "advantage": 0.0} for i in range(8)]
    found = {"event": "validation", "step": 250, "loss": -0.5, "best": True, "reward": 0.5}
    group = {"event": "group", "step": 250, "prompt": "x" * 100, "answers": answers}
    saved = {"event": "saved", "step": 250, "path": "runs/x/step-00000250"}
    assert len(drawn({**REWARDED, "equal_groups": 1.0}, found, group, saved).splitlines()) < 24


@pytest.mark.parametrize(("by", "said"), [(None, "none is left"), (15, "the next step is running; 10 in all")])
def test_the_board_of_a_run_without_a_step(by: int | None, said: str) -> None:
    board, out = training_view.Board(10), io.StringIO()
    board.take({"event": "end", "step": 10, "signal": by})
    Console(file=out, width=80).print(board.draw())
    assert f"step   {said}" in out.getvalue()


def test_the_best_of_a_resumed_run_is_the_whole_runs() -> None:
    def shown(*events: dict[str, Any]) -> str:
        board, out = training_view.Board(1000), io.StringIO()
        for event in events:
            board.take(event)
        Console(file=out, width=80).print(board.draw())
        return out.getvalue()

    resumed = {"event": "resume", **ABOUT, "step": 200, "best_step": 100, "best_loss": 1.25}
    worse = {"event": "validation", "step": 250, "loss": 1.5, "best": False}
    assert "validation loss" in shown(resumed, STEP) and "best 1.2500 at step 100" in shown(resumed, STEP)
    assert "1.5000; best 1.2500 at step 100" in shown(resumed, STEP, worse)
    assert "1.1000; best 1.1000 at step 250" in shown(resumed, STEP, {**worse, "loss": 1.1, "best": True})
    other_rows = {**resumed, "best_loss": None}  # the loss from before does not compare
    assert "best" not in shown(other_rows, STEP)
    assert "1.5000; best 1.5000" in shown(other_rows, STEP, {**worse, "best": True})


def test_curves_and_durations() -> None:
    assert training_view.sparkline([]) == ""
    assert training_view.sparkline([2.0]) == "▁"
    assert training_view.sparkline([1.0, 2.0, 3.0, 8.0]) == "▁▂▃█"
    assert len(training_view.sparkline([float(i) for i in range(1000)])) == 60
    nan, inf = float("nan"), float("inf")
    assert training_view.sparkline([1.0, nan, 2.0]) == "▁ █"
    assert training_view.sparkline([nan, 1.0, inf, 3.0, -inf]) == " ▁ █ "
    assert training_view.sparkline([nan, inf]) == "  "
    assert [training_view.duration(s) for s in (0.4, 59, 60, 3599, 3600, 90000)] == [
        "0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 00 min",
    ]  # fmt: skip


def test_json_is_a_line_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "--preset", "tiny", "--context", "16", "--steps", "1", "--batch-rows", "1", "--eval-rows", "1"]
    assert (
        main([*words, "--sample-every", "0", "--num-hidden-layers", "1", "--json", "--out", str(tmp_path / "r")]) == 0
    )
    out = capsys.readouterr().out
    events = [json.loads(line)["event"] for line in out.splitlines()]
    assert events == ["start", "step", "validation", "saved", "end"]
    assert out == (tmp_path / "r" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("is_native", "device", "precision", "asked", "expected"),
    [
        (True, "cpu", "bfloat16", "auto", "auto"),
        (True, "cpu", "float32", "auto", "float32"),
        (False, "cpu", "bfloat16", "auto", "float32"),
        (False, "cuda", "float32", "auto", "auto"),
        (False, "cpu", "float32", "bfloat16", "bfloat16"),
        (True, "cpu", "bfloat16", "float32", "float32"),
    ],
)
def test_a_frozen_base_computes_in_what_the_processor_multiplies_and_was_asked_for(
    is_native: bool, device: str, precision: Any, asked: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "cpu_has_native_bf16", lambda: is_native)
    assert finetune.base_dtype(FinetuneConfig(precision=precision, dtype=asked), device) == expected


def test_the_short_name_of_characters_is_the_same_setting() -> None:
    short = PretrainConfig(tokenizer="chars")
    assert short == PretrainConfig() and 'tokenizer = "characters"' in short.to_toml()
    with pytest.raises(TrainingError, match="vocab_size: of no effect where tokenizer is characters"):
        PretrainConfig(tokenizer="chars", vocab_size=300)
