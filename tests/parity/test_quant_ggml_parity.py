"""Block formats against gguf-py's `gguf.quants`, bit for bit both ways; the K types' error against llama.cpp's."""

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from llamarium.checkpoints.decode import read
from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.errors import CheckpointError
from llamarium.kernels import native
from llamarium.quant.formats import GGML_TYPES, METHODS
from llamarium.quant.ggml.blocks import dequantize
from llamarium.quant.ggml.decode import decode_blocks
from llamarium.quant.ggml.encode import encode, encode_reference
from llamarium.quant.packing import to_bfloat16
from reference_tiles import quantize

pytestmark = pytest.mark.torch

# Where each format keeps its half-precision scales, in bytes from the block's start.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0],
    "IQ3_S": [0], "IQ3_XXS": [0], "IQ2_S": [0], "IQ2_XS": [0], "IQ2_XXS": [0], "IQ1_S": [0], "IQ1_M": [],
}  # fmt: skip
TOOLS = Path(__file__).parents[2] / "tools"
ODD_HALVES = np.array([0, -0.0, 65504, -65504, 6e-8, -6e-8, 6.1e-5, 1, -1, 0.3333, 1e-3], dtype=np.float16)
WRITTEN = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def test_the_table_agrees_with_gguf():
    for name, block in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (block.ggml_type, block.block_size, block.block_bytes) == (kind.value, *gguf.GGML_QUANT_SIZES[kind])


def random_blocks(name: str, num_blocks: int, seed: int) -> np.ndarray:
    """Any codes, with finite scales: odd ones in the first blocks, random halves of either sign after them."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (num_blocks, GGML_TYPES[name].block_bytes), dtype=np.uint8)
    data[0], data[1] = 0, 255
    for offset in SCALES[name]:
        scales = rng.normal(0, 0.01, num_blocks).astype(np.float16)
        scales[: len(ODD_HALVES)] = rng.permutation(ODD_HALVES)
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "IQ1_M":  # its scale lies in the high halves of four bytes; 0x3F or 0xBF above, so that it is finite
        data[:, 55] = (data[:, 55] & 0x8F) | 0x30
    return data


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


@pytest.mark.parametrize("name", list(SCALES))
def test_dequantize_is_bit_exact(name):
    data = random_blocks(name, num_blocks=64, seed=1).reshape(16, -1)
    theirs = quants.dequantize(data, gguf.GGMLQuantizationType[name])
    ours = dequantize(torch.from_numpy(data), name)
    assert np.array_equal(bits(ours.numpy()), bits(theirs))
    assert np.array_equal(bits(decode_blocks(name, data, theirs.shape[1])), bits(theirs))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_floats_are_bit_exact(name):
    rng = np.random.default_rng(2)
    values = rng.normal(0, 1, (8, 40)).astype(np.float32)
    data = quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    theirs = quants.dequantize(data, gguf.GGMLQuantizationType[name])
    assert np.array_equal(bits(dequantize(torch.from_numpy(data), name).numpy()), bits(theirs))
    assert np.array_equal(bits(decode_blocks(name, data, 40)), bits(theirs))


def test_every_type_but_plain_floats_is_compared():
    assert {*SCALES, "F32", "F16", "BF16"} == set(GGML_TYPES)


def test_the_codebooks_are_made_of_ggufs_values():
    spec = importlib.util.spec_from_file_location("make_codebooks", TOOLS / "make_codebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.source()


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_pieces_join_without_a_seam(name):
    block = GGML_TYPES[name]
    num_blocks = 2 * 2**18 // block.block_size + 3  # more than two of the pieces that are worked on at a time
    data = random_blocks(name, num_blocks, seed=3).reshape(1, -1)
    theirs = quants.dequantize(data, gguf.GGMLQuantizationType[name])
    assert np.array_equal(bits(dequantize(torch.from_numpy(data), name).numpy()), bits(theirs))
    assert np.array_equal(bits(decode_blocks(name, data, theirs.shape[1])), bits(theirs))


@pytest.mark.parametrize(
    "data", [np.zeros(35, np.uint8), np.zeros(34, np.int8), np.zeros((3, 34), np.uint8)], ids=["size", "dtype", "row"]
)
def test_what_are_no_whole_rows_is_refused(data):
    with pytest.raises(CheckpointError, match="expected uint8, a multiple of"):
        decode_blocks("Q8_0", data, 64 if data.size > 40 else 32)


def weights_of_every_kind() -> np.ndarray:
    """Rows of 64: ordinary, large, tiny, equal, zero, one-sided, ties of either sign, exact halves of a step."""
    rng = np.random.default_rng(4)
    ordinary = rng.normal(0, 0.02, (200, 64))
    ties = np.where(rng.random((40, 64)) < 0.5, -1.0, 1.0) * 0.37
    halves = rng.integers(-254, 255, (40, 64)) / 2.0
    halves[:, ::32] = 127.0
    odd = np.stack([np.zeros(64), np.full(64, 0.1), np.full(64, -0.1), np.abs(ordinary[0]), -np.abs(ordinary[1])])
    return np.concatenate([ordinary, ordinary * 1e4, ordinary * 1e-6, ties, halves, odd]).astype(np.float32)


@pytest.mark.parametrize("name", WRITTEN)
def test_quantize_is_byte_exact(name):
    weight = weights_of_every_kind()
    theirs = quants.quantize(weight, gguf.GGMLQuantizationType[name]).view(np.uint8)
    assert np.array_equal(quantize(torch.from_numpy(weight), name).numpy(), theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_takes_half_precision(dtype):
    weight = torch.from_numpy(weights_of_every_kind()).to(dtype)
    weight = weight[weight.isfinite().all(-1)]
    theirs = quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(quantize(weight, "Q4_0").numpy(), theirs)


def test_smollm2_weights_are_bit_exact(smollm2_path):
    """A real tensor of each format in the built-in model."""
    tensors = {tensor.type_name: tensor for tensor in read_gguf(smollm2_path).tensors.values()}
    assert {"Q4_1", "Q8_0", "F32"} <= set(tensors)
    for name, tensor in tensors.items():
        rows = np.memmap(smollm2_path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
        data = rows.reshape(-1, GGML_TYPES[name].row_bytes(tensor.shape[-1]))[:64].copy()
        theirs = quants.dequantize(data, gguf.GGMLQuantizationType[name])
        assert np.array_equal(bits(dequantize(torch.from_numpy(data), name).numpy()), bits(theirs))


# --- the K types, whose scales are found by a search ------------------------------------------------------------------


def by_llama_cpp(weight: np.ndarray, name: str) -> np.ndarray:
    """Quantize as llama.cpp does, with the function that its wheel happens to export."""
    import xllamacpp.xllamacpp as wheel

    function = getattr(ctypes.CDLL(wheel.__file__), f"quantize_row_{name.lower().replace('_k', '_K')}_ref", None)
    if function is None:
        pytest.skip("this wheel of llama.cpp does not export its quantizer")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    blocks = np.empty((len(weight), GGML_TYPES[name].row_bytes(weight.shape[1])), dtype=np.uint8)
    function(weight.ctypes.data, blocks.ctypes.data, weight.size)
    return blocks


def relative_errors(weight: np.ndarray, blocks: np.ndarray, name: str) -> tuple[float, float]:
    """Return the error, and the error with weights counted by their size, which is what the search makes small."""
    made = quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    squares, error = weight.astype(np.float64) ** 2, (made - weight).astype(np.float64) ** 2
    size = np.abs(weight) + np.sqrt(squares.reshape(-1, 32).mean(-1).repeat(32).reshape(weight.shape))
    return np.sqrt(error.sum() / squares.sum()), np.sqrt((size * error).sum() / (size * squares).sum())


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="no wheel of llama.cpp for this platform")
@pytest.mark.parametrize(("name", "bound"), [("Q4_K", 0.072), ("Q5_K", 0.036), ("Q6_K", 0.0172), ("IQ4_NL", 0.077)])
def test_types_with_a_search_are_no_worse_than_llama_cpps(name, bound, smollm2_path):
    """Of Gaussian numbers and of real weights; the bound is what a Gaussian has been measured at."""
    gaussian = np.random.default_rng(0).normal(0, 0.02, (32, 2048)).astype(np.float32)
    real = read(GGUFCheckpoint(smollm2_path), "model.embed_tokens.weight")[:128].reshape(-1, 256).numpy().copy()
    for weight in (gaussian, real):
        ours = relative_errors(weight, quantize(torch.from_numpy(weight), name).numpy(), name)
        theirs = relative_errors(weight, by_llama_cpp(weight, name), name)
        assert ours[0] <= 1.001 * theirs[0] and ours[1] <= theirs[1]
    assert relative_errors(gaussian, encode(gaussian, name), name)[0] < bound


@pytest.mark.skipif(native.library() is None, reason="no kernels")
@pytest.mark.parametrize("name", METHODS[1:])
def test_the_kernels_make_the_same_bytes(name):
    """Also of odd weights, in more pieces than one, and from bfloat16."""
    odd = np.tile(weights_of_every_kind()[:, :32], 8)
    wide = np.random.default_rng(5).normal(0, 1, (600, 256)) ** 3
    for weight in (odd, wide.astype(np.float32)):
        for given in (weight, to_bfloat16(weight)):
            assert np.array_equal(encode(given, name), encode_reference(given, name))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_what_can_be_said_exactly_is(name):
    """Zeros, and all weights the same, whichever sign."""
    for value in (0.0, 0.5, -0.5):
        weight = np.full((2, 256), value, np.float32)
        assert np.abs(decode_blocks(name, encode(weight, name), 256) - weight).max() <= 2e-3 * abs(value)
