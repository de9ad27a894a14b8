"""Runs on mixtures of data, and runs that go on from a model: to the bit after a kill, and what they say."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import llamarium
from llamarium.cli.main import main
from llamarium.errors import LlamariumError, TrainingError
from llamarium.presets import preset
from llamarium.train.conduct import conduct
from llamarium.train.config import DPOConfig, ExperimentConfig, FinetuneConfig, GRPOConfig, PretrainConfig
from llamarium.train.data.bpe import train_bpe
from llamarium.train.distributed.process_group import SINGLE_PROCESS
from llamarium.train.dpo import prepare as prepare_dpo
from llamarium.train.experiments.running import run_experiment
from llamarium.train.finetune import prepare as prepare_finetuning
from llamarium.train.history import read_history
from llamarium.train.journal import Event, read_journal
from llamarium.train.pretrain import prepare
from llamarium.train.rewards.grpo import prepare as prepare_grpo
from llamarium.train.setup import Setup, with_optimizer
from tiny_run import WORDS, tiny_config, write_words

pytestmark = pytest.mark.torch

SILENT = nullcontext(lambda event: None)


class KilledError(BaseException):
    """Ends a run as a kill would: nothing of it is caught."""


def killed_after(step: int) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        if event["event"] == "step" and event["step"] > step:
            raise KilledError

    return emit


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = [name for name in ("model.safetensors", "adapter_model.safetensors") if (checkpoint / name).exists()]
    return load_file(checkpoint / files[0])


def same_after_kills(make: Callable[[Path], Setup], folder: Path, *stops: int) -> Path:
    """Run straight, and with kills; hold the weights equal to the bit, and return the straight run's folder."""
    straight = conduct(lambda: make(folder / "straight"), folder / "straight", resume=False, watch=SILENT)
    out = folder / "killed"
    for stop in stops:
        with pytest.raises(KilledError):
            conduct(lambda: make(out), out, resume=True, watch=nullcontext(killed_after(stop)))
    resumed = conduct(lambda: make(out), out, resume=True, watch=SILENT)
    one, other = weights_of(straight.checkpoint), weights_of(resumed.checkpoint)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert straight.position.cursor.epoch >= 1, "the run goes across epochs of the mixture"
    return folder / "straight"


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, float]:
    write_words(tmp_path / "a.txt")
    rows = [{"text": " ".join(WORDS[i % 7 :])} for i in range(40)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {str(tmp_path / "a.txt"): 1, str(tmp_path / "b.jsonl"): 3}


def test_pretraining_on_a_mixture_resumes_to_the_bit_and_says_how_it_stands(
    texts: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(Path(), data=texts, threads=1, sample_every=0)
    run = same_after_kills(lambda out: prepare(config, out), tmp_path, 3, 17)
    start = next(read_journal(run / "metrics.jsonl"))
    shares = [(source["source"], source["weight"], source["share"]) for source in start["data"]["sources"]]
    assert [name for name, _, _ in shares] == [*texts] and [weight for _, weight, _ in shares] == [1.0, 3.0]
    assert [share for _, _, share in shares] == pytest.approx([0.25, 0.75], abs=0.01)
    assert [(one.source, one.weight) for one in read_history(run).sources] == [*zip(texts, (1.0, 3.0), strict=True)]
    assert main(["pretrain", "--out", str(run), "--resume", "--steps", "25", "--allow-changes"]) == 0
    assert main(["pretrain", "--out", str(tmp_path / "shell"), "--data", ",".join(f"{n}={w}" for n, w in texts.items()),
                 "--preset", "tiny", "--context", "16", "--steps", "1", "--batch-rows", "1", "--eval-rows", "1",
                 "--sample-every", "0"]) == 0  # fmt: skip
    said = " ".join(capsys.readouterr().err.split())
    assert "75.0% " in said or "75." in said
    assert "b.jsonl (" in said and "passes an epoch)" in said
    heavier = tiny_config(Path(), data={**texts, next(iter(texts)): 2}, threads=1, sample_every=0)
    with pytest.raises(TrainingError, match="the sources, or their weights, are others"):
        conduct(lambda: prepare(heavier, run), run, resume=True, watch=SILENT)


@pytest.fixture
def base(tmp_path: Path, model_files: Callable[..., Any]) -> str:
    folder = tmp_path / "base"
    model_files(vocab_size=280).huggingface().rename(folder)
    train_bpe(["say what comes then " * 9], 262).save(folder)
    return str(folder)


def mixed(tmp_path: Path, *kinds: Callable[[int], dict[str, Any]]) -> dict[str, float]:
    names: dict[str, float] = {}
    for number, (kind, count, weight) in enumerate(zip(kinds, (9, 5), (1.0, 2.5), strict=True)):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(kind(i)) + "\n" for i in range(count)))
        names[str(file)] = weight
    return names


TUNING: dict[str, Any] = {
    "steps": 9, "batch_rows": 2, "context": 48, "save_every": 3, "eval_every": 4, "sample_every": 0, "threads": 1,
    "device": "cpu", "warmup_steps": 1, "validation": 0.2, "learning_rate": 1e-2,
}  # fmt: skip


@pytest.mark.parametrize("packing", [True, False])
def test_examples_of_other_forms_mix_and_a_run_resumes_to_the_bit(packing: bool, base: str, tmp_path: Path) -> None:
    names = mixed(tmp_path, lambda i: {"prompt": f"say {i}", "completion": f" {i}"}, lambda i: {"text": f"then {i}"})
    config = FinetuneConfig(model=base, data=names, packing=packing, **TUNING)
    run = same_after_kills(lambda _: prepare_finetuning(config), tmp_path, 2, 5)
    start = next(read_journal(run / "metrics.jsonl"))
    assert start["data"]["examples of prompt"] == 7 and start["data"]["examples of text"] == 4


@pytest.mark.parametrize("method", ["lora", "full"])
def test_pairs_mix_and_each_has_its_reference(method: Any, base: str, tmp_path: Path) -> None:
    def pair(i: int) -> dict[str, str]:
        return {"prompt": f"say {i}", "chosen": f" {i}", "rejected": " no"}

    config = DPOConfig(model=base, data=mixed(tmp_path, pair, pair), method=method, **{**TUNING, "steps": 20})
    if method == "full":
        setup = prepare_dpo(config)
        reference = setup.train.batch(0, [0, 1]).reference_E
        assert reference is not None and reference.isfinite().all() and (reference < 0).all()
    same_after_kills(lambda _: prepare_dpo(config), tmp_path, 2, 5)


def test_prompts_mix(base: str, tmp_path: Path) -> None:
    names = mixed(tmp_path, lambda i: {"prompt": f"say {i}", "answer": "1"}, lambda i: {"prompt": f"then {i}"})
    options = {**TUNING, "batch_rows": 8, "gradient_accumulation_steps": 1, "group_size": 2, "max_tokens": 6}
    config = GRPOConfig(model=base, data=names, reward="length:3", **options)
    same_after_kills(lambda _: prepare_grpo(config), tmp_path, 2, 5)
    with pytest.raises(TrainingError, match=r"1.jsonl:1: .* the reward exact reads 'answer'"):
        prepare_grpo(GRPOConfig(model=base, data=names, reward="exact", **options))


# --- going on from a model --------------------------------------------------------------------------------------------


def going_on(model: object, text: Path, **changes: Any) -> PretrainConfig:
    options: dict[str, Any] = {
        "steps": 60, "batch_rows": 4, "save_every": 3, "eval_every": 6, "sample_every": 0, "context": 16, "threads": 1,
        "warmup_steps": 1, "device": "cpu", "precision": "float32",
    }  # fmt: skip
    return PretrainConfig(model=str(model), data=str(text), **{**options, **changes})


def test_a_run_goes_on_from_a_run_and_resumes_to_the_bit(tmp_path: Path) -> None:
    text = write_words(tmp_path / "text.txt")
    first = conduct(lambda: prepare(tiny_config(text), tmp_path / "one"), tmp_path / "one", resume=False, watch=SILENT)
    config = going_on(first.checkpoint, text)
    setup = prepare(config, tmp_path / "look")
    saved = weights_of(first.checkpoint)
    assert all(torch.equal(p.detach(), saved[key]) for key, p in setup.model.named_parameters())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in setup.model.parameters())
    assert setup.train.context == 16 and setup.model.config.max_position_embeddings == 32, "the model keeps its context"
    run = same_after_kills(lambda out: prepare(config, out), tmp_path, 2, 7)
    before = [e["loss"] for e in read_journal(tmp_path / "one" / "metrics.jsonl") if e["event"] == "step"]
    after = [e["loss"] for e in read_journal(run / "metrics.jsonl") if e["event"] == "step"]
    assert after[0] < before[0] - 0.2, "it begins where the model was"
    assert llamarium.load(run / "best", device="cpu").generate("the", max_new_tokens=3).text
    assert llamarium.export(run / "best", tmp_path / "hf", format="hf").exists()


def test_packed_weights_are_dequantized_and_it_says_so(tmp_path: Path) -> None:
    text, shape = write_words(tmp_path / "text.txt"), {"tokenizer": "bpe", "vocab_size": 288, "hidden_size": 64}
    config = tiny_config(text, **shape, intermediate_size=96, steps=3)
    first = conduct(lambda: prepare(config, tmp_path / "one"), tmp_path / "one", resume=False, watch=SILENT).checkpoint
    file = llamarium.export(first, tmp_path / "x.gguf", format="gguf", type="q8_0")
    plain = prepare(going_on(first, text), tmp_path / "plain")
    with pytest.warns(UserWarning, match="weights of Q8_0 are dequantized to float32, in which all are trained"):
        packed = prepare(going_on(file, text), tmp_path / "packed")
    assert packed.train.batch(0, [3]).ids_BT.equal(plain.train.batch(0, [3]).ids_BT), "both have the same tokenizer"
    for (key, p), (_, q) in zip(packed.model.named_parameters(), plain.model.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3, msg=key)
        assert p.dtype == torch.float32 and p.requires_grad
    for steps in (2, 3):
        config = going_on(file, text, steps=steps)
        with pytest.warns(UserWarning, match="dequantized"):
            found = conduct(
                lambda: prepare(config, tmp_path / "run"),  # noqa: B023 - called at once
                tmp_path / "run", resume=True, allow_changes=True, watch=SILENT,
            )  # fmt: skip
    assert found.position.step == 3 and load_file(found.checkpoint / "model.safetensors")


def test_weights_in_four_bits_are_trained_as_numbers(tmp_path: Path, model_files: Callable[..., Any]) -> None:
    folder, expected = model_files(vocab_size=280).nf4()
    train_bpe(["say what comes then " * 9], 262).save(folder)
    with pytest.warns(UserWarning, match="weights of NF4 are dequantized to float32"):
        model = prepare(going_on(folder, write_words(tmp_path / "text.txt")), tmp_path / "run").model
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    name = "model.layers.0.mlp.down_proj.weight"
    assert model.get_parameter(name).shape == (model.config.hidden_size, model.config.intermediate_size)
    torch.testing.assert_close(model.get_parameter(name).detach(), expected[name].float(), rtol=0, atol=0.05)


def test_what_contradicts_a_model_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_words(tmp_path / "text.txt")
    for name, value in (("preset", "tiny"), ("tokenizer", "bpe"), ("hidden_size", 64), ("rope_theta", 5e5)):
        with pytest.raises(TrainingError, match=f"{name}: of no effect beside model, which has its own"):
            going_on("shakespeare-char", text, **{name: value})
    with pytest.raises(TrainingError, match="vocab_size: of no effect"):
        going_on("shakespeare-char", text, vocab_size=300)
    words = ["pretrain", "-m", "shakespeare-char", "--data", str(text), "--out", str(tmp_path / "run")]
    for flag in (["--preset", "tiny"], ["--preset", "small"], ["--tokenizer", "chars"]):  # the defaults, named, too
        assert main([*words, *flag]) == 1
        assert f"{flag[0][2:]}: of no effect beside model" in capsys.readouterr().err
    assert main([*words[:2], "nowhere/model", *words[3:]]) == 1
    assert "nowhere/model" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="context is 512, and the model's holds 256 tokens"):
        prepare(going_on("shakespeare-char", text, context=512), tmp_path / "run")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"is a LoRA adapter; make a model of it \(llamarium merge\)"):
        prepare(going_on(tmp_path / "adapter", text), tmp_path / "run")
    assert main([*words[:2], str(tmp_path / "adapter"), *words[3:]]) == 1
    said = capsys.readouterr().err
    assert [main([*words[:2], name, *words[3:]]) for name in ("x" * 5000, "~nobody-here/x")] == [1, 1], "no traceback"
    assert "make a model of it (llamarium merge)" in said and "--adapter" not in said
    text.write_text("déjà vu")
    with pytest.raises(LlamariumError, match="is not among the 65"):
        prepare(going_on("shakespeare-char", text), tmp_path / "run")


def test_the_rate_of_a_run_that_goes_on_is_a_tenth(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    for given, rate in (({"model": "x"}, 1e-4), ({"model": "x", "learning_rate": 1e-3}, 1e-3)):
        left_out = PretrainConfig(**given)
        config, _ = with_optimizer(left_out, preset("tiny"), SINGLE_PROCESS, {})
        assert config.learning_rate == rate and left_out == PretrainConfig.resolve(None, given)
        file.write_text(config.to_toml())
        assert PretrainConfig.resolve(file, {}) == config and f"learning_rate = {rate}\n" in file.read_text()
    same = {"model": "x", "preset": "small", "tokenizer": "chars"}  # as the file of a run writes them
    assert PretrainConfig(**same) == PretrainConfig(model="x")


def test_experiments_begin_from_scratch_and_count_one_source(tmp_path: Path, texts: dict[str, float]) -> None:
    for name, config, words in (
        ("rope", ExperimentConfig(model="shakespeare-char"), "does not take model: its runs begin from scratch"),
        ("ngrams", ExperimentConfig(data=texts), "does not take data: counts know no weights"),
    ):
        with pytest.raises(TrainingError, match=words):
            run_experiment(name, config, tmp_path / "x", resume=False, watch=lambda _: SILENT)
