"""`llamarium merge`: an adapter and its base become a model folder, checked and whole, or nothing is written."""

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import llamarium
from llamarium.adapters.base_check import QUANTIZED_KEY
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.files import read_metadata
from llamarium.adapters.lora import LoRALinear, apply_lora, lora_linears, rows_of
from llamarium.adapters.merge import merge_adapter
from llamarium.adapters.modules import load_adapter
from llamarium.adapters.save import adapter_metadata, save_adapter
from llamarium.cli import options
from llamarium.cli.main import COMMANDS, main
from llamarium.errors import OptionError, TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.quant.packed import LinearPacked
from llamarium.train.data.bpe import train_bpe
from strong_adapters import strengthen

pytestmark = pytest.mark.torch

IDS = torch.tensor([[1, 5, 17, 200, 3, 255, 0, 42]])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.cli.main.COMMANDS", {**COMMANDS, "merge": "merge an adapter"})


@pytest.fixture
def base(model_files: Callable[..., Any]) -> Path:
    return model_files().huggingface()


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=2))
    strengthen(model, 0.1)
    save_adapter(model, tmp_path / "adapter", base_model=str(base))
    return tmp_path / "adapter"


def run(*words: object) -> int:
    return main(["merge", *map(str, words)])


@torch.no_grad()
def test_every_command_can_put_an_adapter_on_the_base_that_it_names(base: Path, adapter: Path) -> None:
    parser = argparse.ArgumentParser()
    options.add_model(parser)
    expected = llamarium.load(base, device="cpu").model
    load_adapter(expected, adapter)
    for words in (["--adapter", str(adapter)], ["-m", str(base), "--adapter", str(adapter)]):
        found = options.load_llama(parser.parse_args([*words, "--device", "cpu"])).model
        assert torch.equal(found(IDS), expected(IDS))
    plain = options.load_llama(parser.parse_args(["-m", str(base), "--device", "cpu"])).model
    assert not torch.equal(plain(IDS), expected(IDS))


@torch.no_grad()
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_merges_into_the_base_that_the_adapter_names(
    base: Path, adapter: Path, tmp_path: Path, quantize: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "merged"
    options = [] if quantize is None else ["--quantize", quantize]
    assert run("--adapter", adapter, "--out", out, "--dtype", "float32", "--json", *options) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["path"] == str(out) and result["effect"] > 0.05 and result["difference"] < 1e-4
    assert result["kept"] == pytest.approx(1, abs=1e-4)
    model = llamarium.load(base, device="cpu", dtype="float32", quantize=quantize).model
    load_adapter(model, adapter)
    merged = llamarium.load(out, device="cpu")
    assert merged.model.dtype == torch.float32
    torch.testing.assert_close(merged.model(IDS), model(IDS), rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["merged"], "nothing half-made is left"


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_that_is_packed_for_the_kernels_is_unpacked(
    tied: bool, model_files: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = model_files(tie_word_embeddings=tied).gguf_file("Q8_0")
    model = llamarium.load(base, device="cpu").model
    assert any(isinstance(module, LinearPacked) for module in model.modules())
    apply_lora(model, LoRAConfig(r=2))
    strengthen(model, 0.1)
    save_adapter(model, tmp_path / "adapter", base_model=str(base))
    with torch.no_grad():
        expected = model(IDS)
    assert run("--adapter", tmp_path / "adapter", "--out", tmp_path / "out", "--device", "cpu") == 0
    merged = llamarium.load(tmp_path / "out", device="cpu").model
    with torch.no_grad():
        found = merged(IDS)
    assert (found - expected).float().norm() < 0.05 * expected.float().norm()


def test_bf16_stays_bf16(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--adapter", adapter, "--out", tmp_path / "out") == 0
    assert llamarium.load(tmp_path / "out", device="cpu").model.dtype == torch.bfloat16
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out'}\n"
    assert (
        "without a tokenizer" in err
        and "merged, and as it should be: " in err
        and "the merged model's are within" in err
        and err.endswith(f"chat with it: llamarium chat -m {tmp_path / 'out'}\n")
    )


def test_a_merge_that_computes_something_else_is_an_error(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true = LoRALinear.merged_rows
    monkeypatch.setattr(LoRALinear, "merged_rows", lambda self: ((i, j, rows * 1.5) for i, j, rows in true(self)))
    assert run("--adapter", adapter, "--out", tmp_path / "out", "--dtype", "float32") == 1
    assert "away from the adapter's" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
    with pytest.raises(TrainingError, match=r"q_proj: products with the merged matrix are .* away from the adapter's"):
        merge_adapter(llamarium.load(base, device="cpu").model, adapter)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("bfloat16", r"5.00% in bfloat16; merge in float32 \(--dtype float32\)"), ("float32", r"in float32")],
)
def test_a_refusal_says_the_bound_that_was_applied(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, bound: str
) -> None:
    distances = iter((0.01, 0.5))  # what the adapter moves, and what the merge does
    monkeypatch.setattr("llamarium.adapters.merge._distance", lambda *_: next(distances))
    with pytest.raises(TrainingError, match=rf"50\.00% away .* by 1\.00%; expected at most .*{bound}$"):
        merge_adapter(llamarium.load(base, device="cpu", dtype=dtype).model, adapter)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merge_that_does_nothing_is_an_error_however_little_was_learned(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In bfloat16 the logits alone would not show it: computing moves them further than this adapter does."""
    model = llamarium.load(base, device="cpu").model
    apply_lora(model, LoRAConfig(r=2, use_dora=kind == "dora"))
    strengthen(model, 1e-3)
    save_adapter(model, tmp_path / "weak", base_model=str(base))
    assert merge_adapter(llamarium.load(base, device="cpu").model, tmp_path / "weak").effect < 0.05
    true = LoRALinear.merged_rows
    monkeypatch.setattr(
        LoRALinear, "merged_rows", lambda self: ((i, j, rows_of(self.base_layer, i, j)) for i, j, _ in true(self))
    )
    with pytest.raises(TrainingError, match="q_proj: products with the merged matrix"):
        merge_adapter(llamarium.load(base, device="cpu").model, tmp_path / "weak")


def test_what_rounding_loses_is_said(base: Path, tmp_path: Path) -> None:
    def save(spread: float) -> None:
        model = llamarium.load(base, device="cpu").model
        apply_lora(model, LoRAConfig(r=2))
        strengthen(model, spread)
        save_adapter(model, tmp_path / "weak", base_model=str(base))

    save(4e-5)
    with pytest.warns(UserWarning, match=r"only \d+% of what was learned.*bfloat16; merge in float32"):
        merge_adapter(llamarium.load(base, device="cpu").model, tmp_path / "weak")
    save(1e-5)
    with pytest.raises(TrainingError, match=r"only \d+% of what was learned.*bfloat16; merge in float32"):
        merge_adapter(llamarium.load(base, device="cpu").model, tmp_path / "weak")
    with warnings.catch_warnings():
        assert merge_adapter(llamarium.load(base, device="cpu", dtype="float32").model, tmp_path / "weak").kept > 0.99


def test_targets(base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, word in ((base, "is the base model"), (adapter, "is the adapter")):
        assert run("--adapter", adapter, "--out", path, "--force") == 1
        assert word in capsys.readouterr().err
    out = tmp_path / "out"
    assert run("--adapter", adapter, "--out", out) == 0
    before = (out / "model.safetensors").read_bytes()
    assert run("--adapter", adapter, "--out", out, "--dtype", "float32") == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before
    assert run("--adapter", adapter, "--out", out, "--dtype", "float32", "--force") == 0
    assert llamarium.load(out, device="cpu").model.dtype == torch.float32
    (out / "thesis.tex").write_text("years of work")
    assert run("--adapter", adapter, "--out", out, "--force") == 1
    assert "thesis.tex" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert run("--adapter", adapter, "--out", tmp_path / "file", "--force") == 1
    assert (tmp_path / "file").read_text() == "x"
    assert not list(tmp_path.glob(".*"))


def test_another_base(
    adapter: Path, model_files: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = model_files(seed=1).huggingface()
    assert run("--adapter", adapter, "-m", other, "--out", tmp_path / "out") == 1
    assert "trained on another base" in capsys.readouterr().err
    assert run("--adapter", adapter, "-m", other, "--out", tmp_path / "out", "--any-base") == 0
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    capsys.readouterr()
    assert run("--adapter", adapter, "--out", tmp_path / "out2") == 1
    assert "name it with -m" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["merge --out there --adapter", "finetune --data examples.jsonl -m"])
def test_a_missing_file_is_reported_before_pytorch_is_imported(words: str) -> None:
    program = (
        "import sys; from llamarium.cli.main import main; code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules, 'PyTorch was imported'; sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *words.split(), "./nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nowhere" in done.stderr and "AssertionError" not in done.stderr


def test_a_model_in_the_adapters_place_is_named_so(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", "--adapter", str(base), "--out", str(tmp_path / "merged")]) == 1
    words = f"{base}: is a model, no adapter; expected a folder with adapter_config.json"
    assert words in capsys.readouterr().err


# --- what training held the base in -----------------------------------------------------------------------------------


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far logits are apart, relative to the expected ones' length, each without its mean over tokens."""
    found, expected = (x.double() - x.double().mean(-1, keepdim=True) for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def plain_base(model_files: Callable[..., Any]) -> Path:
    return model_files(dtype=torch.float32, vocab_size=280).huggingface()


def trained_over(base: Path, folder: Path, strength: float, quantize: str | None = "NF4") -> LlamaForCausalLM:
    """Save an adapter as a run over this base does, and return the model that was trained."""
    model = llamarium.load(base, device="cpu", dtype="float32", quantize=quantize).model
    metadata = adapter_metadata(model, str(base), None, quantize or "none")
    apply_lora(model, LoRAConfig(r=2))
    strengthen(model, strength)
    save_adapter(model, folder, base_model=str(base), metadata=metadata)
    return model


@torch.no_grad()
def test_a_merge_is_measured_against_the_base_that_training_used(
    plain_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = trained_over(plain_base, tmp_path / "a", 0.3)
    ids = torch.randint(280, (1, 64), generator=torch.Generator().manual_seed(0))[
        :, : trained.config.max_position_embeddings
    ]
    expected = trained(ids)
    results: dict[str, Any] = {}
    for onto in ("full", "trained"):
        words = ["--adapter", tmp_path / "a", "--out", tmp_path / onto, "--dtype", "float32", "--json"]
        assert run(*words, "--onto", onto) == 0
        told = capsys.readouterr()
        results[onto] = json.loads(told.out)
        assert "training held the base in NF4, and " in told.err
        merged = llamarium.load(tmp_path / onto, device="cpu").model
        found = distance(merged(ids), expected)
        assert results[onto]["from_trained"] == pytest.approx(found, rel=1e-3, abs=1e-5)
        assert results[onto]["trained_over"] == "NF4" and results[onto]["difference"] < 1e-4
        if onto == "trained":
            for name, linear in lora_linears(trained):  # the weights themselves: NF4's numbers plus B A
                whole = torch.cat([rows for _, _, rows in linear.merged_rows()])
                torch.testing.assert_close(merged.get_submodule(name).weight, whole, rtol=1e-6, atol=1e-7)
    assert results["full"]["merged_onto"] == "stored" and results["full"]["from_trained"] > 0.01
    assert results["trained"]["merged_onto"] == "NF4" and results["trained"]["from_trained"] < 1e-4


@pytest.mark.filterwarnings("ignore:the merged model is saved without a tokenizer")
def test_the_loss_of_the_trained_base_is_a_warning_where_it_outweighs_what_was_learned(
    plain_base: Path, tmp_path: Path
) -> None:
    trained_over(plain_base, tmp_path / "weak", 1e-3)
    with pytest.warns(UserWarning, match=r"training held the base in NF4: .* away .*`--onto trained`"):
        report = llamarium.merge(tmp_path / "weak", tmp_path / "merged", dtype="float32", device="cpu")
    assert report.from_trained is not None and report.from_trained > report.effect
    kept = llamarium.merge(tmp_path / "weak", tmp_path / "kept", onto="trained", dtype="float32", device="cpu")
    assert kept.from_trained == kept.difference < 1e-4


@pytest.mark.filterwarnings("ignore:the merged model is saved without a tokenizer")
@pytest.mark.parametrize(("quantize", "expected"), [(None, "stored"), ("NF4", "NF4"), ("Q8_0", None)])
def test_adapters_of_earlier_versions_tell_by_their_linears(
    plain_base: Path, tmp_path: Path, quantize: str | None, expected: str | None
) -> None:
    trained_over(plain_base, tmp_path / "a", 0.3, quantize)
    path = tmp_path / "a" / "adapter_model.safetensors"
    metadata = {key: value for key, value in read_metadata(tmp_path / "a").items() if key != QUANTIZED_KEY}
    save_file(load_file(path), path, metadata)
    report = llamarium.merge(tmp_path / "a", tmp_path / "out", dtype="float32", device="cpu")
    assert report.trained_over == expected and (report.from_trained is None) == (expected is None)
    if expected is None:
        with pytest.raises(OptionError, match="does not say what training held the base in"):
            llamarium.merge(tmp_path / "a", tmp_path / "b", onto="trained", device="cpu")
        report = llamarium.merge(tmp_path / "a", tmp_path / "b", quantize="q8_0", dtype="float32", device="cpu")
        assert report.merged_onto == "Q8_0"
    else:
        with pytest.raises(OptionError, match="quantize is Q8_0, and training held the base in"):
            llamarium.merge(tmp_path / "a", tmp_path / "b", onto="trained", quantize="q8_0", device="cpu")


@pytest.mark.parametrize("quantize", ["none", "NF4"])
def test_a_run_notes_what_it_held_the_base_in(plain_base: Path, tmp_path: Path, quantize: Any) -> None:
    train_bpe(["one two three " * 9], 259).save(plain_base)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": " two"}\n' * 4)
    ending = llamarium.finetune(
        tmp_path / "run", model=str(plain_base), data=str(tmp_path / "rows.jsonl"), quantize=quantize, steps=1,
        context=16, validation=0.0, sample_every=0, chat_format="none", device="cpu", threads=1,
    )  # fmt: skip
    assert read_metadata(ending.checkpoint)[QUANTIZED_KEY] == quantize
    merged = llamarium.merge(ending.checkpoint, tmp_path / "merged", onto="trained", dtype="float32", device="cpu")
    assert merged.trained_over == merged.merged_onto == ("stored" if quantize == "none" else "NF4")
