"""The GGUF container: what gguf writes and reads, ours reads and writes; what is malformed is refused at once."""

import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from llamarium.checkpoints.gguf.file import read_gguf, write_gguf
from llamarium.errors import CheckpointError, ModelNotFoundError, UnsupportedFormatError
from llamarium.quant.formats import GGML_TYPES

pytestmark = pytest.mark.torch

HEADER = struct.Struct("<4sIQQ")


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def row(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(entries: list[bytes], rows: list[bytes], data: bytes = b"", version: int = 3, extra: int = 0) -> bytes:
    head = HEADER.pack(b"GGUF", version, len(rows), len(entries) + extra)
    head += b"".join(entries) + b"".join(rows)
    return head + bytes(-len(head) % 32) + data if data else head


def refused(tmp_path: Path, content: bytes, match: str, error: type[Exception] = CheckpointError) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(error, match=match) as caught:
            read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert time.process_time() - start < 2
    assert peak <= len(content) + 64 * 2**20


METADATA = {
    "general.architecture": "llama",
    "text": "späße \N{GRINNING FACE}",
    "empty": "",
    "yes": True,
    "small": 7,
    "negative": -7,
    "big": 2**40,
    "number": 0.5,
    "strings": ["a", "", "Ġthe"],
    "ints": [1, -2, 3],
    "floats": [0.5, -1.0],
    "bools": [True, False],
}


def test_write_then_read(tmp_path):
    path = tmp_path / "a.gguf"
    data = {
        "a": ("F32", (2, 3), os.urandom(24)),
        "b": ("Q8_0", (2, 64), os.urandom(136)),
        "c": ("F16", (5,), bytes(10)),
    }
    write_gguf(path, METADATA, data)
    file = read_gguf(path)
    assert file.metadata == METADATA and file.version == 3
    content = path.read_bytes()
    for name, (type_name, shape, raw) in data.items():
        tensor = file.tensors[name]
        assert (tensor.type_name, tensor.shape, tensor.num_bytes) == (type_name, shape, len(raw))
        assert content[tensor.offset : tensor.offset + tensor.num_bytes] == raw
    assert list(tmp_path.iterdir()) == [path]


def test_gguf_reads_what_we_write(tmp_path):
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    write_gguf(tmp_path / "a.gguf", METADATA, {"x": ("F32", (2, 32), values.tobytes())})
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    assert {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} == METADATA
    assert np.array_equal(theirs.tensors[0].data, values)


def test_we_read_what_gguf_writes(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_token_list(["a", "Ġthe", "\N{GRINNING FACE}"])
    writer.add_token_types([1, 3, 6])
    writer.add_rope_freq_base(500000.0)
    writer.add_add_bos_token(True)
    values = {"x": np.ones((3, 64), np.float16), "y": gguf.quantize(np.ones((2, 64), np.float32), 8)}
    writer.add_tensor("x", values["x"])
    writer.add_tensor("y", values["y"], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    assert dict(ours.metadata) == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert set(ours.tensors) == set(values)
    content = (tmp_path / "a.gguf").read_bytes()
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.offset, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.shape == tuple(tensor.shape.tolist())[::-1] and found.ggml_type == tensor.tensor_type
        assert content[found.offset :][: found.num_bytes] == values[tensor.name].tobytes()


def test_every_value_type(tmp_path):
    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    entries = [entry(f"k{kind}", kind, struct.pack(f"<{code}", 1)) for kind, code in kinds.items()]
    nested = struct.pack("<IQ", 9, 2) + 2 * (struct.pack("<IQ", 8, 1) + string("x"))
    (tmp_path / "a.gguf").write_bytes(build([*entries, entry("nested", 9, nested)], []))
    metadata = dict(read_gguf(tmp_path / "a.gguf").metadata)
    assert metadata.pop("nested") == [["x"], ["x"]]
    assert metadata == {f"k{kind}": 1 for kind in kinds} and metadata["k7"] is True


@pytest.mark.parametrize("alphabet", ["ab", "a\u0120\U0001f600", "a\0\1"])
@pytest.mark.parametrize("shortest, longest", [(0, 2), (1, 12), (1, 127), (200, 256), (1, 300), (3000, 4000)])
def test_strings_of_every_length(tmp_path, alphabet, shortest, longest):
    rng = random.Random(longest)
    count = 20_000 if longest < 20 else 500
    strings = ["".join(rng.choices(alphabet, k=rng.randint(shortest, longest))) for _ in range(count)]
    write_gguf(tmp_path / "a.gguf", {"a": strings, "b": "behind", "c": strings[:1], "d": strings[:2]}, {})
    assert read_gguf(tmp_path / "a.gguf").metadata == {"a": strings, "b": "behind", "c": strings[:1], "d": strings[:2]}


def test_version_2_and_alignment(tmp_path):
    alignment = entry("general.alignment", 4, struct.pack("<I", 64))
    head = build([alignment], [row("x", (1,))], version=2)
    (tmp_path / "a.gguf").write_bytes(head + bytes(-len(head) % 64) + b"abcd" + bytes(60))
    file = read_gguf(tmp_path / "a.gguf")
    assert file.version == 2 and file.tensors["x"].offset % 64 == 0


def test_data_may_end_without_its_padding(tmp_path):
    (tmp_path / "a.gguf").write_bytes(build([], [row("x", (1,))], bytes(4)))
    assert read_gguf(tmp_path / "a.gguf").tensors["x"].num_bytes == 4


ONE = build([], [row("x", (8,))], bytes(32))
ENTRY = entry("a", 4, bytes(4))


@pytest.mark.parametrize(
    ("content", "match"),
    {
        "empty": (b"", "0 bytes"),
        "short": (b"GGUF\3\0\0\0", "8 bytes"),
        "magic": (b"PK\3\4" + bytes(60), r"is no GGUF file: begins with b'PK\\x03\\x04'; expected b'GGUF'$"),
        "tensor count": (HEADER.pack(b"GGUF", 3, 2**63, 0) + bytes(26), "9,223,372,036,854,775,808 items"),
        "entry count": (HEADER.pack(b"GGUF", 3, 0, 2**64 - 1) + bytes(26), "18,446,744,073,709,551,615 items"),
        "more entries than there are": (build([ENTRY], [], extra=1), "items|cut off|expected"),
        "string length": (build([struct.pack("<Q", 2**60) + bytes(20)], []), "a string of"),
        "array length": (build([entry("a", 9, struct.pack("<IQ", 4, 2**61))], []), "2,305,843,009,213,693,952 items"),
        "array of strings": (build([entry("a", 9, struct.pack("<IQ", 8, 2**61))], []), "items"),
        "array type": (build([entry("a", 9, struct.pack("<IQ", 13, 1) + bytes(8))], []), "value type 13"),
        "value type": (build([entry("a", 99, bytes(8))], []), "value type 99"),
        "bool": (build([entry("a", 7, b"\2")], []), "neither 0 nor 1"),
        "nested": (build([entry("a", 9, struct.pack("<IQ", 9, 1) * 5 + bytes(12))], []), "nested deeper"),
        "no UTF-8": (build([entry("a", 8, string(b"\xff\xfe"))], []), "no UTF-8"),
        "key no UTF-8": (build([string(b"\xff") + bytes(5)], []), "no UTF-8"),
        "key twice": (build([ENTRY, ENTRY], []), "metadata a: is there twice"),
        "tensor twice": (build([], [row("x", (1,)), row("x", (1,), offset=32)], bytes(64)), "tensor x: is there twice"),
        "dims": (build([], [row("x", (1,) * 5)], bytes(32)), "5 dimensions"),
        "many dims": (build([], [string("x") + struct.pack("<I", 2**32 - 1) + bytes(24)]), "4294967295 dimensions"),
        "dim of 0": (build([], [row("x", (4, 0))], bytes(32)), r"shape \(0, 4\)"),
        "product": (build([], [row("x", (2**62, 4))], bytes(32)), "needs 73786976294838206464 bytes"),
        "block": (build([], [row("x", (33,), kind=8)], bytes(64)), "blocks of 32"),
        "unaligned": (build([], [row("x", (1,), offset=4)], bytes(64)), "multiple of the alignment"),
        "past the end": (build([], [row("x", (8,), offset=2**40)], bytes(32)), "the file ends at"),
        "overlap": (build([], [row("x", (16,)), row("y", (8,), offset=32)], bytes(64)), "tensor y: overlaps"),
        "gap": (build([], [row("x", (8,)), row("y", (8,), offset=64)], bytes(96)), "tensor y: leaves a gap"),
        "reversed": (build([], [row("x", (8,), offset=64), row("y", (32,))], bytes(128)), "overlaps"),
        "truncated": (ONE[:-1], "the file ends at"),
        "extended": (ONE + b"\0", "1 byte follows"),
        "alignment 0": (build([entry("general.alignment", 4, bytes(4))], []), "general.alignment: is 0"),
        "alignment 24": (build([entry("general.alignment", 4, struct.pack("<I", 24))], []), "power of two"),
        "alignment huge": (build([entry("general.alignment", 4, struct.pack("<I", 2**31))], []), "power of two"),
        "alignment text": (build([entry("general.alignment", 8, string("32"))], []), "power of two"),
    }.values(),
    ids=lambda value: None,
)
def test_malformed(tmp_path, content, match):
    refused(tmp_path, content, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (build([], [], version=1), "GGUF version 1"),
        (build([], [], version=4), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (build([], [row("x", (256,), kind=34)], bytes(96)), r"ggml type 34 \(TQ1_0\)"),
        (build([], [row("x", (256,), kind=4000)], bytes(96)), r"ggml type 4000 \(unknown\)"),
    ],
)
def test_unsupported(tmp_path, content, match):
    refused(tmp_path, content, match, UnsupportedFormatError)


def test_a_large_file_of_tiny_items_is_refused_early(tmp_path):
    many = 3 * 2**20
    strings = entry("a", 9, struct.pack("<IQ", 8, many) + string("ab") * many)
    refused(tmp_path, build([strings], []), "more than a header")
    bytes_ = entry("a", 9, struct.pack("<IQ", 0, 40 * 2**20) + bytes(40 * 2**20))
    refused(tmp_path, build([bytes_], []), "more than a header")
    wide = entry("a", 9, struct.pack("<IQ", 8, 24) + string("a" * 2**20 + "\N{GRINNING FACE}") * 24)
    refused(tmp_path, build([wide], []), "more than a header")


def test_terminal_escapes_in_names_are_shown_escaped(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(build([entry("\x1b[2J", 99, bytes(8))], []))
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert "\x1b" not in str(caught.value) and r"\x1b[2J" in str(caught.value)


def test_what_is_no_file(tmp_path):
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_gguf(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="leads nowhere"):
        read_gguf(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_gguf(tmp_path / "pipe")


def test_the_sizes_are_ggmls():
    for name, form in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (form.ggml_type, form.block_size, form.block_bytes) == (kind, *gguf.GGML_QUANT_SIZES[kind])


def test_writing_checks_sizes_and_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError, match=r"tensor x: 3 bytes; F32 \(1,\) has 4"):
        write_gguf(path, {}, {"x": ("F32", (1,), b"abc")})
    with pytest.raises(UnsupportedFormatError, match="Q9"):
        write_gguf(path, {}, {"x": ("Q9", (1,), b"abc")})
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    write_gguf(path, {}, {"x": ("F32", (1,), b"abcd")})
    assert read_gguf(path).tensors["x"].num_bytes == 4


def test_reading_needs_no_torch():
    code = (
        "import sys, llamarium.checkpoints.gguf.file; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_header_of_llama_3s_size_is_read_quickly(tmp_path):
    tokens = [f"token{i}" for i in range(128256)]
    merges = [f"tok en{i}" for i in range(280147)]
    write_gguf(tmp_path / "a.gguf", {"tokens": tokens, "merges": merges, "types": [1] * len(tokens)}, {})
    start = time.process_time()
    file = read_gguf(tmp_path / "a.gguf")
    assert time.process_time() - start < 2  # a fifth of a second on a machine with nothing else to do
    assert file.metadata["merges"] == merges
