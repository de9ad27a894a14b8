"""Quantized Hugging Face folders, made in the exact form in which the tools that write them do.

Each maker draws random codes, scales and zero points for a weight, packs them as the format's description says, and
returns the weight that the format's formula gives, in float64: `(q - z) * scale`, or `float8 * scale`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Raw:
    """A tensor of a file: its dtype there, and its bits as numpy has them."""

    dtype: str
    array: Array


@dataclass(frozen=True)
class Made:
    """A quantized weight: its components by the last part of their names, and its values, float64 (out, in)."""

    components: dict[str, Raw]
    values: Array


Maker = Callable[[np.random.Generator, tuple[int, int]], Made]


def save(path: Path, tensors: Mapping[str, Raw]) -> None:
    """Write a safetensors file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, raw in tensors.items():
        begin, end = end, end + raw.array.nbytes
        table[name] = {"dtype": raw.dtype, "shape": list(raw.array.shape), "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    data = b"".join(raw.array.tobytes() for raw in tensors.values())
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def bfloat16(values: Array) -> Array:
    """Return float32 numbers that bfloat16 has as its bits."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def stream(codes: Array, num_bits: int) -> Array:
    """Write the codes of each row one after the other, lowest bit first, into 32-bit words: int32 (rows, words)."""
    bits = (codes[..., None].astype(np.int64) >> np.arange(num_bits)) & 1
    bits = bits.reshape(len(codes), -1)
    padded = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 32)))
    return np.packbits(padded.astype(np.uint8), axis=1, bitorder="little").view(np.int32)


def awq_words(codes: Array) -> Array:
    """Pack (rows, n) 4-bit codes as AutoAWQ's GEMM does, eight in a word: int32 (rows, n / 8)."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.int64)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].astype(np.int64) << (4 * place)
    return words.astype(np.uint32).view(np.int32)


def random_scales(random: np.random.Generator, shape: tuple[int, ...], dtype: str, size: float) -> tuple[Raw, Array]:
    """Draw positive scales around `size`: as they are stored, and as float64."""
    values = (size * random.uniform(0.5, 1.5, shape)).astype(np.float32)
    if dtype == "F16":
        return Raw("F16", values.astype(np.float16)), values.astype(np.float16).astype(np.float64)
    if dtype == "BF16":
        bits = bfloat16(values)
        return Raw("BF16", bits), (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return Raw("F32", values), values.astype(np.float64)


def awq(*, group_size: int = 32, version: str = "gemm", zero_point: bool = True) -> Maker:
    """Return a maker of AWQ weights."""

    def make(random: np.random.Generator, shape: tuple[int, int]) -> Made:
        num_rows, num_columns = shape
        size = num_columns if group_size == -1 else group_size
        groups = num_columns // size
        codes = random.integers(0, 16, shape)
        zeros = random.integers(0, 16, (num_rows, groups)) if zero_point else np.full((num_rows, groups), 8)
        scales, of_groups = random_scales(random, (num_rows, groups), "F16", 0.01)
        values = (codes - zeros.repeat(size, 1)) * of_groups.repeat(size, 1)
        if version == "gemm":
            parts = {"qweight": Raw("I32", awq_words(codes.T)), "scales": Raw("F16", scales.array.T.copy())}
            parts |= {"qzeros": Raw("I32", awq_words(zeros.T))} if zero_point else {}
            return Made(parts, values)
        width = -(-groups // 8) * {128: 1, 64: 2, 32: 4}.get(size, 1)
        padded = np.zeros((num_rows, 8 * width), np.int64)
        padded[:, :groups] = zeros
        wide = np.zeros((num_rows, 8 * width), np.float16)
        wide[:, :groups] = scales.array
        parts = {"qweight": Raw("I32", stream(codes, 4)), "qzeros": Raw("I32", stream(padded, 4))}
        return Made(parts | {"scales": Raw("F16", wide)}, values)

    return make


def gptq(
    *,
    bits: int = 4,
    group_size: int = 32,
    sym: bool = True,
    act_order: bool = False,
    version: int = 1,
    with_g_idx: bool = True,
    scale_dtype: str = "F16",
) -> Maker:
    """Return a maker of GPTQ weights."""

    def make(random: np.random.Generator, shape: tuple[int, int]) -> Made:
        num_rows, num_columns = shape
        size = num_columns if group_size == -1 else group_size
        groups = -(-num_columns // size)
        order = np.arange(num_columns) // size
        order = random.permutation(order) if act_order else order
        codes = random.integers(0, 2**bits, shape)
        middle = 2 ** (bits - 1)
        zeros = np.full((num_rows, groups), middle) if sym else random.integers(1, 2**bits, (num_rows, groups))
        scales, of_groups = random_scales(random, (num_rows, groups), scale_dtype, 0.16 / 2**bits)
        parts = {
            "qweight": Raw("I32", stream(codes, bits).T.copy()),
            "qzeros": Raw("I32", stream((zeros - (version == 1)).T, bits)),
            "scales": Raw(scales.dtype, scales.array.T.copy()),
        }
        parts |= {"g_idx": Raw("I32", order.astype(np.int32))} if with_g_idx else {}
        return Made(parts, (codes - zeros[:, order]) * of_groups[:, order])

    return make


def packed(
    *,
    bits: int = 4,
    strategy: str = "group",
    group_size: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    scale_dtype: str = "BF16",
    packed_zeros: bool = True,
) -> Maker:
    """Return a maker of compressed-tensors' pack-quantized weights."""

    def make(random: np.random.Generator, shape: tuple[int, int]) -> Made:
        num_rows, num_columns = shape
        size = group_size if strategy == "group" else num_columns
        groups = num_columns // size
        order = np.arange(num_columns) // size
        order = random.permutation(order) if act_order else order
        least, middle = -(2 ** (bits - 1)), 2 ** (bits - 1)
        codes = random.integers(least, middle, shape)
        of_zeros = (1, 1) if strategy == "tensor" else (num_rows, groups)
        zeros = np.zeros(of_zeros, np.int64) if symmetric else random.integers(least, middle, of_zeros)
        scales, of_groups = random_scales(random, of_zeros, scale_dtype, 0.16 / 2**bits)
        parts = {
            "weight_packed": Raw("I32", stream(codes + middle, bits)),
            "weight_scale": Raw(scales.dtype, scales.array.reshape(-1) if strategy == "tensor" else scales.array),
            "weight_shape": Raw("I64", np.array(shape, np.int64)),
        }
        if not symmetric and packed_zeros and strategy != "tensor":
            parts["weight_zero_point"] = Raw("I32", stream((zeros + middle).T, bits).T.copy())
        elif not symmetric:
            parts["weight_zero_point"] = Raw("I8", zeros.astype(np.int8))
        parts |= {"weight_g_idx": Raw("I32", order.astype(np.int32))} if act_order else {}
        wide = np.broadcast_to(zeros, (num_rows, groups)), np.broadcast_to(of_groups, (num_rows, groups))
        return Made(parts, (codes - wide[0][:, order]) * wide[1][:, order])

    return make


def float8_value(code: int) -> float:
    """Return the number that a code of float8_e4m3fn stands for, by the paper's definition."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def float8(
    strategy: str, *, part: str = "weight_scale", scale_dtype: str = "F32", block: tuple[int, int] = (128, 128)
) -> Maker:
    """Return a maker of float8 weights with scales by `tensor`, `scalar`, `channel` or `block`."""

    def make(random: np.random.Generator, shape: tuple[int, int]) -> Made:
        num_rows, num_columns = shape
        codes = random.integers(0, 127, shape) | (random.integers(0, 2, shape) << 7)  # all but NaN
        levels = np.array([float8_value(code) for code in range(256)])
        sizes = {
            "tensor": (1,), "scalar": (), "channel": (num_rows, 1),
            "block": (-(-num_rows // block[0]), -(-num_columns // block[1])),
        }  # fmt: skip
        scales, of_blocks = random_scales(random, sizes[strategy], scale_dtype, 0.0005)
        spread = of_blocks
        if strategy == "block":
            spread = of_blocks.repeat(block[0], 0)[:num_rows].repeat(block[1], 1)[:, :num_columns]
        parts = {"weight": Raw("F8_E4M3", codes.astype(np.uint8)), part: scales}
        return Made(parts, levels[codes] * spread)

    return make


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
    plain: Mapping[str, Array],
    linears: Mapping[str, Made],
    extra: Mapping[str, Raw] | None = None,
) -> Path:
    """Write a folder: `config.json` with a quantization_config, and all weights; plain ones in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    tensors = {key: Raw("F32", np.ascontiguousarray(values, np.float32)) for key, values in plain.items()}
    for key, made in linears.items():
        tensors |= {key.removesuffix("weight") + part: raw for part, raw in made.components.items()}
    save(folder / "model.safetensors", {**tensors, **(extra or {})})
    return folder
