"""What the native runner gets is what the modules hold, over the same memory, and it is there without torch."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from llamarium.checkpoints.choose_runner import load_weights
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.modules import build_model, weights_of
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.options import TYPE_OF_DTYPE
from llamarium.checkpoints.weights import native_weights, sources_of
from llamarium.errors import CheckpointError, MissingPackageError
from llamarium.kernels import native
from llamarium.options.loading import LoadOptions
from llamarium.quant.formats import PACKED_FORMATS
from reference_tiles import pack_reference

pytestmark = pytest.mark.torch

IDS = torch.arange(20).view(2, 10) * 37 % 256
EMBEDDING, Q, NORM = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
CASES = ["hf", "shards", "meta", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_0 untied"]


@pytest.fixture
def folder(model_files, request) -> Path:
    kind, _, untied = request.param.partition(" ")
    files = model_files(tie_word_embeddings=not untied)
    if kind in ("hf", "shards"):
        return files.huggingface(shards=1 + (kind == "shards"))
    return files.meta(shards=2) if kind == "meta" else files.gguf_file(kind)


def same(built: torch.nn.Module, loaded: torch.nn.Module) -> None:
    found, expected = built.state_dict(), loaded.state_dict()
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    assert str(built) == str(loaded)
    with torch.no_grad():
        assert torch.equal(built(IDS), loaded(IDS))


@pytest.mark.parametrize("folder", CASES, indirect=True)
def test_modules_over_the_weights_are_those_of_load_model(folder):
    checkpoint = open_checkpoint(folder)
    weights = native_weights(checkpoint, LoadOptions(device="cpu"))
    assert weights is not None and list(weights) == list(checkpoint.entries)
    model = build_model(checkpoint.config, weights)
    if folder.suffix != ".gguf":
        loaded, sources = load_model(checkpoint, LoadOptions(device="cpu", join=False))
        same(model, loaded)
        assert set(sources_of(checkpoint, weights)) == set(sources)
    for key, weight in weights.items():
        held = model.state_dict()[key]
        assert held.data_ptr() == weight.data.ctypes.data, "no second copy"
        assert weight.key == key and weight.shape == checkpoint.entries[key].shape and weight.data.flags.c_contiguous
    tied = checkpoint.config.tie_word_embeddings
    head, table = model.state_dict()["lm_head.weight"], model.state_dict()[EMBEDDING]
    assert (head.data_ptr() == table.data_ptr()) == tied


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
def test_packed_weights_are_as_torch_packs_them(model_files, type_name):
    checkpoint = open_checkpoint(model_files().gguf_file(type_name))
    weights = native_weights(checkpoint, LoadOptions(device="cpu"))
    assert weights is not None
    for key, entry in checkpoint.entries.items():
        if entry.dtype == type_name:
            expected = pack_reference(torch.from_numpy(checkpoint.stored(key).data), type_name)
            assert np.array_equal(weights[key].data, expected.numpy()), key
    assert weights[Q].type_name == weights[EMBEDDING].type_name == type_name
    assert weights[Q].data.shape == (8, 4, PACKED_FORMATS[type_name].tile_bytes)
    assert (weights[NORM].type_name, weights[NORM].data.dtype) == ("BF16", np.uint16), "F32 in the file"


def test_the_modules_weights_come_back(model_files):
    checkpoint = open_checkpoint(model_files().gguf_file("Q4_0"))
    weights = native_weights(checkpoint, LoadOptions(device="cpu"))
    assert weights is not None
    model = build_model(checkpoint.config, weights)
    again = weights_of(model)
    assert again is not None and list(again) == list(weights)
    for key, weight in weights.items():
        assert again[key].type_name == weight.type_name and again[key].data.ctypes.data == weight.data.ctypes.data
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(128, 128, bias=False)  # in float32
    assert weights_of(model) is None
    halves = weights_of(load_model(checkpoint, LoadOptions(device="cpu", dtype="float16"))[0])
    assert halves is not None and {weight.type_name for weight in halves.values()} == {"F16"}


@pytest.mark.parametrize(
    "options",
    [{"device": "cuda"}, {"dequantize": "use"}, {"join": False}, {"quantize": "NF4", "dequantize": "load"}],
)
def test_what_the_kernels_do_not_multiply_is_left_to_the_modules(model_files, options):
    checkpoint = open_checkpoint(model_files().gguf_file("Q4_0"))
    assert native_weights(checkpoint, LoadOptions(device="cpu")) is not None
    assert native_weights(checkpoint, LoadOptions(**{"device": "cpu", **options})) is None


def test_so_is_a_machine_without_kernels(model_files, monkeypatch):
    plain = open_checkpoint(model_files().huggingface())
    monkeypatch.setattr(native, "library", lambda: None)
    assert native_weights(plain, LoadOptions(device="cpu")) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_floats_are_held_as_they_are_stored(model_files, dtype):
    files = model_files(dtype=dtype)
    weights = native_weights(open_checkpoint(files.huggingface()), LoadOptions(device="cpu"))
    assert weights is not None
    assert {weight.type_name for weight in weights.values()} == {"F16" if dtype is torch.float16 else "F32"}
    assert np.array_equal(weights[Q].data, files.weights[Q].numpy())


def test_floats_of_three_dtypes_in_one_folder_become_one(model_files):
    files = model_files()
    kinds = (torch.bfloat16, torch.float32, torch.float16)
    files.weights |= {key: value.to(kinds[i % 3]) for i, (key, value) in enumerate(files.weights.items())}
    checkpoint = open_checkpoint(files.huggingface())
    assert {entry.dtype for entry in checkpoint.entries.values()} == {"BF16", "F32", "F16"}
    for options in (LoadOptions(device="cpu"), LoadOptions(device="cpu", dtype="float32")):
        weights = native_weights(checkpoint, options)
        assert weights is not None and len({weight.type_name for weight in weights.values()}) == 1
        same(build_model(checkpoint.config, weights), load_model(checkpoint, options)[0])


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "BF16", "F16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_dequantized_once_are_the_numbers_of_load_model(model_files, type_name, dtype):
    checkpoint = open_checkpoint(model_files().gguf_file(type_name))
    options = LoadOptions(device="cpu", dtype=dtype, dequantize="auto" if type_name in ("BF16", "F16") else "load")
    weights = native_weights(checkpoint, options)
    assert weights is not None
    assert {weight.type_name for weight in weights.values()} == {TYPE_OF_DTYPE[dtype]}
    model, sources = load_model(checkpoint, options)
    same(build_model(checkpoint.config, weights), model)
    assert set(sources_of(checkpoint, weights)) == set(sources)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_floats_are_rounded_as_torch_rounds_them(model_files, dtype):
    files = model_files(dtype=dtype)
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, files.weights[Q].shape, dtype=torch.int64).int()
    values = bits.view(torch.float32) if dtype is torch.float32 else bits.to(torch.int16).view(torch.float16)
    files.weights[Q] = values.clone()
    files.weights[Q].view(-1)[:6] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1 + 2**-8, 1 + 3 * 2**-8])
    checkpoint = open_checkpoint(files.huggingface())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = native_weights(checkpoint, LoadOptions(device="cpu", dtype="bfloat16"))
    assert weights is not None
    expected = files.weights[Q].bfloat16()
    found = torch.from_numpy(weights[Q].data.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["hf", "Q8_0"])
def test_weights_that_are_not_finite_are_counted(model_files, kind):
    files = model_files()
    files.weights[Q][3, 5] = float("nan")
    with np.errstate(invalid="ignore"):
        path = files.huggingface() if kind == "hf" else files.gguf_file(kind)
    count = 1 if kind == "hf" else 32
    with pytest.warns(UserWarning, match=f"has {count} weights that are NaN or infinite"):
        assert native_weights(open_checkpoint(path), LoadOptions(device="cpu"))
    with pytest.warns(UserWarning, match=f"has {count} weights that are NaN or infinite"):
        load_model(open_checkpoint(path), LoadOptions(device="cpu"))
    with pytest.raises(CheckpointError, match=f"{count} weights .* expected none"):
        native_weights(open_checkpoint(path), LoadOptions(device="cpu", strict=True))


def test_progress_ends_at_the_whole(model_files):
    steps: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(model_files().gguf_file("Q4_1"))
    native_weights(checkpoint, LoadOptions(device="cpu"), lambda *step: steps.append(step))
    total = sum(entry.num_bytes for entry in checkpoint.entries.values())
    assert [done for done, _ in steps] == sorted(done for done, _ in steps) and steps[-1] == (total, total)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("nf4", LoadOptions(device="cpu"), "multiplying NF4"),
        ("gguf", LoadOptions(device="cpu", dequantize="use"), "dequantizing at each use"),
        ("gguf", LoadOptions(device="cpu", quantize="NF4", dequantize="load"), "quantizing to NF4"),
        ("gguf", LoadOptions(device="cuda"), "a model of modules on cuda"),
    ],
)
def test_what_only_modules_do_names_pytorch_where_it_is_missing(model_files, monkeypatch, kind, options, message):
    files = model_files()
    path = {"nf4": lambda: files.nf4()[0], "gguf": lambda: files.gguf_file("Q4_0")}[kind]()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackageError) as caught:
        load_weights(open_checkpoint(path), options)
    assert str(caught.value) == f"{path}: {message} needs PyTorch: pip install 'llamarium[torch]'"


SCRIPT = """
import sys
sys.modules["torch"] = None
from llamarium.checkpoints.weights import native_weights
from llamarium.checkpoints.open import open_model
from llamarium.options.loading import LoadOptions
for path in sys.argv[1:]:
    opened = open_model(path)
    weights = native_weights(opened.checkpoint, LoadOptions(device="cpu"))
    assert weights and opened.why_no_tokenizer or opened.tokenizer
    print(len(weights), opened.tokenizer.encode("The cat")[-1] if not opened.why_no_tokenizer else "-")
late = {"huggingface_hub", "jinja2", "rich", "transformers", "safetensors", "gguf"} & set(sys.modules)
assert not late, late
"""


def test_opening_needs_no_torch(model_files, smollm2_path, tmp_path):
    from llamarium.checkpoints.packed.save import PackedWeight, save_packed
    from llamarium.checkpoints.save import array_of
    from llamarium.quant.packed import LinearPacked

    model = build_model(
        model_files().config,
        native_weights(open_checkpoint(model_files().gguf_file("Q4_0")), LoadOptions(device="cpu")) or {},
    )
    made = []
    for key in (name for name in model.state_dict() if name != "lm_head.weight"):
        module = model.get_submodule(key.removesuffix(".weight"))
        linear = getattr(module, "linear", module)
        is_packed = isinstance(linear, LinearPacked)
        shape = (linear.out_features, linear.in_features) if is_packed else tuple(module.weight.shape)
        values = array_of(linear.weight if is_packed else module.weight)
        made.append(PackedWeight(key, shape, "Q4_0" if is_packed else None, lambda values=values: values))
    save_packed(made, model.config, tmp_path / "packed", recipe={})
    paths = [smollm2_path, tmp_path / "packed", model_files().huggingface()]
    run = subprocess.run([sys.executable, "-c", SCRIPT, *map(str, paths)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0] == "272 2644", run.stdout
