"""Modules over AWQ, GPTQ, compressed-tensors and FP8 weights, which are dequantized at each use."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import llamarium
from llamarium.checkpoints import forms
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.open import open_checkpoint
from llamarium.cli.main import main
from llamarium.kernels import native
from llamarium.options.loading import LoadOptions
from llamarium.quant.packed import LinearPacked
from llamarium.quant.stored_linear import LinearStored
from quantized_cases import CASES, CONFIG, NO_TILE, Model, Q

pytestmark = pytest.mark.torch

IDS = torch.arange(3, 40)[None]
DIFFERENT = ["awq", "awq gemv", "gptq order", "gptq 3", "gptq 8", "w4a16 zeros", "float8 blocks", "fbgemm"]


@pytest.fixture(autouse=True)
def hints():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*activations were meant")
        yield


@pytest.mark.parametrize("name", DIFFERENT)
def test_modules_dequantize_at_each_use(name, tmp_path):
    maker, quantization, _, _ = CASES[name]
    model = Model(maker, quantization)
    expected = llamarium.load(model.write_floats(tmp_path / "floats"), device="cpu", dtype="float32").model
    llama = llamarium.load(model.write(tmp_path / "model"), device="cpu", dtype="float32", dequantize="use")
    linear = llama.model.get_submodule(Q)
    assert isinstance(linear, LinearStored)
    np.testing.assert_array_equal(linear.dequantize().numpy(), expected.get_submodule(Q).weight.detach().numpy())
    with torch.no_grad():
        torch.testing.assert_close(llama.model(IDS), expected(IDS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["awq", "fbgemm"])
def test_gradients_flow_through_frozen_weights(name, tmp_path):
    maker, quantization, _, _ = CASES[name]
    model = Model(maker, quantization)
    checkpoint = open_checkpoint(model.write(tmp_path))
    modules, sources = load_model(checkpoint, LoadOptions(device="cpu", dtype="float32", join=False))
    linear = modules.get_submodule(Q)
    assert isinstance(linear, LinearStored)
    assert {source.dtype for source in sources if source.key == f"{Q}.weight"} == {linear.type_name}
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    linear(x).square().sum().backward()
    weight = torch.from_numpy(model.linears[f"{Q}.weight"].values.astype(np.float32))
    copy = x.detach().clone().requires_grad_()
    (copy @ weight.T).square().sum().backward()
    torch.testing.assert_close(x.grad, copy.grad)


def test_where_there_is_no_memory_weights_stay_as_they_are(tmp_path, monkeypatch):
    maker, quantization, type_name, _ = CASES["gptq order"]
    folder = Model(maker, quantization).write(tmp_path)
    monkeypatch.setattr(forms, "free_bytes", lambda: 1000)
    with pytest.warns(UserWarning, match="dequantized at each use"):
        llama = llamarium.load(folder, device="cpu")
    linear = llama.model.get_submodule(Q)
    assert isinstance(linear, LinearStored) and linear.type_name == type_name


@pytest.mark.skipif(native.library() is None, reason="needs the C kernels")
@pytest.mark.parametrize("name", ["awq", "gptq order", "w8a16"])
def test_tree_is_what_print_shows(name, tmp_path, capsys):
    maker, quantization, _, tiles = CASES[name]
    folder = Model(maker, quantization).write(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["tree", str(folder)]) == 0
        llama = llamarium.load(folder, device="cpu")
    assert capsys.readouterr().out == f"{llama.model}\n"
    assert isinstance(llama.model.get_submodule(Q), LinearPacked) == (tiles is not NO_TILE)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_in_any_storage(model_files, storage, double_quant):
    folder, decoded = model_files(dtype=torch.float32).nf4(double_quant=double_quant, storage=storage)
    llama = llamarium.load(folder, device="cpu", dtype="float32")
    for key, weight in decoded.items():
        module = llama.model.get_submodule(key.removesuffix(".weight"))
        held = module.dequantize() if "_proj" in key else module.weight
        assert torch.equal(held, weight.float()), key


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_embedding_is_dequantized(tied, tmp_path):
    maker, quantization, _, _ = CASES["fbgemm"]
    model = Model(maker, quantization, replace(CONFIG, tie_word_embeddings=tied))
    key = "model.embed_tokens.weight"
    model.linears[key] = maker(np.random.default_rng(9), model.plain.pop(key).shape)
    expected = llamarium.load(model.write_floats(tmp_path / "floats"), device="cpu", dtype="float32").model(IDS)
    for options in ({}, {"dequantize": "use"}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            llama = llamarium.load(model.write(tmp_path / "model"), device="cpu", dtype="float32", **options)
        torch.testing.assert_close(llama.model(IDS), expected, rtol=0, atol=1e-5)
