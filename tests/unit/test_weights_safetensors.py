"""The safetensors container: what safetensors writes, ours reads; what is malformed is refused before anything else."""

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llamarium.checkpoints.huggingface.safetensors_file import read_safetensors
from llamarium.errors import CheckpointError, ModelNotFoundError, UnsupportedFormatError

pytestmark = pytest.mark.torch


def build(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def row(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_we_read_what_safetensors_writes(tmp_path):
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
    tensors = {f"t{i}": (torch.arange(6) % 2).view(2, 3).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors["empty"] = torch.empty(0, 3)
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, {"format": "pt"})
    content, found = path.read_bytes(), read_safetensors(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape)
        raw = content[found[name].offset :][: found[name].num_bytes]
        assert raw == bytes(tensor.flatten().view(torch.uint8).tolist())


GOOD = build({"x": row(0, 8, [2])}, bytes(8))
TWICE = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "0 bytes cannot hold"),
        (b"\3\0\0", "3 bytes cannot hold"),
        (build({}, length=2**63), "9223372036854775808 bytes"),
        (build({}, length=3), "3 bytes that is announced"),
        (build(b" " * (2**21 + 1)), "at most 2097152"),
        (build(b"{"), "no JSON"),
        (build(b"[]"), "no JSON object"),
        (build(b"\xff"), "no JSON"),
        (build(b"[" * 100_000 + b"]" * 100_000), "no JSON|nested"),
        (build(b'{"x":' * 50_000 + b"1" + b"}" * 50_000), "no JSON|nested"),
        (build(b'{"x":' + b"9" * 10_000 + b"}"), "no JSON"),
        (build(TWICE, bytes(4)), "the key .x. twice"),
        (build({"x": 1}), "not described by"),
        (build({"x": {"dtype": "F32", "shape": []}}), "not described by"),
        (build({"x": {**row(0, 4, []), "more": 1}}, bytes(4)), "not described by"),
        (build({"x": row(4, 0, [])}, bytes(4)), "begin not after its end"),
        (build({"x": row(-4, 0, [])}, bytes(4)), "expected sizes"),
        (build({"x": row(0, 4, [-1, -1])}, bytes(4)), "expected sizes"),
        (build({"x": row(0, 4, [True])}, bytes(4)), "expected sizes"),
        (build({"x": row(0, 4, [1.0])}, bytes(4)), "expected sizes"),
        (build({"x": {**row(0, 4, []), "shape": "1"}}, bytes(4)), "expected sizes"),
        (build({"x": {**row(0, 4, []), "data_offsets": [0]}}, bytes(4)), "expected sizes"),
        (build({"x": row(0, 4, [1] * 100_000)}, bytes(4)), "expected sizes"),
        (build({"x": row(0, 4, [2])}, bytes(4)), r"4 bytes; F32 \(2,\) is 8"),
        (build({"x": row(0, 2**64, [2**62])}, bytes(4)), "expected sizes|the file at"),
        (build({"x": row(0, 4, [2**62, 2**62])}, bytes(4)), "is 85070591730234615865843651857942052864"),
        (build({"x": row(0, 2**40, [2**38])}, bytes(4)), "the file at"),
        (build({"x": row(0, 4, [1]), "y": row(0, 4, [1])}, bytes(4)), "overlaps"),
        (build({"x": row(0, 8, [2]), "y": row(4, 8, [1])}, bytes(8)), "tensor y overlaps"),
        (build({"x": row(0, 4, [1]), "y": row(8, 12, [1])}, bytes(12)), "tensor y leaves a gap"),
        (build({"x": row(4, 8, [1])}, bytes(8)), "leaves a gap"),
        (GOOD[:-1], "the tensors end at"),
        (GOOD + b"\0", "the tensors end at"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_malformed(tmp_path, content, match):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError, match=match) as caught:
            read_safetensors(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600
    assert time.process_time() - start < 2
    assert peak <= len(content) + 64 * 2**20


@pytest.mark.parametrize("dtype", ["F31", "", "\x1b[2J", None, 3, []])
def test_unknown_dtypes(tmp_path, dtype):
    (tmp_path / "a").write_bytes(build({"x": {**row(0, 4, [1]), "dtype": dtype}}, bytes(4)))
    with pytest.raises(UnsupportedFormatError, match="tensor x has dtype") as caught:
        read_safetensors(tmp_path / "a")
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"",', b"0.5,", b'"ab",'])
def test_a_full_header_of_tiny_items_stays_within_memory(tmp_path, unit):
    header = b'{"x":[' + unit * ((2**21 - 20) // len(unit)) + b"0]}"
    (tmp_path / "a").write_bytes(build(header))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="not described by"):
            read_safetensors(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < len(header) + 64 * 2**20
    finally:
        tracemalloc.stop()


def test_many_equal_names_are_refused_quickly(tmp_path):
    names = b",".join(b'"%d":0' % i for i in range(180_000))
    (tmp_path / "a").write_bytes(build(b"{" + names + b',"179999":0}'))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="twice"):
        read_safetensors(tmp_path / "a")
    assert time.process_time() - start < 2


def test_what_is_no_file(tmp_path: Path):
    with pytest.raises(ModelNotFoundError):
        read_safetensors(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_safetensors(tmp_path)
