"""Writing models: Hugging Face folders and GGUF files, their refusals, and the command."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llamarium
from llamarium.attention import CausalAttend
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.export import checkpoint_weights
from llamarium.checkpoints.gguf.export import export_gguf, permute, rope_factors
from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.checkpoints.huggingface.reader import HuggingFaceCheckpoint
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.save import model_weights, save_model, tensor_weight
from llamarium.checkpoints.storage import unpermute
from llamarium.cli import export as command
from llamarium.cli.main import main
from llamarium.errors import CheckpointError, LlamariumError, OptionError, OutputError, UnsupportedTokenizerError
from llamarium.io import atomic_folder
from llamarium.kernels import native
from llamarium.model import LlamaForCausalLM
from llamarium.options.loading import LoadOptions
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.load import load_tokenizer_file
from llamarium.train.data.bpe import train_bpe
from swapping import quantize_linears

pytestmark = pytest.mark.torch

IDS = torch.arange(20).view(2, 10) * 37 % 256
TEXTS = ["Once upon a time there was a llama, 1234 llamas. It's écrit: ça va?\n\n  Yes; yes!"] * 20


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS, 280)


def loaded(path: Path, **options: Any) -> LlamaForCausalLM:
    return load_model(open_checkpoint(path), LoadOptions(device="cpu", **options))[0]


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_model_comes_back(
    dtype: torch.dtype, tied: bool, model_files: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the kernels, so that the modules are loaded one by one."""
    monkeypatch.setattr("llamarium.kernels.native.library", lambda: None)
    model = loaded(model_files(dtype=dtype, tie_word_embeddings=tied).huggingface())
    save_model(model, tmp_path / "out")
    checkpoint = HuggingFaceCheckpoint(tmp_path / "out")
    assert checkpoint.config == model.config and ("lm_head.weight" in checkpoint.entries) is not tied
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["dtype"] == raw["torch_dtype"] == str(dtype)[6:]
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
    }
    again, _ = load_model(checkpoint, LoadOptions(device="cpu"))
    assert again.dtype == dtype and torch.equal(again(IDS), model(IDS))
    umask = os.umask(0o022)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} <= {0o644, 0o666 & ~umask}


def test_shards(model_files: Callable[..., Any], tmp_path: Path) -> None:
    model = loaded(model_files().huggingface())
    save_model(model, tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2 and files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert index["metadata"]["total_size"] == sum(2 * p.numel() for p in model.parameters())
    for path in files:
        header = path.read_bytes()[8:]
        assert json.JSONDecoder().raw_decode(header[: header.index(b"}}") + 2].decode())[0]["__metadata__"] == {
            "format": "pt"
        }
    assert torch.equal(loaded(tmp_path / "out")(IDS), model(IDS))


@pytest.mark.parametrize("method", ["NF4", "Q8_0", "Q4_1"])
def test_a_quantized_model_is_unpacked_when_asked(method: Any, model_files: Callable[..., Any], tmp_path: Path) -> None:
    model = loaded(model_files(dtype=torch.float32).huggingface())
    quantize_linears(model, method)
    with pytest.raises(OptionError, match=r"q_proj.weight is quantized"):
        save_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_model(model, tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(loaded(tmp_path / "out")(IDS), model(IDS), rtol=1e-5, atol=1e-5)


def test_a_packed_gguf_is_unpacked_head_and_all(model_files: Callable[..., Any], tmp_path: Path) -> None:
    model = loaded(model_files().gguf_file("Q4_0"), dequantize="use", dtype="float32")
    save_model(model, tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(loaded(tmp_path / "out")(IDS), model(IDS), rtol=1e-5, atol=1e-5)


def test_what_is_no_plain_llama_is_refused(model_files: Callable[..., Any], tmp_path: Path) -> None:
    model = loaded(model_files(dtype=torch.float32).huggingface())
    head = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(head.clone())
    with pytest.raises(CheckpointError, match="tie_word_embeddings true"):
        save_model(model, tmp_path / "out")
    model.lm_head.weight = head
    big = model.model.layers[0].mlp.down_proj.weight
    with pytest.raises(CheckpointError, match=r"down_proj.weight: 1 value does not fit float16"):
        big.data[0, 0] = 70000.0
        save_model(model, tmp_path / "out", dtype=torch.float16)
    model.model.layers[1].self_attn.q_proj.lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"1 modules .*q_proj.lora_A; merge"):
        save_model(model, tmp_path / "out")
    with pytest.raises(OptionError, match="dtype"):
        save_model(model, tmp_path / "out", dtype=torch.int8)
    assert not (tmp_path / "out/config.json").exists()


def test_a_folder_with_a_model_is_refused(model_files: Callable[..., Any], tmp_path: Path) -> None:
    files = model_files()
    model, folder = loaded(files.huggingface()), files.huggingface(shards=2)
    with pytest.raises(OutputError, match=r"already holds config\.json"):
        save_model(model, folder)
    for name in ("added_tokens.json", "quantize_config.json", "pytorch_model.bin", "params.json"):  # which readers open
        old = tmp_path / name.partition(".")[0]
        old.mkdir()
        (old / name).write_text("{}")
        with pytest.raises(OutputError, match=f"already holds {name}"):
            save_model(model, old)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        save_model(model, tmp_path / "file")
    with pytest.raises(CheckpointError, match="300 ids and the model 256 rows"):
        save_model(model, tmp_path / "new", tokenizer=CharacterTokenizer.from_text("".join(map(chr, range(300)))))


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_folder(target, replace=False) as folder:
        (folder / "config.json").write_text("1")
    with pytest.raises(OutputError, match="--force"), atomic_folder(target, replace=False):
        raise AssertionError
    with pytest.raises(ZeroDivisionError), atomic_folder(target, replace=True) as folder:
        (folder / "config.json").write_text("2")
        raise ZeroDivisionError
    assert (target / "config.json").read_text() == "1"
    with atomic_folder(target, replace=True) as folder:
        (folder / "config.json").write_text("3")
    assert (target / "config.json").read_text() == "3" and list(tmp_path.iterdir()) == [target]
    (target / "thesis.txt").write_text("")
    with pytest.raises(OutputError, match=r"thesis\.txt"), atomic_folder(target, replace=True):
        raise AssertionError


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_gives_the_same_logits(
    type_name: str, tied: bool, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    held = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
    model = loaded(model_files(dtype=held, tie_word_embeddings=tied).huggingface(), dtype="float32")
    export_gguf(tmp_path / "m.gguf", model_weights(model), model.config, type_name=type_name, name="m")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.config == model.config
    assert {e.dtype for e in checkpoint.entries.values() if len(e.shape) == 2} == {type_name}
    assert {e.dtype for e in checkpoint.entries.values() if len(e.shape) == 1} == {"F32"}
    again, _ = load_model(checkpoint, LoadOptions(device="cpu", dtype="float32"))
    assert torch.equal(again(IDS), model(IDS))


def test_a_gguf_keeps_a_window_that_llama_cpp_does_not_compute_and_it_is_said(
    model_files: Callable[..., Any], tmp_path: Path
) -> None:
    model = loaded(model_files(dtype=torch.float32, sliding_window=7).huggingface(), dtype="float32")
    assert model.config.sliding_window == 7
    with pytest.warns(UserWarning, match=r"window of 7 tokens.*llama\.cpp"):
        export_gguf(tmp_path / "m.gguf", model_weights(model), model.config, type_name="F32", name="m")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.metadata["llama.attention.sliding_window"] == 7 and checkpoint.config == model.config
    again, _ = load_model(checkpoint, LoadOptions(device="cpu", dtype="float32"))
    ids = torch.arange(1, 31).unsqueeze(0)
    assert torch.equal(again(ids), model(ids))
    assert not torch.allclose(model(ids, attend=CausalAttend()), model(ids)), "a window without effect shows nothing"


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_blocks(type_name: str, tied: bool, model_files: Callable[..., Any], tmp_path: Path) -> None:
    files = model_files(dtype=torch.float32, tie_word_embeddings=tied)
    weights = [tensor_weight(key, tensor) for key, tensor in files.weights.items()]
    export_gguf(tmp_path / "m.gguf", weights, files.config, type_name=type_name, name="m")
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    kinds = {key: entry.dtype for key, entry in checkpoint.entries.items() if len(entry.shape) == 2}
    assert kinds.pop(head) == "Q8_0" and set(kinds.values()) == {type_name}
    for key, tensor in files.weights.items():
        assert (read(checkpoint, key) - tensor).abs().max() < (0.002 if type_name == "Q8_0" else 0.03)


def test_short_rows_stay_f16_and_it_is_said(model_files: Callable[..., Any], tmp_path: Path) -> None:
    files = model_files(dtype=torch.float32, intermediate_size=40)
    weights = [tensor_weight(key, tensor) for key, tensor in files.weights.items()]
    with pytest.warns(UserWarning, match=r"2 matrices, such as blk.0.ffn_down.weight, are written as F16"):
        export_gguf(tmp_path / "m.gguf", weights, files.config, type_name="Q8_0", name="m")
    assert GGUFCheckpoint(tmp_path / "m.gguf").entries["model.layers.1.mlp.down_proj.weight"].dtype == "F16"


def kinds_of(path: Path) -> dict[str, str]:
    return {name: tensor.type_name for name, tensor in read_gguf(path).tensors.items() if len(tensor.shape) == 2}


@pytest.mark.parametrize(("type_name", "number"), [("Q4_K_M", 15), ("Q5_K_M", 17), ("Q4_K", 15), ("Q5_K", 17)])
def test_a_mixture_gives_half_of_two_projections_more_bits(
    type_name: str, number: int, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    """With 8 layers: the first, the last, and every third between; and the head."""
    files = model_files(dtype=torch.float32, hidden_size=256, intermediate_size=256, num_hidden_layers=8, head_dim=64)
    weights = [tensor_weight(key, tensor) for key, tensor in files.weights.items()]
    export_gguf(tmp_path / "m.gguf", weights, files.config, type_name=type_name, name="m")
    assert read_gguf(tmp_path / "m.gguf").metadata["general.file_type"] == number
    kinds = kinds_of(tmp_path / "m.gguf")
    better = {f"blk.{layer}.{part}.weight" for layer in (0, 3, 6, 7) for part in ("attn_v", "ffn_down")}
    assert {name for name, kind in kinds.items() if kind == "Q6_K"} == better | {"token_embd.weight"}
    assert {kind for name, kind in kinds.items() if name not in better} == {"Q6_K", type_name[:4]}
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    for key, tensor in files.weights.items():
        assert (read(checkpoint, key) - tensor).square().mean().sqrt() <= 0.08 * tensor.square().mean().sqrt(), key


def test_rows_too_short_for_256_get_smaller_blocks_and_it_is_said(
    model_files: Callable[..., Any], tmp_path: Path
) -> None:
    files = model_files(dtype=torch.float32, hidden_size=64, intermediate_size=256)
    weights = [tensor_weight(key, tensor) for key, tensor in files.weights.items()]
    for type_name, short, whole in (("Q4_K_S", "Q5_0", "Q4_K"), ("Q5_K_S", "Q5_1", "Q5_K"), ("Q6_K", "Q8_0", "Q6_K")):
        with pytest.warns(UserWarning, match=rf"are written as {short}: .* {whole}'s blocks of 256"):
            export_gguf(tmp_path / "m.gguf", weights, files.config, type_name=type_name, name="m")
        kinds = kinds_of(tmp_path / "m.gguf")
        assert (kinds["blk.1.attn_q.weight"], kinds["token_embd.weight"]) == (short, "Q8_0")
        assert kinds["blk.1.ffn_down.weight"] == whole


def test_permuting_is_undone(model_files: Callable[..., Any]) -> None:
    rows = np.arange(32 * 3).reshape(32, 3)
    assert not np.array_equal(permute(rows, 4), rows)
    assert np.array_equal(unpermute(permute(rows, 4), 4), rows)


def test_the_rope_factors_are_llama_cpps(model_files: Callable[..., Any]) -> None:
    files = model_files(head_dim=64)
    from gguf import GGUFReader

    scaling = files.config.rope_scaling
    reader = GGUFReader(files.gguf_file())  # the fixture computes them one by one, as llama.cpp's converter does
    expected = torch.tensor(next(t.data for t in reader.tensors if t.name == "rope_freqs.weight"))
    factors = rope_factors(files.config, scaling)
    torch.testing.assert_close(torch.from_numpy(factors), expected, rtol=1e-6, atol=0)
    assert (factors.min(), factors.max()) == (1.0, 32.0)


def test_a_tokenizer_goes_along(bpe: Tokenizer, model_files: Callable[..., Any], tmp_path: Path) -> None:
    files = model_files(dtype=torch.float32, vocab_size=288, bos_token_id=278, eos_token_id=(279,))
    bpe = bpe.with_chat_template("{{ messages[0].content }}")
    weights = [tensor_weight(key, tensor) for key, tensor in files.weights.items()]
    export_gguf(tmp_path / "m.gguf", weights, files.config, type_name="F32", name="llama ä", tokenizer=bpe)
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    assert metadata["general.name"] == "llama ä" and metadata["general.file_type"] == 0
    assert metadata["tokenizer.ggml.pre"] == "llama-bpe" and metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.ggml.token_type"] == [1] * 278 + [3] * 2 + [5] * 8
    again = llamarium.load(tmp_path / "m.gguf").tokenizer
    assert again.chat_template == bpe.chat_template and again.special_tokens == bpe.special_tokens
    for text in (*TEXTS[:1], "a llama 12345 ünïcødé 🦙\n\n\n x", "<|end_of_text|> [PAD281]", ""):
        assert again.encode(text) == bpe.encode(text)


def test_ends_of_an_instruction_model(
    llama3_tokenizer_path: Path, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer_file(llama3_tokenizer_path)
    files = model_files(vocab_size=128256, hidden_size=32, num_hidden_layers=1, intermediate_size=32,
                        bos_token_id=128000, eos_token_id=(128001, 128009, 128008))  # fmt: skip
    weights = [tensor_weight(key, tensor) for key, tensor in files.weights.items()]
    export_gguf(tmp_path / "m.gguf", weights, files.config, type_name="Q8_0", name="m", tokenizer=tokenizer)
    file = read_gguf(tmp_path / "m.gguf")
    found = {name: file.metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot", "eom")}
    assert found == {"bos": 128000, "eos": 128001, "eot": 128009, "eom": 128008}
    assert len(file.metadata["tokenizer.ggml.merges"]) >= 128_000 - 256  # one for each token of several bytes
    llama = llamarium.load(tmp_path / "m.gguf")
    assert set(llama.config.eos_token_id) == {128001, 128008, 128009}
    assert llama.tokenizer.encode("Llamas' 12345\n ünï") == tokenizer.encode("Llamas' 12345\n ünï")


def no_end(tokenizer: Tokenizer) -> Tokenizer:
    special = replace(tokenizer.special, eos=())
    return Tokenizer(tokenizer.backend, special, vocab_size=tokenizer.vocab_size, source="here")


def edited(tokenizer: Tokenizer, folder: Path, **changes: Any) -> Tokenizer:
    tokenizer.save(folder)
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(raw | changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_tokenizer_file(folder)


REFUSED: dict[str, tuple[Callable[[Tokenizer, Path], Tokenizer], str]] = {
    "no end": (lambda t, f: no_end(t), "no end-of-text token"),
    "GPT-2's cutter": (
        lambda t, f: edited(
            t,
            f,
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ),
        "has no name for its pre-tokenizer",
    ),
    "a normalizer": (lambda t, f: edited(t, f, normalizer={"type": "NFC"}), "normalizer"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tokenizer_that_gguf_cannot_say(
    kind: str, bpe: Tokenizer, model_files: Callable[..., Any], tmp_path: Path
) -> None:
    make, message = REFUSED[kind]
    files = model_files(vocab_size=288)
    tokenizer = make(bpe, tmp_path)
    with pytest.raises(UnsupportedTokenizerError, match=message + ".*--no-tokenizer"):
        export_gguf(tmp_path / "m.gguf", [], files.config, type_name="F32", name="m", tokenizer=tokenizer)
    assert not (tmp_path / "m.gguf").exists()


# --- the command ------------------------------------------------------------------------------------------------------


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def source(bpe: Tokenizer, model_files: Callable[..., Any], tmp_path: Path) -> Path:
    files = model_files(vocab_size=280, bos_token_id=278, eos_token_id=(279,))
    folder = files.huggingface()
    bpe.save(folder)
    return folder


def test_export_there_and_back(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-m", source, "--format", "gguf", "--out", tmp_path / "a.gguf") == 0
    assert run("-m", tmp_path / "a.gguf", "--format", "hf", "--out", tmp_path / "b", "--json") == 0
    printed = capsys.readouterr()
    assert "wrote" in printed.err
    assert json.loads(printed.out) == {
        "path": str(tmp_path / "b"),
        "format": "hf",
        "bytes": sum(path.stat().st_size for path in (tmp_path / "b").iterdir()),
        "tokenizer": True,
    }
    first, last = llamarium.load(source), llamarium.load(tmp_path / "b")
    assert first.config == last.config and torch.equal(first.model(IDS), last.model(IDS))
    assert last.model.dtype == torch.bfloat16
    assert (
        first.generate("a llama", temperature=0.0, max_new_tokens=5).text
        == last.generate("a llama", temperature=0.0, max_new_tokens=5).text
    )


def test_a_link_that_leads_nowhere_is_replaced_by_force_alone(model_files: Callable[..., Any], tmp_path: Path) -> None:
    folder, out = model_files().huggingface(), tmp_path / "a.gguf"
    out.symlink_to(tmp_path / "nowhere")
    words = ["export", "-m", str(folder), "--format", "gguf", "--out", str(out), "--no-tokenizer"]
    assert main(words) == 1 and out.is_symlink()
    assert main([*words, "--force"]) == 0 and out.is_file() and not out.is_symlink()


def test_norms_keep_their_precision(model_files: Callable[..., Any], tmp_path: Path) -> None:
    folder = model_files(dtype=torch.float32).huggingface()
    run("-m", folder, "--format", "gguf", "--out", tmp_path / "a.gguf", "--type", "F16", "--no-tokenizer")
    ours, theirs = HuggingFaceCheckpoint(folder), GGUFCheckpoint(tmp_path / "a.gguf")
    assert torch.equal(read(ours, "model.norm.weight"), read(theirs, "model.norm.weight"))


@pytest.mark.parametrize("words", [["--format", "hf", "--type", "BF16"], ["--format", "gguf"]])
def test_weights_that_are_no_numbers_are_told(
    words: list[str], model_files: Callable[..., Any], tmp_path: Path
) -> None:
    model = loaded(model_files().huggingface())
    with torch.no_grad():
        model.model.norm.weight[:2] = torch.tensor([float("nan"), float("inf")])
    save_model(model, tmp_path / "model")
    out = str(tmp_path / "out.gguf")
    with pytest.warns(UserWarning, match="model.norm.weight has 2 weights that are NaN or infinite"):
        run("-m", tmp_path / "model", *words, "--no-tokenizer", "--out", out)


def test_an_existing_target_needs_force(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="--force"):
        run("-m", source, "--format", "hf", "--out", source)
    before = llamarium.load(source).model(IDS)
    run("-m", source, "--format", "hf", "--out", source, "--force", "--type", "F32")
    assert torch.equal(llamarium.load(source, dtype="bfloat16").model(IDS), before)
    for force, fails in (([], False), ([], True), (["--force"], False)):
        words = ("-m", source, "--format", "gguf", "--out", tmp_path / "a.gguf", *force)
        if fails:
            with pytest.raises(OutputError, match="--force"):
                run(*words)
        else:
            run(*words)
    run("-m", tmp_path / "a.gguf", "--format", "gguf", "--out", tmp_path / "a.gguf", "--force", "--type", "Q8_0")
    run("-m", tmp_path / "a.gguf", "--format", "hf", "--out", tmp_path / "c")
    assert {entry.dtype for entry in open_checkpoint(tmp_path / "c").entries.values()} == {"BF16"}
    with pytest.raises(OutputError, match="folder"):
        run("-m", source, "--format", "gguf", "--out", (tmp_path / "d.gguf").mkdir() or tmp_path / "d.gguf", "--force")


def test_a_model_without_a_tokenizer(model_files: Callable[..., Any], tmp_path: Path) -> None:
    folder = model_files().huggingface()
    with pytest.raises(OptionError, match="--no-tokenizer"):
        run("-m", folder, "--format", "gguf", "--out", tmp_path / "a.gguf")
    run("-m", folder, "--format", "gguf", "--out", tmp_path / "a.gguf", "--no-tokenizer")
    llama = llamarium.load(tmp_path / "a.gguf")
    assert torch.equal(llama.model(IDS), llamarium.load(folder).model(IDS))
    with pytest.raises(LlamariumError, match="no tokenizer"):
        llama.tokenizer.encode("a")


def test_words_that_do_not_fit_together(tmp_path: Path) -> None:
    from llamarium.cli.options import UsageError

    with pytest.raises(UsageError, match="Q4_0 is for --format gguf"):
        run("-m", "x", "--format", "hf", "--out", tmp_path, "--type", "Q4_0")
    with pytest.raises(UsageError, match=r"ends in \.gguf"):
        run("-m", "x", "--format", "gguf", "--out", tmp_path / "a.bin")


def test_a_full_disk_leaves_the_old_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_files: Callable[..., Any]
) -> None:
    run("-m", source, "--format", "gguf", "--out", tmp_path / "a.gguf")
    before = (tmp_path / "a.gguf").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for words in (("gguf", tmp_path / "a.gguf"), ("hf", source)):
        with pytest.raises(OutputError, match="No space left"):
            run("-m", source, "--format", words[0], "--out", words[1], "--force")
    monkeypatch.undo()
    assert (tmp_path / "a.gguf").read_bytes() == before
    llamarium.load(source)
    assert not list(tmp_path.rglob(".*"))


def test_a_failed_exchange_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    true = Path.rename

    def fails(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return true(self, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OutputError, match="No space left"), atomic_folder(target, replace=True) as folder:
        (folder / "config.json").write_text("new")
    assert (target / "config.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from llamarium.checkpoints.export import export
source, out, *wanted = sys.argv[1:]
for i, (format, type) in enumerate(zip(wanted[::2], wanted[1::2])):
    path = f"{out}/{i}.gguf" if format == "gguf" else f"{out}/{i}"
    export(source, path, format=format, type=type, requantize=True, with_tokenizer=False)
"""


@pytest.mark.skipif(not native.library(), reason="packed folders are read without torch by the kernels alone")
def test_export_needs_no_torch(model_files: Callable[..., Any], tmp_path: Path) -> None:
    """From floats, blocks and tiles, to the same bytes as with it."""
    files = model_files(dtype=torch.float32, hidden_size=256, intermediate_size=256, head_dim=64)
    llamarium.quantize(files.huggingface(), tmp_path / "packed", type="IQ4_NL")
    wanted = (("hf", "BF16"), ("gguf", "Q8_0"), ("gguf", "Q5_1"), ("gguf", "Q4_K_M"))
    for source in (files.huggingface(), files.gguf_file("Q4_0"), tmp_path / "packed"):
        for which in ("with", "without"):
            (tmp_path / which).mkdir(exist_ok=True)
        subprocess.run(
            [sys.executable, "-c", _WITHOUT_TORCH, source, tmp_path / "without", *sum(wanted, ())], check=True
        )
        for i, (format, type_name) in enumerate(wanted):
            name = f"{i}.gguf" if format == "gguf" else str(i)
            options: Any = {"format": format, "type": type_name, "requantize": True, "with_tokenizer": False}
            llamarium.export(source, tmp_path / "with" / name, **options)
            name = name if format == "gguf" else f"{i}/model.safetensors"
            assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
        shutil.rmtree(tmp_path / "with")
        shutil.rmtree(tmp_path / "without")


def test_the_weights_of_a_packed_folder_are_what_the_modules_unpack(
    model_files: Callable[..., Any], tmp_path: Path
) -> None:
    files = model_files(dtype=torch.float32, hidden_size=256, intermediate_size=256, head_dim=64)
    for type_name in ("IQ4_NL", "Q4_1", "Q8_0"):
        llamarium.quantize(files.huggingface(), tmp_path / type_name, type=type_name)
        checkpoint = open_checkpoint(tmp_path / type_name)
        for weight in checkpoint_weights(checkpoint, "F32"):
            assert np.array_equal(weight.read(), read(checkpoint, weight.key).float().numpy())
