"""Every format gives back the model that was written: config and each tensor's values."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llamarium.checkpoints.checkpoint import Checkpoint, expected_shapes
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.values import values as stored_values
from llamarium.checkpoints.weights import native_weights
from llamarium.config import ModelConfig
from llamarium.options.loading import LoadOptions

pytestmark = pytest.mark.torch

Q = "model.layers.0.self_attn.q_proj.weight"


def check_equal(checkpoint: Checkpoint, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    assert checkpoint.config == config
    assert set(checkpoint.entries) == set(weights) == set(expected_shapes(config))
    for key, weight in weights.items():
        entry, values = checkpoint.entries[key], read(checkpoint, key)
        assert entry.shape == tuple(weight.shape) and entry.file.is_file()
        assert values.shape == weight.shape and torch.equal(values.float(), weight.float()), key
        found = stored_values(checkpoint.stored(key))
        assert found.dtype == np.float32 and np.array_equal(found, values.float().reshape(found.shape)), key
        for rows in (slice(0, 1), slice(1, 18), slice(len(found) - 1, None)):
            assert np.array_equal(stored_values(checkpoint.stored(key), rows), found[rows]), key
            out = np.full(found[rows].shape, np.nan, np.float32)
            assert stored_values(checkpoint.stored(key), rows, out) is out and np.array_equal(out, found[rows]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_huggingface(model_files, dtype, shards, tied):
    files = model_files(dtype=dtype, tie_word_embeddings=tied, head_dim=32)
    folder = files.huggingface(shards=shards)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    checkpoint = open_checkpoint(folder)
    check_equal(checkpoint, files.config, files.weights)
    assert checkpoint.format == "huggingface" and checkpoint.generation_config == {"temperature": 0.6}
    assert read(checkpoint, Q).dtype == dtype and not checkpoint.entries[Q].permuted


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("cut_vocab", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_meta(model_files, shards, cut_vocab, tied):
    files = model_files(tie_word_embeddings=tied)
    checkpoint = open_checkpoint(files.meta(shards=shards, cut_vocab=cut_vocab))
    check_equal(checkpoint, files.config, files.weights)
    assert checkpoint.format == "meta" and checkpoint.entries[Q].permuted
    assert checkpoint.entries[Q].name == "layers.0.attention.wq.weight"


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf(model_files, type_name, tied):
    files = model_files(tie_word_embeddings=tied, head_dim=32)
    weights = files.weights
    if type_name == "F16":  # bfloat16's smallest values are below float16's
        weights = {key: w.half() if w.ndim == 2 else w for key, w in weights.items()}
    checkpoint = open_checkpoint(files.gguf_file(type_name))
    check_equal(checkpoint, files.config, weights)
    assert checkpoint.format == "gguf" and checkpoint.entries[Q].permuted
    assert checkpoint.entries[Q].name == "blk.0.attn_q.weight" and checkpoint.entries[Q].dtype == type_name


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_blocks(model_files, type_name):
    import gguf

    files = model_files(dtype=torch.float32, tie_word_embeddings=False)
    kind = gguf.GGMLQuantizationType[type_name]
    packed = {k: gguf.quantize(w.numpy(), kind) for k, w in files.weights.items() if w.ndim == 2}
    decoded = {k: torch.from_numpy(gguf.dequantize(p, kind)) for k, p in packed.items()}
    checkpoint = open_checkpoint(files.gguf_file(type_name))
    check_equal(checkpoint, files.config, {k: decoded.get(k, w) for k, w in files.weights.items()})
    for key, rows in packed.items():
        found = checkpoint.stored(key)
        assert found.type_name == type_name and found.shape == tuple(files.weights[key].shape)
        assert np.array_equal(found.data, rows), key


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_nf4(model_files, double_quant, tied):
    files = model_files(tie_word_embeddings=tied)
    folder, decoded = files.nf4(double_quant=double_quant)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == files.config and set(checkpoint.entries) == set(decoded)
    assert native_weights(checkpoint, LoadOptions(device="cpu")) is None, "the modules multiply it"
    for key, weight in decoded.items():
        values = read(checkpoint, key)
        # bitsandbytes gives bfloat16, ours float32 before that rounding
        assert torch.equal(values.bfloat16(), weight.bfloat16()), key
    entry = checkpoint.entries[Q]
    assert (entry.dtype, entry.shape) == ("NF4", (128, 128)) and 128 * 128 // 2 < entry.num_bytes < 128 * 128
    assert set(checkpoint.stored(Q).state) >= {"absmax", "quant_map", "quant_state.bitsandbytes__nf4"}


@pytest.mark.parametrize("copy", [False, True])
def test_floats_are_stored_as_rows_of_bytes(model_files, copy):
    files = model_files()
    for path in (files.huggingface(), files.meta(), files.meta(shards=2), files.gguf_file("BF16")):
        checkpoint = open_checkpoint(path)
        for key, weight in files.weights.items():
            found = checkpoint.stored(key, copy=copy)
            rows = weight if found.type_name == "BF16" else weight.float()  # a GGUF's norms
            expected = rows.reshape(-1 if weight.ndim == 1 else len(weight), weight.shape[-1])
            assert np.array_equal(found.data, expected.view(torch.uint8).numpy()), (path, key)
            assert found.shape == tuple(weight.shape) and found.data.flags.c_contiguous and not found.state


def test_values_can_be_written_to_and_the_file_stays(model_files):
    files = model_files()
    for path in (files.huggingface(), files.meta(), files.gguf_file("BF16")):
        key = "model.embed_tokens.weight"
        read(open_checkpoint(path), key).fill_(7.0)
        assert torch.equal(read(open_checkpoint(path), key), files.weights[key])


def test_smollm2(smollm2_path: Path):
    from llamarium.presets import preset

    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.config == preset("smollm2-135m")
    assert {e.dtype for e in checkpoint.entries.values()} == {"Q8_0", "Q4_1", "F32"}


def test_float64_is_read_as_float32(model_files):
    files = model_files(dtype=torch.float64)
    checkpoint = open_checkpoint(files.huggingface())
    for key, weight in files.weights.items():
        assert checkpoint.entries[key].dtype == "F32"
        assert torch.equal(read(checkpoint, key), weight.float())
