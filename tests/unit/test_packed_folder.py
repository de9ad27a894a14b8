"""A packed folder: written and read back, mapped and not copied, and refused where something does not fit."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import llamarium
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.packed import folder as packed_folder
from llamarium.checkpoints.packed.save import PackedWeight, save_packed
from llamarium.checkpoints.save import array_of
from llamarium.config import ModelConfig
from llamarium.errors import (
    CheckpointError,
    ConfigError,
    LlamariumError,
    ModelNotFoundError,
    OptionError,
    UnsupportedFormatError,
)
from llamarium.inspect.summary import summarize
from llamarium.kernels import native
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.runtime.batch import Span
from llamarium.runtime.batch import pack as pack_spans
from llamarium.runtime.module_runner import ModuleRunner
from llamarium.runtime.native.runner import NativeRunner
from reference_tiles import pack_ggml, quantize

pytestmark = pytest.mark.torch

Q = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
IDS = torch.tensor([[1, 17, 33, 200, 5]])


def pack(weight: Tensor, format: str) -> LinearPacked:
    return pack_ggml(quantize(weight.float(), format), format)


@dataclass
class Packed:
    """A packed folder and what went into it."""

    folder: Path
    config: ModelConfig
    linears: dict[str, LinearPacked]
    plain: dict[str, Tensor]


def array(weight: Any) -> Any:
    """What is written of a tensor, or of a Linear in tiles."""
    return array_of(getattr(weight, "weight", weight))


@pytest.fixture
def packed(model_files: Callable[..., Any], tmp_path: Path) -> Callable[..., Packed]:
    """`packed()`: Q4_0 with an 8-bit embedding and a 5-bit o_proj; `plain` keys stay in floating point."""

    def make(*, plain: tuple[str, ...] = (), **changes: Any) -> Packed:
        files = model_files(**changes)
        formats = {k: None if w.ndim == 1 or k in plain else "Q4_0" for k, w in files.weights.items()}
        formats |= {k: "Q4_1" for k in formats if "o_proj" in k} | {EMBEDDING: "Q8_0"}
        linears = {k: pack(files.weights[k], f) for k, f in formats.items() if f}
        made: dict[str, Any] = {**files.weights, **linears}
        weights = [
            PackedWeight(k, tuple(w.shape), formats[k], lambda k=k: array(made[k])) for k, w in files.weights.items()
        ]
        folder = tmp_path / f"packed{len(list(tmp_path.iterdir()))}"
        save_packed(weights, files.config, folder, recipe={"matrices": "Q4_0"}, generation_config={"top_k": 7})
        return Packed(folder, files.config, linears, {k: w for k, w in files.weights.items() if not formats[k]})

    return make


# --- written and read back --------------------------------------------------------------------------------------------


def test_every_byte_comes_back_and_floats_stay(packed):
    made = packed(tie_word_embeddings=False)
    checkpoint = open_checkpoint(made.folder)
    assert (checkpoint.format, checkpoint.config) == ("packed", made.config)
    assert checkpoint.recipe == {"matrices": "Q4_0"} and checkpoint.generation_config["top_k"] == 7
    for key, linear in made.linears.items():
        entry = checkpoint.entries[key]
        assert (entry.dtype, entry.shape) == (linear.format.name, (linear.out_features, linear.in_features))
        assert np.array_equal(checkpoint.stored(key).data, linear.weight.numpy())
        assert torch.equal(read(checkpoint, key), linear.dequantize())
    for key, values in made.plain.items():
        assert torch.equal(read(checkpoint, key), values) and checkpoint.entries[key].dtype == "BF16"


def test_others_read_the_container_and_see_what_it_is(packed):
    folder = packed().folder
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert tuple(file.get_tensor(Q).shape) == (8, 4, PACKED_FORMATS["Q4_0"].tile_bytes)
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - no dict
        metadata = file.metadata()
    assert json.loads(metadata["llamarium.matrices"])[Q] == {"format": "Q4_0", "rows": 128}
    assert metadata["llamarium.version"] == "1"
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == {"quant_method": "llamarium"}


def test_tiles_are_written_at_multiples_of_32_bytes_whatever_stands_beside_them(packed):
    made = packed(vocab_size=77, intermediate_size=96, plain=(Q,), hidden_size=96)
    file = open_checkpoint(made.folder)
    assert all(file.stored(key).data.ctypes.data % 32 == 0 for key in made.linears)
    assert file.entries[Q].dtype == "BF16"


def test_weights_that_do_not_fit_are_not_written(model_files, tmp_path):
    files = model_files()
    good = {k: pack(w, "Q4_0") for k, w in files.weights.items() if w.ndim == 2}

    def save(**changes: Any) -> None:
        given: dict[str, Any] = {**files.weights, **good, **changes}
        weights = [
            PackedWeight(k, tuple(w.shape), "Q4_0" if w.ndim == 2 else None, lambda k=k: array(given[k]))
            for k, w in files.weights.items()
        ]
        save_packed(weights, files.config, tmp_path / "out", recipe={})

    broken = pack(files.weights[Q], "Q4_0")
    broken.weight.view(torch.float16)[3, 2, 130] = torch.nan
    for changes, error, match in (
        ({Q: broken}, CheckpointError, f"{Q}: has scales that are NaN"),
        (
            {Q: pack(files.weights[Q], "Q8_0")},
            CheckpointError,
            r"packed as \(8, 4, 544\); expected \(8, 4, 288\), \(128, 128\) Q4_0",
        ),
        ({NORM: files.weights[NORM].double()}, OptionError, "float64; expected one of F32"),
    ):
        with pytest.raises(error, match=match):
            save(**changes)
        assert not (tmp_path / "out" / "config.json").exists() and not list(tmp_path.glob("out/*.safetensors"))
    with pytest.raises(OptionError, match="'q3'; expected Q8_0, Q4_0"):
        save_packed(
            [PackedWeight(k, tuple(w.shape), "q3", lambda: array(good[Q])) for k, w in files.weights.items()],
            files.config, tmp_path / "out", recipe={},
        )  # fmt: skip
    with pytest.raises(CheckpointError, match=f"1 tensor is missing: {NORM}"):
        kept = {k: w for k, w in files.weights.items() if k != NORM}
        save_packed(
            [PackedWeight(k, tuple(w.shape), None, lambda w=w: array(w)) for k, w in kept.items()],
            files.config, tmp_path / "out", recipe={},
        )  # fmt: skip


# --- loaded -----------------------------------------------------------------------------------------------------------


def test_the_kernels_run_over_the_file_itself(packed):
    made = packed()
    llama = llamarium.load(made.folder, device="cpu")
    runner, trunk = llama.runner, llama.model.model
    assert isinstance(runner, NativeRunner) and isinstance(trunk.embed_tokens, EmbeddingPacked)
    for key in made.linears:
        held, module = runner.weights[key].data, llama.model.get_submodule(key.removesuffix(".weight"))
        assert not held.flags.owndata, "it is the file's"
        assert module.weight.data_ptr() == held.ctypes.data, "and the modules' too"
    assert llama.model.lm_head.weight is trunk.embed_tokens.weight
    assert llama.model.dtype is torch.bfloat16
    found = {s.key: (s.stored_dtype, s.dtype, s.num_bytes) for s in llama.sources}
    assert found[Q] == ("Q4_0", "Q4_0", made.linears[Q].weight.numel()) and found["lm_head.weight"][2] == 0
    want = llamarium.load(made.folder, device="cpu", dequantize="load", dtype="float32").model(IDS)
    for logits in (llama.model(IDS).float(), answer(runner)):
        assert torch.nn.functional.cosine_similarity(logits, want, dim=-1).min() > 0.999


def answer(runner: NativeRunner) -> Tensor:
    """The logits of all of IDS, (1, T, V)."""
    ids = IDS[0].tolist()
    logits_TV = runner.run(pack_spans([Span(ids, 0, [0], num_logits=len(ids))]), runner.new_cache(1))
    return torch.from_numpy(logits_TV).unsqueeze(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_asked_for_other_arithmetic_the_tiles_are_unpacked_once_or_at_each_use(packed, dtype):
    made = packed()
    at_use = llamarium.load(made.folder, device="cpu", dequantize="use", dtype=dtype)
    model = at_use.model
    assert isinstance(at_use.runner, ModuleRunner) and isinstance(model.model.layers[0].self_attn.q_proj, LinearPacked)
    once = llamarium.load(made.folder, device="cpu", dtype=dtype, dequantize="load")
    whole = once.model
    assert isinstance(once.runner, NativeRunner) and isinstance(whole.model.layers[0].self_attn.q_proj, torch.nn.Linear)
    close: dict[str, float] = {} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(model(IDS), whole(IDS), **close)
    if dtype != "bfloat16":
        auto = llamarium.load(made.folder, device="cpu", dtype=dtype)
        assert isinstance(auto.runner, NativeRunner) and torch.equal(auto.model(IDS), whole(IDS))


def test_without_kernels_it_loads_and_computes(packed, monkeypatch):
    made = packed()
    want = llamarium.load(made.folder, device="cpu", dtype="float32").model(IDS)
    monkeypatch.setattr(native, "library", lambda: None)
    llama = llamarium.load(made.folder, device="cpu")
    assert isinstance(llama.runner, ModuleRunner)
    torch.testing.assert_close(llama.model(IDS).float(), want, rtol=0.05, atol=0.05)


def test_info_says_what_multiplies_what(packed):
    made = packed()
    c = f"C ({native.kernels()})"
    for options, q4 in (({}, c), ({"dequantize": "use"}, "PyTorch"), ({"dequantize": "load"}, None)):
        llama = llamarium.load(made.folder, device="cpu", **options)
        products = summarize(llama.config, llama.loaded, llama.sources).products
        if q4 is not None:
            assert {dtype: list(by) for dtype, by in products.items()} == {"Q8_0": [q4], "Q4_0": [q4], "Q4_1": [q4]}
            assert products["Q4_1"][q4] == ("model.layers.*.self_attn.o_proj.weight",)
            assert products["Q8_0"][q4] == ("lm_head.weight",)
        else:
            assert {dtype: list(by) for dtype, by in products.items()} == {"BF16": [c]}
            assert len(products["BF16"][c]) == 8 and "lm_head.weight" in products["BF16"][c]


def test_info_says_it_of_edited_modules_too(packed):
    llama = llamarium.load(packed().folder, device="cpu")
    handle = llama.model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="PyTorch answers from now on"):
        products = summarize(llama.config, llama.loaded, llama.sources).products
    assert list(products["Q4_0"]) == [f"C ({native.kernels()})"], "each packed Linear is still one product in C"
    handle.remove()


def test_columns_that_the_kernels_cannot_cut_are_named_once(model_files):
    folder = model_files(intermediate_size=208).huggingface()
    message = r"2 Linears are BF16 instead: .*layers.0.mlp.down_proj \(208 columns\)"
    with pytest.warns(UserWarning, match=message) as one:
        llama = llamarium.load(folder, device="cpu", quantize="Q8_0")
    assert len(one) == 1 and llama.model(IDS).isfinite().all() and isinstance(llama.runner, NativeRunner)
    for options in ({}, {"dtype": "float32"}, {"dtype": "float16"}):  # floats may have any number of columns
        assert isinstance(llamarium.load(folder, device="cpu", **options).runner, NativeRunner)
    llamarium.load(folder, device="cpu", quantize="NF4")


def test_it_can_be_quantized_again_and_unpacked(packed):
    made = packed()
    model = llamarium.load(made.folder, device="cpu", quantize="nf4", dequantize="load").model
    assert type(model.model.layers[0].mlp.down_proj).__name__ == "Linear4bit"


_LOAD = """
import re, sys, llamarium
from llamarium.runtime.batch import Span, pack
llama = llamarium.load(sys.argv[1], device="cpu")
runner = llama.runner
runner.run(pack([Span([1, 2, 3], 0, [0])]), runner.new_cache(1))
assert "torch" not in sys.modules
blocks = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
mapped = [b for b in blocks if "model.safetensors" in b.partition("\\n")[0]]
total = {k: sum(int(re.search(rf"{k}: +(\\d+)", b)[1]) for b in mapped) for k in ("Rss", "Private_Dirty", "Pss")}
print(total["Rss"], total["Private_Dirty"], total["Pss"], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="smaps are Linux's")
def test_two_processes_share_the_pages(packed):
    made = packed(vocab_size=8192, hidden_size=256, head_dim=32)
    run = [sys.executable, "-c", _LOAD, str(made.folder)]
    counts: list[list[int]] = []
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            process = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.append(process)
            assert process.stdout is not None
            counts.append([int(n) for n in process.stdout.readline().split()])
    finally:
        for process in processes:
            process.communicate("")
    size_kb = (made.folder / "model.safetensors").stat().st_size // 1024
    for resident, dirty, _ in counts:
        assert resident > size_kb * 0.9 and dirty == 0
    assert counts[1][2] < size_kb * 0.6  # each page counts half for each of the two


# --- refused ----------------------------------------------------------------------------------------------------------


def refused(folder: Path, match: str, error: type[LlamariumError] = CheckpointError) -> None:
    with pytest.raises(error, match=match) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message and message.isprintable() and len(message) < 1500


def rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict[str, str], dict[str, Any]], Any]) -> Path:
    """Write the file anew after `change(tensors, metadata, matrices)`, by safetensors' own writer."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no dict
    matrices = json.loads(metadata["llamarium.matrices"])
    change(tensors, metadata, matrices)
    if "llamarium.matrices" in metadata:
        metadata["llamarium.matrices"] = json.dumps(matrices)
    save_file(tensors, path, metadata)
    return folder


def test_a_folder_with_the_names_of_earlier_versions_opens(packed):
    made = packed()
    before = {key: entry.dtype for key, entry in open_checkpoint(made.folder).entries.items()}
    old = {"Q4_0": "q4", "Q4_1": "q4_min", "Q8_0": "q8"}
    rewrite(made.folder, lambda t, m, x: [matrix.update(format=old[matrix["format"]]) for matrix in x.values()])
    checkpoint = open_checkpoint(made.folder)
    assert {key: entry.dtype for key, entry in checkpoint.entries.items()} == before
    assert checkpoint.stored(Q).data.tobytes() == made.linears[Q].weight.numpy().tobytes()


FAULTS: dict[str, tuple[Callable[[Any, Any, Any], Any], str, type[LlamariumError]]] = {
    "version": (
        lambda t, m, x: m.update({"llamarium.version": "2"}),
        r"llamarium.version is '2'; this version of Llamarium reads '1'.*llamarium quantize",
        UnsupportedFormatError,
    ),
    "layout": (
        lambda t, m, x: m.update({"llamarium.layout": "16x32 big-endian"}),
        "layout is '16x32 big-endian'.*'16x32 little-endian'.*llamarium quantize",
        UnsupportedFormatError,
    ),
    "no version": (
        lambda t, m, x: m.pop("llamarium.version"),
        "llamarium.version is missing.*quantize",
        CheckpointError,
    ),
    "no table": (lambda t, m, x: m.pop("llamarium.matrices"), "llamarium.matrices is no JSON", CheckpointError),
    "a list": (
        lambda t, m, x: m.update({"llamarium.recipe": "[]"}),
        "llamarium.recipe is list; expected an object",
        CheckpointError,
    ),
    "format": (
        lambda t, m, x: x[Q].update(format="q3\x1b[2J"),
        r"q_proj.weight is packed as 'q3\\x1b\[2J'; known are Q8_0, Q4_0.*llamarium quantize",
        UnsupportedFormatError,
    ),
    "zero rows": (lambda t, m, x: x[Q].update(rows=0), f"tensor {Q} has 0 rows; expected at least 1", CheckpointError),
    "true rows": (lambda t, m, x: x[Q].update(rows=True), f"tensor {Q} has True rows", CheckpointError),
    "no fields": (lambda t, m, x: x.update({Q: 3}), f"tensor {Q} has None rows", CheckpointError),
    "rows": (
        lambda t, m, x: x[Q].update(rows=100),
        rf"tensor {Q} is U8 \(8, 4, 288\); 100 rows in Q4_0 are U8 \(7, 4, 288\)",
        CheckpointError,
    ),
    "rows of a full panel": (
        lambda t, m, x: x[Q].update(rows=120),
        rf"{Q} has shape \(120, 128\); by the config's .* \(128, 128\)",
        CheckpointError,
    ),
    "tile": (lambda t, m, x: x[Q].update(format="Q8_0"), r"128 rows in Q8_0 are U8 \(8, 4, 544\)", CheckpointError),
    "flat": (
        lambda t, m, x: t.update({Q: t[Q].flatten()}),
        r"is U8 \(9216,\); 128 rows in Q4_0 are U8 \(8, tiles, 288\)",
        CheckpointError,
    ),
    "signed": (lambda t, m, x: t.update({Q: t[Q].view(torch.int8)}), r"is I8 \(8, 4, 288\)", CheckpointError),
    "no groups": (
        lambda t, m, x: t.update({Q: t[Q][:, :0].contiguous()}),
        r"is U8 \(8, 0, 288\); .* U8 \(8, tiles, 288\)",
        CheckpointError,
    ),
    "columns": (
        lambda t, m, x: t.update({Q: t[Q][:, :3].contiguous()}),
        rf"{Q} has shape \(128, 96\)",
        CheckpointError,
    ),
    "missing": (lambda t, m, x: (t.pop(Q), x.pop(Q)), f"1 tensor is missing: {Q}", CheckpointError),
    "missing norm": (lambda t, m, x: t.pop(NORM), f"1 tensor is missing: {NORM}", CheckpointError),
    "unnamed": (lambda t, m, x: x.pop(Q), f"not known: {Q}.*llamarium.matrices", CheckpointError),
    "not there": (lambda t, m, x: t.pop(Q), f"missing: {Q}.*llamarium.matrices", CheckpointError),
    "key": (
        lambda t, m, x: (t.update(other=t.pop(Q)), x.update(other=x.pop(Q))),
        f"missing: {Q}; 1 others are not known: other",
        CheckpointError,
    ),
    "float64": (lambda t, m, x: t.update({NORM: t[NORM].double()}), f"not known: {NORM}", CheckpointError),
    "head": (
        lambda t, m, x: (t.update({"lm_head.weight": t[Q].clone()}), x.update({"lm_head.weight": x[Q]})),
        "lm_head.weight",
        CheckpointError,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused(packed, fault):
    change, match, error = FAULTS[fault]
    refused(rewrite(packed().folder, change), match, error)


def test_a_file_that_was_cut_or_grew_is_refused(packed):
    folder = packed().folder
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content + b"\0", content[:100], b""):
        path.write_bytes(damaged)
        refused(folder, "the file is damaged, was cut short")
    path.unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, "model.safetensors: no such file", ModelNotFoundError)


def test_misaligned_tiles_are_refused(packed):
    folder = packed().folder
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length] + b" "
    (folder / "model.safetensors").write_bytes((length + 1).to_bytes(8, "little") + header + content[8 + length :])
    refused(folder, r"tensor .* begins at byte \d+; expected a multiple of 2")


def test_a_big_endian_machine_is_told_so(packed, monkeypatch):
    folder = packed().folder
    monkeypatch.setattr(packed_folder.sys, "byteorder", "big")
    refused(folder, "packed weights are little-endian, and this machine is big-endian", UnsupportedFormatError)


def test_a_config_that_does_not_say_so_or_is_broken(packed):
    folder = packed().folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(folder, "num_hidden_layers 3, the weights have 2 layers")
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    refused(folder, "is U8; expected F32", UnsupportedFormatError)
    (folder / "config.json").write_text("[]")
    refused(folder, "expected a JSON object, found list", ConfigError)


def change_scales(folder: Path, value: float) -> Path:
    """Set the scales of q_proj's first row."""

    def change(tensors: dict[str, Tensor], *_: Any) -> None:
        tensors[Q].view(torch.float16)[0, :, 128] = value

    return rewrite(folder, change)


def test_scales_of_zero_are_zeros(packed):
    llama = llamarium.load(change_scales(packed().folder, 0.0), device="cpu", strict=True)
    assert llama.model(IDS).isfinite().all()
    assert not llama.model.model.layers[0].self_attn.q_proj.dequantize()[0].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scales_that_are_not_finite_are_counted_or_refused(packed, value):
    folder = change_scales(packed().folder, value)
    found = rf"model.safetensors: {re.escape(Q)} has 1\d\d weights that are NaN or infinite"
    with pytest.warns(UserWarning, match=found):
        assert llamarium.load(folder, device="cpu").model(IDS).shape == (1, 5, 256)
    with pytest.raises(CheckpointError, match=found):
        llamarium.load(folder, device="cpu", strict=True)
