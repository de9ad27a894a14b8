"""Experiments: what is swapped in does what it says, no variant pretends to be a Llama, and they are compared."""

import importlib.util
import json
import random
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import llamarium
from llamarium.attention import CausalAttend
from llamarium.cli import experiment as command
from llamarium.cli.main import main
from llamarium.errors import LlamariumError, TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.page.compare.runs import Runs
from llamarium.presets import PRESETS
from llamarium.train.experiments import running
from llamarium.train.experiments.peeking import measure_peeking
from llamarium.train.experiments.running import Outcome, restore_variant
from llamarium.train.experiments.variants import EXPERIMENTS, NoNorm, replace_norms, without_part, without_rope
from llamarium.train.journal import read_journal
from llamarium.train.pretrain import prepare
from llamarium.train.step import bidirectional_trunk

pytestmark = pytest.mark.torch

WORDS = "the cat sat on a mat and so did every other cat that had come by".split()
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = random.Random(0)
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_text("The " + " ".join(generator.choice(WORDS) for _ in range(900)) + "\n")
    return file


def arguments(text: Path, out: Path, **changes: Any) -> list[str]:
    settings = {
        "data": text, "out": out, "steps": 6, "batch-rows": 4, "context": 24, "hidden-size": 32, "sample-tokens": 4,
        "intermediate-size": 48, "num-attention-heads": 4, "eval-every": 3, "log-every": 1, "device": "cpu",
        "warmup-steps": 2, "eval-rows": 8, **changes,
    }  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def model_of(seed: int = 0) -> LlamaForCausalLM:
    return init_weights(LlamaForCausalLM(PRESETS["tiny"]), seed).eval()


def test_a_tied_head_explodes_where_the_embedding_begins_wide(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(text, tmp_path, **{"embedding-std": 1.0, "steps": 2, "warmup-steps": 1})
    assert main(["experiment", "tied", *words]) == 0
    first = {
        name: next(e["loss"] for e in read_journal(tmp_path / "tied" / name / "metrics.jsonl") if e["event"] == "step")
        for name in ("tied", "untied", "tied-std-1", "untied-std-1")
    }
    assert first["tied-std-1"] > 3 * max(first["tied"], first["untied"], first["untied-std-1"])
    assert re.search(rf"tied-std-1 +{first['tied-std-1']:.4g}\n", capsys.readouterr().out)
    assert main(["experiment", "rope", *words]) == 1
    assert "--embedding-std: of no effect in the experiment rope" in capsys.readouterr().err


def test_several_seeds_have_a_mean_and_a_spread(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "norm", *arguments(text, tmp_path, seeds=2)]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("±") == 3 + 1 and "Mean validation losses over 2 seeds" in printed
    assert (tmp_path / "norm" / "layernorm-seed-1" / "metrics.jsonl").exists()


def test_the_command_offers_every_experiment() -> None:
    assert set(command.NAMES) == set(EXPERIMENTS)


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("tied", ["tied", "untied"]),
        ("rope", ["rope", "no-rope"]),
        ("causal", ["causal", "bidirectional"]),
        ("heads", ["mha", "gqa", "mqa"]),
        ("norm", ["rmsnorm", "layernorm", "no-norm"]),
        ("depth", ["1-layer", "2-layers", "4-layers"]),
        ("width", ["width-8", "width-16", "width-32", "width-64"]),
        ("parts", ["both", "attention", "mlp"]),
    ],
)
def test_each_experiment_trains_its_variants_and_compares_them(
    name: str, variants: list[str], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(text, tmp_path)
    if name == "width":
        at = words.index("--intermediate-size")
        del words[at : at + 2]
    assert main(["experiment", name, *words]) == 0
    out, err = capsys.readouterr()
    assert f"llamarium inspect --checkpoints {tmp_path / name}\n" in err
    assert EXPERIMENTS[name].title in out and max(map(len, out.splitlines())) <= 80
    assert "steps = 6\n" in (tmp_path / name / "experiment.toml").read_text()
    for variant in variants:
        assert re.search(rf"^{variant} +[\d,]+ +\d+\.\d{{4}} +\d+\.\d{{4}} +[\d,]+ +[\d,]+$", out, re.MULTILINE)
        assert "steps = 6\n" in (tmp_path / name / variant / "train.toml").read_text()
        events = list(read_journal(tmp_path / name / variant / "metrics.jsonl"))
        assert events[-1]["event"] == "end" and events[-1]["step"] == 6
        check_what_was_saved(tmp_path / name / variant / "step-00000006", variant)
    starts = [next(read_journal(tmp_path / name / v / "metrics.jsonl")) for v in variants]
    assert len({start["threads"] for start in starts}) == 1, "their speeds are compared"
    check_what_differs(name, starts, [list(read_journal(tmp_path / name / v / "metrics.jsonl")) for v in variants])


def check_what_was_saved(folder: Path, variant: str) -> None:
    if variant in ("no-rope", "no-norm", "layernorm", "bidirectional", "attention", "mlp"):
        assert not (folder / "config.json").exists()
        assert json.loads((folder / "variant.json").read_text())["variant"] == variant
        for path in (folder, folder / "variant.safetensors"):
            with pytest.raises(LlamariumError):
                llamarium.load(str(path))
    else:
        width = int(variant.removeprefix("width-")) if variant.startswith("width") else 32
        assert llamarium.load(str(folder)).model.config.hidden_size == width


def check_what_differs(name: str, starts: list[dict[str, Any]], events: list[list[dict[str, Any]]]) -> None:
    losses = [[e["loss"] for e in run if e["event"] == "step"] for run in events]
    if name == "heads":
        assert [start["model"]["num_key_value_heads"] for start in starts] == [4, 2, 1]
    elif name == "tied":
        assert [start["model"]["tie_word_embeddings"] for start in starts] == [True, False]
        assert starts[1]["parameters"] - starts[0]["parameters"] == 32 * starts[0]["model"]["vocab_size"]
    elif name == "depth":
        assert [start["model"]["num_hidden_layers"] for start in starts] == [1, 2, 4]
    elif name == "width":
        assert [start["model"]["head_dim"] for start in starts] == [2, 4, 8, 16]
    elif name == "parts":
        whole, attention, mlp = (start["parameters"] for start in starts)
        assert whole - attention == 2 * (3 * 32 * 48 + 32) and whole - mlp == 2 * (4 * 32 * 32 + 32)
    else:
        assert starts[0]["model"] == starts[1]["model"] and starts[0]["settings"] == starts[1]["settings"]
        assert starts[0]["parameters"] - starts[-1]["parameters"] == (5 * 32 if name == "norm" else 0)
        assert losses[0] != losses[1]


def test_an_experiment_goes_on_where_it_ended(text: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    kept = {"save-total-limit": 2, "save-every": 3}
    assert main(["experiment", "rope", *arguments(text, whole, **kept)]) == 0
    shutil.copytree(whole, halves)
    for variant in ("rope", "no-rope"):
        shutil.rmtree(halves / "rope" / variant / "step-00000006")
    assert main(["experiment", "rope", "--out", str(halves), "--resume"]) == 0  # with the settings that it had
    for variant, file in (("rope", "model.safetensors"), ("no-rope", "variant.safetensors")):
        ended = [out / "rope" / variant / "step-00000006" / file for out in (whole, halves)]
        assert ended[0].read_bytes() == ended[1].read_bytes()


def test_a_refused_experiment_changes_nothing_and_the_result_is_the_last_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", "tied", *arguments(text, tmp_path), "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["event"] == "result" and events[-1]["notes"] == [EXPERIMENTS["tied"].note]
    assert [len(events[-1]["arms"][arm]["losses"]) for arm in ("tied", "untied")] == [1, 1]
    assert events[-1]["verdict"].startswith("Each was trained once.")
    settings = (tmp_path / "tied" / "experiment.toml").read_text()
    assert main(["experiment", "tied", *arguments(text, tmp_path), "--resume", "--seed", "9"]) == 1
    assert (tmp_path / "tied" / "experiment.toml").read_text() == settings


def test_one_that_was_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "run_experiment", lambda *_, **__: Outcome(signal.SIGTERM))
    out = tmp_path / "my runs"
    assert main(["experiment", "rope", "--out", str(out)]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == f"saved; go on with it: llamarium experiment rope --out '{out}' --resume\n"


def test_a_variant_is_not_resumed_as_another(text: Path, tmp_path: Path) -> None:
    assert main(["experiment", "rope", *arguments(text, tmp_path)]) == 0
    model = prepare(command.ExperimentConfig.resolve(None, shape_of(text)), tmp_path).model
    folder = tmp_path / "rope" / "no-rope" / "step-00000006"
    restore_variant(model, "no-rope", folder)
    with pytest.raises(TrainingError, match="another variant"):
        restore_variant(model, "no-norm", folder)
    with pytest.raises(TrainingError, match="another shape"):
        restore_variant(model_of(), "no-rope", folder)


def shape_of(text: Path, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "context": 24, "device": "cpu"}
    return {"data": str(text), **shape, **changes}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tied", "--tie-word-embeddings"], "decides tie_word_embeddings itself"),
        (["heads", "--num-attention-heads", "2"], "--num-attention-heads is 2; expected a number that can be grouped"),
        (["heads", "--num-key-value-heads", "4"], "--num-key-value-heads is 4; expected one between 1 and 4"),
        (["causal", "--validation", "0"], "validation is 0"),
        (["ngrams", "--validation", "0"], "validation is 0"),
        (["width", "--head-dim", "8"], "decides intermediate_size and head_dim itself"),
        (["rope", "--tensor-parallel", "2"], "in one process"),
    ],
)
def test_settings_that_leave_nothing_to_compare_are_refused(
    words: list[str], message: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", words[0], *arguments(text, tmp_path), *words[1:]]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- what is swapped in -----------------------------------------------------------------------------------------------


def test_without_rope_the_positions_do_not_matter() -> None:
    ids = torch.tensor([[5, 9, 3, 7]])
    model = model_of()
    scattered = torch.tensor([[0, 50, 7, 100]])
    assert not torch.allclose(model(ids), model(ids, scattered), atol=1e-4)
    weights = dict(model.named_parameters())
    without_rope(model)
    assert torch.equal(model(ids), model(ids, scattered))
    assert dict(model.named_parameters()).keys() == weights.keys()
    q = torch.randn(1, 4, 4, 32)
    assert torch.equal(model.model.rotary_emb(scattered, torch.float32).rotate(q), q)


def test_without_a_part_a_layer_adds_only_the_other() -> None:
    ids = torch.tensor([[5, 9, 3, 7]])
    alone, mixing = model_of(), model_of()
    without_part(alone, "self_attn", "input_layernorm")
    assert torch.allclose(alone(ids)[0, -1], alone(ids[:, -1:])[0, -1], atol=1e-5)  # a token sees itself only
    without_part(mixing, "mlp", "post_attention_layernorm")
    assert not torch.allclose(mixing(ids)[0, -1], mixing(ids[:, -1:])[0, -1], atol=1e-4)
    names = {name.split(".")[3] for name, _ in mixing.named_parameters() if ".layers." in name}
    assert names == {"self_attn", "input_layernorm"}


def test_n_grams_come_before_a_llama(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "ngrams", *arguments(text, tmp_path, seeds=2), "--json"]) == 0
    end = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(end["arms"]) == ["2-gram", "4-gram", "6-gram", "llama"]
    losses = {label: arm["losses"] for label, arm in end["arms"].items()}
    assert losses["4-gram"] < losses["2-gram"] and len({*losses["2-gram"]}) == 1
    assert "4-gram is below 2-gram by" in end["verdict"] and len({*losses["llama"]}) == 2
    assert end["arms"]["6-gram"]["training_loss"] is None and end["arms"]["6-gram"]["sample"]
    assert Runs([tmp_path / "ngrams"]).names == ("2-gram", "4-gram", "6-gram", "llama", "llama-seed-1")
    assert main(["experiment", "ngrams", "--out", str(tmp_path), "--resume"]) == 0


def test_without_norms_the_stream_is_scaled_by_nothing() -> None:
    model = model_of()
    ids = torch.tensor([[5, 9, 3, 7]])
    before = sum(p.numel() for p in model.parameters())
    replace_norms(model, NoNorm)
    assert before - sum(p.numel() for p in model.parameters()) == 5 * 128
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    model.model.layers = torch.nn.ModuleList()
    assert torch.equal(model.model(ids, torch.arange(4)[None], CausalAttend()), model.model.embed_tokens(ids))


def test_peeking_is_measured_where_there_is_something_to_see(text: Path, tmp_path: Path) -> None:
    config = command.ExperimentConfig.resolve(None, shape_of(text))
    setup = prepare(config, tmp_path)
    assert setup.validation is not None
    honest = measure_peeking(setup.model, setup.validation, setup.trunk, setup.config)
    assert honest.share == 0 and honest.loss == honest.loss_without
    peeking = measure_peeking(setup.model, setup.validation, bidirectional_trunk, setup.config)
    assert 0 < peeking.share < 1 and peeking.loss != peeking.loss_without == honest.loss
    evenly = 1 / config.context if config.context else 0
    assert peeking.share == pytest.approx(evenly, rel=0.5)  # fresh weights look everywhere alike


def test_a_model_that_sees_the_next_token_cheats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "noise.txt", tmp_path / "runs"
    file.write_text("".join(random.Random(0).choices("abcdefghijklmnop", k=20_000)))  # nothing to predict: ln 16 = 2.77
    changes = {
        "steps": 70, "learning-rate": 0.01, "warmup-steps": 5, "eval-every": 70, "log-every": 70, "context": 16,
        "batch-rows": 8, "head-dim": 16, "sample-prompt": "a",
    }  # fmt: skip
    assert main(["experiment", "causal", *arguments(file, out, **changes)]) == 0
    losses = {}
    for variant in ("causal", "bidirectional"):
        events = read_journal(out / "causal" / variant / "metrics.jsonl")
        losses[variant] = next(e["loss"] for e in events if e["event"] == "validation")
    assert losses["causal"] > 2.7
    assert losses["bidirectional"] < 2.4
    printed = capsys.readouterr().out
    assert "How it cheats" in printed and "weight on next" in printed


# --- the encoder-decoder ----------------------------------------------------------------------------------------------


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("encoder_decoder", ROOT / "examples" / "encoder_decoder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_encoder_decoder_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["encoder_decoder.py", "--steps", "8", "--hidden-size", "16"])
    with torch.random.fork_rng([]):
        load_example().main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [
        "model",
        "encoder-decoder",
        "decoder-only",
    ]
    for line in lines:
        if line.startswith(("encoder", "decoder")):
            assert 0 < float(line.split()[2]) < 10 and line.split()[4].endswith("%")


def test_the_examples_translation_and_its_padding() -> None:
    example = load_example()
    assert [example.in_words(n) for n in (0, 13, 20, 407, 999)] == [
        "zero", "thirteen", "twenty", "four hundred seven", "nine hundred ninety nine",
    ]  # fmt: skip
    assert max(len(example.in_words(n)) for n in range(1000)) == example.LONGEST
    shape = {"vocab_size": len(example.ALPHABET), "hidden_size": 16, "intermediate_size": 32, "head_dim": 4}
    config = example.replace(PRESETS["tiny"], **shape)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = example.EncoderDecoder(config)
    target = example.encode(["=four", "=nine"])
    both = model.write(target, model.read(example.encode(["4", "909"])))
    alone = model.write(target[:1], model.read(example.encode(["4"])))
    assert torch.allclose(both[:1], alone, atol=1e-5)  # what is beside it, and the padding, change nothing
    other = model.write(target[:1], model.read(example.encode(["5"])))
    assert not torch.allclose(other, alone, atol=1e-4)  # the source is read
