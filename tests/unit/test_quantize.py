"""Quantizing a model on disk: layer by layer with a text, into a folder that loads, and compared with the original."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import llamarium
from closeness import output_error
from llamarium.attention import CausalAttend
from llamarium.calibration.calibrate import LINEARS_BY_INPUT, InputStatistics, run_layer, sample_windows
from llamarium.calibration.calibrated import HEAD_SHARE, CalibratedQuantizer, choose_head
from llamarium.calibration.fit import fit
from llamarium.calibration.quantizer import METHODS, Recipe
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.open import open_checkpoint
from llamarium.cli.main import main
from llamarium.errors import CheckpointError, InputError, OptionError, OutputError
from llamarium.inspect import forward
from llamarium.inspect.measures.divergence import kl_of_rows
from llamarium.kernels import native
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.packed import LinearPacked
from llamarium.train.data.bpe import train_bpe

pytestmark = pytest.mark.torch

TEXT = "".join(f"{i} men went to mow, went to mow a meadow; {i * i % 97} and {i % 7} came.\n" for i in range(200))
LAYERS = ("Q4_0", "Q4_1", "IQ4_NL", "Q8_0")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([TEXT], 280)


@pytest.fixture
def folder(model_files: Callable[..., Any], tokenizer: Any) -> Path:
    """A random model with sharper weights than the fixture's, so that its predictions are not all alike."""
    files = model_files(
        dtype=torch.float32,
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_ids,
        max_position_embeddings=256,
        hidden_size=64,
        intermediate_size=128,
        head_dim=8,
    )
    files.weights = {key: weight * 4 if weight.ndim == 2 else 1 + weight for key, weight in files.weights.items()}
    folder: Path = files.huggingface()
    tokenizer.save(folder)
    return folder


@pytest.fixture
def windows_BT(tokenizer: Any) -> Tensor:
    return sample_windows(tokenizer, TEXT, samples=16, context=64)


def quantizer(
    folder: Path, method: Any, windows_BT: Tensor | None, type: str = "Q4_0", **options: Any
) -> CalibratedQuantizer:
    return CalibratedQuantizer(open_checkpoint(folder), Recipe(type, method), windows_BT, **options)


# --- the sample -------------------------------------------------------------------------------------------------------


def test_windows_are_spread_over_the_text_and_begin_with_bos(tokenizer: Any):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    found = sample_windows(tokenizer, TEXT, samples=5, context=32)
    assert found.shape == (5, 32) and set(found[:, 0].tolist()) == {tokenizer.bos_token_id}
    assert found[0, 1:].tolist() == ids[:31]
    assert len(ids) - 31 - 4 < (len(ids) - 31) // 4 * 4 <= len(ids) - 31
    start = (len(ids) - 31) // 4 * 4
    assert found[-1, 1:].tolist() == ids[start : start + 31]
    assert len(sample_windows(tokenizer, TEXT, samples=10**6, context=32)) == len(ids) // 31


def test_a_text_of_less_than_a_window_is_refused(tokenizer: Any):
    with pytest.raises(InputError, match="has 1 token; expected at least 31"):
        sample_windows(tokenizer, "a", samples=5, context=32)


def test_what_linears_see_is_what_the_whole_model_gives_them(folder: Path, windows_BT: Tensor):
    """Statistics of the second layer, collected layer by layer, against hooks on the loaded model."""
    llama = llamarium.load(folder, dtype="float32", device="cpu")
    seen: dict[str, list[Tensor]] = {name: [] for name in LINEARS_BY_INPUT}
    layer: Any = llama.model.model.layers[1]
    for name, inputs in seen.items():
        layer.get_submodule(name).register_forward_pre_hook(lambda _, x, inputs=inputs: inputs.append(x[0]))
    with torch.no_grad():
        llama.model(windows_BT)
    positions_1T = torch.arange(windows_BT.shape[1]).unsqueeze(0)
    trunk = llama.model.model
    rotary = trunk.rotary_emb(positions_1T, torch.float32)
    with torch.no_grad():
        first_BTD = run_layer(trunk.layers[0], trunk.embed_tokens(windows_BT), rotary, attend=CausalAttend())  # pyright: ignore
        for wants_gram in (False, True):
            statistics = InputStatistics(wants_gram=wants_gram)
            run_layer(trunk.layers[1], first_BTD, rotary, statistics, attend=CausalAttend())  # pyright: ignore
            for first, names in LINEARS_BY_INPUT.items():
                x_MD = seen[first][0].flatten(0, 1)
                expected = x_MD.T @ x_MD / len(x_MD) if wants_gram else x_MD.square().mean(0)
                for name in names:
                    torch.testing.assert_close(statistics.of(name), expected, rtol=1e-4, atol=1e-5)


def test_a_sample_is_seen_within_the_models_window(folder: Path, windows_BT: Tensor):
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5}
    (folder / "config.json").write_text(json.dumps(raw))
    reference_BTD = quantizer(folder, "gptq", windows_BT, num_compared=2).reference()
    model = llamarium.load(folder, dtype="float32", device="cpu").model
    positions_1T = torch.arange(windows_BT.shape[1]).unsqueeze(0)
    with torch.no_grad():
        windowed, whole = (model.model(windows_BT[:2], positions_1T, CausalAttend(window=w)) for w in (5, None))
    torch.testing.assert_close(reference_BTD, windowed, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole, windowed, atol=1e-2), "a window without effect shows nothing"


# --- the methods ------------------------------------------------------------------------------------------------------


def total_output_error(folder: Path, made: CalibratedQuantizer, windows_BT: Tensor) -> float:
    """The share of the Linears' outputs that is wrong on the sample, each Linear by itself, the mean of all."""
    original = llamarium.load(folder, dtype="float32", device="cpu").model
    grams: dict[str, Tensor] = {}

    def note(name: str, x_BTD: Tensor) -> None:
        grams[name] = x_BTD.flatten(0, 1).T @ x_BTD.flatten(0, 1)

    model = made.model(None)
    names = [name for name, module in model.named_modules() if isinstance(module, LinearPacked)]
    for name in names:
        original.get_submodule(name).register_forward_pre_hook(lambda _, x, name=name: note(name, x[0]))
    with torch.no_grad():
        original(windows_BT)
    errors = [
        output_error(original.get_submodule(name).weight, model.get_submodule(name), grams[name])  # pyright: ignore
        for name in names
    ]
    assert len(errors) == 14
    return sum(errors) / len(errors)


def test_each_method_is_better_than_the_one_before(folder: Path, windows_BT: Tensor):
    errors = [total_output_error(folder, quantizer(folder, method, windows_BT), windows_BT) for method in METHODS]
    nearest, fitted, weighted, fed_back = errors
    assert fed_back < 0.9 * weighted < weighted < fitted < 0.95 * nearest


def test_a_layer_is_fitted_to_what_the_quantized_ones_before_it_put_out(folder: Path, windows_BT: Tensor):
    model = quantizer(folder, "importance", windows_BT).model(None)
    seen: list[Tensor] = []
    layer: Any = model.model.layers[1]
    layer.self_attn.q_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    positions_1T = torch.arange(windows_BT.shape[1]).unsqueeze(0)
    with torch.no_grad():
        model.model(windows_BT, positions_1T, CausalAttend())
    weight = read(open_checkpoint(folder), "model.layers.1.self_attn.q_proj.weight").numpy()
    expected = fit(weight, PACKED_FORMATS["Q4_0"], importance=seen[0].square().mean(dim=(0, 1)).numpy())
    same = (expected == layer.self_attn.q_proj.weight.numpy()).mean()
    assert same > 0.99  # sums in another order may move a scale's last bit
    original = llamarium.load(folder, dtype="float32", device="cpu").model
    original.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0]))  # pyright: ignore
    with torch.no_grad():
        original(windows_BT)
    other = fit(weight, PACKED_FORMATS["Q4_0"], importance=seen[1].square().mean(dim=(0, 1)).numpy())
    assert (other == layer.self_attn.q_proj.weight.numpy()).mean() < same


def test_layers_are_made_when_they_are_read_and_kept_no_longer(folder: Path):
    made = quantizer(folder, "fit", None)
    weights = {weight.key: weight for weight in made.weights("Q8_0")}
    assert list(weights)[-1] == "model.embed_tokens.weight"
    kept: Any = made._tiles  # pyright: ignore[reportPrivateUsage]
    for key in [key for key in weights if "layers.0" in key and "_proj" in key]:
        assert weights[key].read().dtype == np.uint8
    assert not kept
    weights["model.layers.1.mlp.down_proj.weight"].read()
    assert len(kept) == 6


@pytest.mark.parametrize("type", LAYERS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_holds_what_was_measured(
    folder: Path, windows_BT: Tensor, tmp_path: Path, type: str, tied: bool, model_files: Callable[..., Any]
):
    if not tied:
        folder = model_files(tie_word_embeddings=False, hidden_size=64, intermediate_size=128, head_dim=8).huggingface()
    made = llamarium.quantize(folder, tmp_path / "out", type=type, method="nearest")
    assert (made.type, made.head, made.method) == (type, "Q8_0", "nearest")
    loaded = llamarium.load(tmp_path / "out", device="cpu")
    expected = quantizer(folder, "nearest", None, type).model("Q8_0")
    ids_BT = windows_BT % 256
    with torch.no_grad():
        logits_BTV, expected_BTV = loaded.model(ids_BT).float(), expected(ids_BT)
    assert (logits_BTV - expected_BTV).norm() < 0.1 * expected_BTV.norm()  # bfloat16, against float32
    for name, module in expected.named_modules():
        if isinstance(module, LinearPacked):
            assert torch.equal(loaded.model.get_submodule(name).weight, module.weight), name  # pyright: ignore


# --- the head ---------------------------------------------------------------------------------------------------------


def test_the_head_is_the_smallest_type_that_adds_little(folder: Path, windows_BT: Tensor, monkeypatch: Any):
    made = quantizer(folder, "fit", windows_BT, num_compared=4)
    name, kl = choose_head(made, windows_BT[:4])
    limit = (1 + HEAD_SHARE) * kl[None]
    assert kl[name] <= limit or name == "Q8_0"
    assert all(value > limit for other, value in kl.items() if other not in (None, name))
    monkeypatch.setattr("llamarium.calibration.calibrated.HEAD_SHARE", 1000.0)
    assert choose_head(made, windows_BT[:4])[0] == "Q4_0"
    monkeypatch.setattr("llamarium.calibration.calibrated.HEAD_SHARE", -1.0)
    worst = choose_head(made, windows_BT[:4])
    assert worst[0] == min(LAYERS, key=lambda name: worst[1][name])


def test_its_measure_is_the_divergence_from_the_original(folder: Path, windows_BT: Tensor):
    made = quantizer(folder, "fit", windows_BT, num_compared=4)
    _, kl = choose_head(made, windows_BT[:4])
    original, model = llamarium.load(folder, dtype="float32", device="cpu").model, made.model(None)
    with torch.no_grad():
        p_MV, q_MV = (m(windows_BT[:4]).flatten(0, 1).log_softmax(-1) for m in (original, model))
    assert kl[None] == pytest.approx(float((p_MV.exp() * (p_MV - q_MV)).sum(-1).mean()), rel=1e-4)


# --- divergence -------------------------------------------------------------------------------------------------------


def logs(rows: list[list[float]]) -> Any:
    return torch.tensor(rows).log().numpy()


def test_kl_is_its_definition():
    p, q = [0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.5, 0.0]
    expected = 0.5 * torch.log(torch.tensor(2.0)) + 0.25 * torch.log(torch.tensor(0.5))
    assert kl_of_rows(logs([p]), logs([q])).item() == pytest.approx(float(expected))
    assert kl_of_rows(logs([p]), logs([p])).item() == 0.0
    assert kl_of_rows(logs([[0.5, 0.5]]), logs([[1.0, 0.0]])).item() == float("inf")


def test_divergence_against_a_loop_over_tokens(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every number by hand, in float64, from whole logits; chunks of rows change nothing."""
    llamarium.quantize(folder, tmp_path / "out", type="Q4_0", method="nearest")
    model = llamarium.load(tmp_path / "out", dequantize="load", dtype="float32", device="cpu")
    against = llamarium.load(folder, dtype="float32", device="cpu")
    text = TEXT[:150]
    ids_1T = torch.tensor([against.tokenizer.encode(text)])
    with torch.no_grad():
        p_TV, q_TV = (m.model(ids_1T)[0, :-1].double().log_softmax(-1) for m in (against, model))
    rows = zip(p_TV.tolist(), q_TV.tolist(), strict=True)
    kl = [sum(math.exp(a) * (a - b) for a, b in zip(p_V, q_V, strict=True)) for p_V, q_V in rows]
    found = model.divergence(text, against=against)
    mean = sum(kl) / len(kl)
    assert found.kl == pytest.approx(mean, rel=1e-4) and mean > 1e-3
    deviation = (sum((value - mean) ** 2 for value in kl) / (len(kl) - 1)) ** 0.5
    assert found.kl_error == pytest.approx(deviation / len(kl) ** 0.5, rel=1e-4)
    assert found.kl_percentile == pytest.approx(sorted(kl)[-(-99 * len(kl) // 100) - 1], rel=1e-4)
    assert found.same_top == pytest.approx(float((p_TV.argmax(-1) == q_TV.argmax(-1)).double().mean()))
    assert found.model.perplexity == pytest.approx(model.perplexity(text).perplexity, rel=1e-5)
    assert found.against.perplexity == pytest.approx(against.perplexity(text).perplexity, rel=1e-5)
    monkeypatch.setattr(forward, "CHUNK_BYTES", 4 * 4 * against.config.vocab_size)
    assert model.divergence(text, against=against).kl == pytest.approx(found.kl, rel=1e-5)
    windowed = model.divergence(text, against=against, context=16, stride=8)
    assert windowed.model.num_tokens == len(kl) and windowed.kl != found.kl


def test_other_vocabularies_are_refused(folder: Path, model_files: Callable[..., Any], tokenizer: Any):
    llama = llamarium.load(folder, device="cpu")
    other = llamarium.load("shakespeare-char", device="cpu")
    with pytest.raises(InputError, match="different vocabularies and cannot be compared: 280 and 65 tokens"):
        llama.divergence(TEXT, against=other)
    words = train_bpe([TEXT.upper()], 280)
    files = model_files(
        vocab_size=280, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_ids, max_position_embeddings=256
    )
    path = files.huggingface()
    words.save(path)
    with pytest.raises(InputError, match=r"token \d+ is "):
        llama.divergence(TEXT, against=llamarium.load(path, device="cpu"))


# --- the shell --------------------------------------------------------------------------------------------------------


def test_from_the_shell(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, out = tmp_path / "text.txt", tmp_path / "out"
    file.write_text(TEXT)
    words = ["quantize", "-m", str(folder), "--out", str(out), "--calibration", str(file), "--context", "64"]
    assert main([*words, "--samples", "8", "--type", "Q4_0", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["type"], found["method"], found["path"]) == ("Q4_0", "gptq", str(out))
    assert found["head"] in LAYERS and f"wrote {out}" in shown.err and "perplexity FILE" in shown.err
    num_bits = {"Q4_0": 4.5, "IQ4_NL": 4.5, "Q4_1": 5, "Q8_0": 8.5}
    table, layers = 280 * 64, found["num_weights"] - 280 * 64
    bits = 4.5 * layers + num_bits[found["head"]] * table
    assert found["bits_per_weight"] == pytest.approx(bits / (layers + table))
    words = ["perplexity", str(file), "-m", str(out), "--against", str(folder), "--device", "cpu", "--context", "64"]
    assert main([*words, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["against"] == str(folder) and 0 < compared["kl"] < compared["kl_percentile_99"]
    assert main(words) == 0
    assert "KL(other || this)" in capsys.readouterr().out
    assert main(["quantize", "-m", str(folder), "--out", str(out)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--method", "gptq"], "--method gptq looks at a text"),
        (["--head", "auto"], "--head auto is measured on a text"),
        (["--samples", "4"], "--samples is for --calibration"),
        (["--type", "q5"], "'q5'; expected one of Q4_0, IQ4_NL, Q4_1, Q8_0"),
    ],
)
def test_options_that_do_not_fit_together(options: list[str], what: str, capsys: pytest.CaptureFixture[str]):
    assert main(["quantize", "-m", "nothing", "--out", "nowhere", *options]) == 2
    assert what in capsys.readouterr().err


def test_options_without_effect_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(OptionError, match="has no effect with method fit and head Q8_0"):
        llamarium.quantize(folder, tmp_path / "out", method="fit", head="Q8_0", calibration=TEXT)
    with pytest.raises(OptionError, match="method importance looks at a text"):
        llamarium.quantize(folder, tmp_path / "out", method="importance")
    for wrong, what in (({"type": "q5"}, "type is"), ({"head": "q3"}, "head is"), ({"method": "awq"}, "method is")):
        with pytest.raises(OptionError, match=what):
            llamarium.quantize(folder, tmp_path / "out", **wrong)  # pyright: ignore
    with pytest.raises(InputError, match="samples is 0"):
        llamarium.quantize(folder, tmp_path / "out", calibration=TEXT, samples=0)
    with pytest.raises(InputError, match="context is 257"):
        llamarium.quantize(folder, tmp_path / "out", calibration=TEXT, context=257)
    assert not (tmp_path / "out").exists()


def test_what_is_quantized_is_quantized_again_only_when_asked(
    model_files: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whatever command, in the same words."""
    path = model_files(tie_word_embeddings=True).gguf_file("Q4_0")
    out, source = ["--out", str(tmp_path / "out.gguf")], ["-m", str(path)]
    why = f"llamarium: error: {path}: is quantized already (Q4_0), and rounding again adds its error to that one; take "
    for words, consent in (
        (["quantize", *source, *out], "--requantize (requantize=True)"),
        (
            ["export", *source, *out, "--format", "gguf", "--type", "Q8_0", "--no-tokenizer"],
            "--requantize (requantize=True)",
        ),
        (["next", "x", *source, "--quantize", "q4_1"], "--dequantize load (dequantize='load')"),
        (["serve", *source, "--quantize", "nf4", "--port", "0"], "--dequantize load (dequantize='load')"),
    ):
        assert main(words) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"{why}the original model, or give {consent}"
    exported = llamarium.export(
        path, tmp_path / "out.gguf", format="gguf", type="Q8_0", requantize=True, with_tokenizer=False
    )
    assert llamarium.load(exported, quantize="nf4", dequantize="load", device="cpu").sources[0].stored_dtype == "Q8_0"
    assert llamarium.quantize(path, tmp_path / "out", requantize=True).bits_per_weight > 4.5
    with pytest.raises(OutputError, match="exists already"):
        llamarium.quantize(path, tmp_path / "out", requantize=True)


@pytest.mark.parametrize("calibration", [None, TEXT])
def test_a_matrix_that_does_not_fit_stays_in_f16(
    model_files: Callable[..., Any], tokenizer: Any, tmp_path: Path, calibration: str | None
) -> None:
    files = model_files(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_ids,
        hidden_size=48,
        head_dim=8,
        intermediate_size=64,
        dtype=torch.float32,
    )
    files.weights = {key: weight * 4 if weight.ndim == 2 else 1 + weight for key, weight in files.weights.items()}
    folder = files.huggingface()
    tokenizer.save(folder)
    layers: list[tuple[int, int]] = []
    options: dict[str, Any] = {} if calibration is None else {"calibration": calibration, "context": 16, "samples": 2}
    with pytest.warns(UserWarning, match=r"matrices stay in F16, such as .* with 48 columns"):
        made = llamarium.quantize(
            folder, tmp_path / "out", type="Q8_0", layer_done=lambda *done: layers.append(done), **options
        )
    assert made.head == "F16"
    checkpoint = open_checkpoint(made.path)
    num_layers = checkpoint.config.num_hidden_layers
    assert layers == [(i + 1, num_layers) for i in range(num_layers)]
    types = {key: entry.dtype for key, entry in checkpoint.entries.items() if len(entry.shape) == 2}
    fits = {key for key in types if key.endswith(("o_proj.weight", "down_proj.weight"))}
    assert {key for key, type in types.items() if type == "Q8_0"} == fits
    assert {type for key, type in types.items() if key not in fits} == {"F16"}
    before, after = llamarium.load(folder, dtype="float32", device="cpu"), llamarium.load(made.path, device="cpu")
    assert after.runner.__class__.__name__ == "NativeRunner" or native.library() is None
    kl = after.divergence(TEXT[:400], against=before, context=32).kl
    assert 0 < kl < 1e-3, "Q8_0 and F16 lose little"


def test_without_a_terminal_each_layer_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "-m", str(folder), "--out", str(tmp_path / "out")]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quantized layer")]
    count = llamarium.load(folder, device="cpu").config.num_hidden_layers
    assert [line.split()[2:5] for line in told] == [[str(i + 1), "of", str(count)] for i in range(count)]


def test_bad_weights_are_named(model_files: Callable[..., Any], tmp_path: Path):
    files = model_files()
    files.weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    with pytest.raises(llamarium.LlamariumError, match=r"layers\.1\.mlp\.up_proj\.weight: 1 weights are NaN"):
        llamarium.quantize(files.huggingface(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_norms_are_named_and_nothing_is_written(model_files: Callable[..., Any], tmp_path: Path):
    files = model_files(hidden_size=64, intermediate_size=128, head_dim=8)
    files.weights["model.norm.weight"][3] = math.nan
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: 1 weights are NaN or infinite"):
        llamarium.quantize(files.huggingface(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_replaced_when_asked(folder: Path, tmp_path: Path):
    for type in ("Q8_0", "Q4_0"):
        assert main(["quantize", "-m", str(folder), "--out", str(tmp_path / "out"), "--type", type, "--force"]) == 0
    assert {"Q4_0", "Q8_0"} == {entry.dtype for entry in open_checkpoint(tmp_path / "out").entries.values()} - {
        "BF16",
        "F32",
    }


def test_a_packed_folder_without_its_weights_says_so(folder: Path, tmp_path: Path):
    made = llamarium.quantize(folder, tmp_path / "out", method="nearest")
    (made.path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        open_checkpoint(made.path)


# --- without PyTorch --------------------------------------------------------------------------------------------------

LIGHT = """
import sys
sys.modules["torch"] = None
import llamarium
from llamarium.errors import OptionError
folder, out = sys.argv[1:]
made = llamarium.quantize(folder, out + "/fitted", type="Q4_1")
again = llamarium.quantize(made.path, out + "/again", type="iq4_nl", method="nearest", requantize=True)
print(made.method, again.head, llamarium.load(again.path).generate([5], max_tokens=3).completions[0].finish_reason)
for call in (
    lambda: llamarium.quantize(folder, out + "/gptq", calibration="a text"),
    lambda: llamarium.pretrain(out + "/run"),
    lambda: llamarium.finetune(out + "/run", data="missing.jsonl"),
    lambda: llamarium.dpo(out + "/run", data="missing.jsonl"),
    lambda: llamarium.merge(out + "/adapter", out + "/merged"),
):
    try:
        call()
    except OptionError as error:
        print(error)
"""


def test_without_pytorch_it_quantizes_and_names_the_extra_for_the_rest(folder: Path, tmp_path: Path):
    command = [sys.executable, "-c", LIGHT, str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    worked, *refused = done.stdout.splitlines()
    assert worked == "fit Q8_0 length"
    torch, train = "'llamarium[torch]'", "'llamarium[train]'"
    assert [line.rpartition("pip install ")[2] for line in refused] == [torch, train, train, train, torch]
    assert not (tmp_path / "run").exists() and not (tmp_path / "merged").exists()
