"""pytorch_model.bin: what torch reads with weights_only, ours reads without torch; what is no tensor never runs."""

import collections
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import llamarium
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.pytorch.tensors import read_torch_file
from llamarium.errors import CheckpointError, LlamariumError, ModelNotFoundError, UnsupportedFormatError

pytestmark = pytest.mark.torch

NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.int16, "I64": np.int64, "I32": np.int32, "I16": np.int16}
NUMPY |= {"I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}
Q = "model.layers.0.self_attn.q_proj.weight"


class Hostile:
    """Its pickle calls `call` with `arguments` when it is loaded."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call, self.arguments


def refused(path: Path, *words: str, error: type[LlamariumError] = CheckpointError) -> None:
    """Open a file or a folder that must be refused, within two seconds and little memory."""
    size = sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size
    read = open_checkpoint if path.is_dir() else read_torch_file

    start = time.process_time()
    with pytest.raises(error) as caught:
        read(path)
    assert time.process_time() - start < 2

    tracemalloc.start()  # which slows reading down
    try:
        with pytest.raises(error):
            read(path)
        assert tracemalloc.get_traced_memory()[1] <= size + 64 * 2**20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.isprintable() and len(message) < 1500


def equal_to_torchs(path: Path) -> None:
    """Compare every tensor with what torch loads: dtype, shape and bits; float64 is rounded to float32."""
    theirs, ours = torch.load(path, weights_only=True, map_location="cpu"), read_torch_file(path)
    assert set(ours) == {name for name, value in theirs.items() if isinstance(value, torch.Tensor)}
    for name, (file, tensor) in ours.items():
        expected = theirs[name].detach()
        expected = expected.float() if expected.dtype == torch.float64 else expected
        bits = expected.contiguous().view(torch.int16) if expected.dtype == torch.bfloat16 else expected
        assert tensor.shape == tuple(expected.shape), name
        for copy in (False, True):
            found = file.array(tensor.offset, tensor.shape, NUMPY[tensor.dtype], copy=copy)
            assert found.dtype == bits.numpy().dtype and found.tobytes() == bits.numpy().tobytes(), name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_gives_back_the_model(model_files, shards, dtype, tied):
    files = model_files(dtype=dtype, tie_word_embeddings=tied, head_dim=32)
    checkpoint = open_checkpoint(files.pytorch_bin(shards=shards))
    assert checkpoint.config == files.config and set(checkpoint.entries) == set(files.weights)
    for key, weight in files.weights.items():
        values = read(checkpoint, key)
        assert values.dtype == dtype and torch.equal(values, weight), key
    assert checkpoint.format == "huggingface" and checkpoint.entries[Q].file.suffix == ".bin"


def test_a_folder_computes_what_its_safetensors_compute(model_files):
    files = model_files()
    ids = torch.tensor([[1, 5, 17, 200]])
    ours, theirs = (
        llamarium.load(path, device="cpu").model(ids)[0] for path in (files.pytorch_bin(), files.huggingface())
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_layout_and_dtype_is_what_torch_reads(tmp_path, protocol):
    base = torch.randn(6, 8)
    with_attributes = torch.nn.Parameter(torch.randn(2, 3))
    with_attributes.sequence_parallel, with_attributes.names_of_rows = True, ["a", "b"]
    wide = torch.arange(4 * 6 * 8).float().reshape(4, 6, 8)
    tensors: dict[str, Any] = {
        "plain": base, "transposed": base.t(), "a slice": wide[1:3], "columns": base[:, 2:5], "steps": base[::2, ::3],
        "permuted": wide.permute(2, 0, 1), "one": wide[2:3, 1:2].transpose(0, 2), "scalar": torch.tensor(0.5),
        "empty": torch.zeros(0, 3), "no columns": torch.zeros(3, 0).double(), "tied": base,
        "half": base.half(), "bfloat": base.bfloat16().t(), "double": base.double(), "double t": base.double().t(),
        "long": torch.arange(5), "int": torch.arange(5, dtype=torch.int32), "short": torch.arange(5).short(),
        "char": torch.arange(5).to(torch.int8), "byte": torch.arange(5).to(torch.uint8), "bool": base > 0,
        "parameter": torch.nn.Parameter(torch.randn(3)), "parameter with attributes": with_attributes,
    }  # fmt: skip
    torch.save(tensors, tmp_path / "a.bin", pickle_protocol=protocol)
    if protocol == 2:
        equal_to_torchs(tmp_path / "a.bin")
        return
    torch.save(tensors, tmp_path / "two.bin")
    ours, theirs = read_torch_file(tmp_path / "a.bin"), read_torch_file(tmp_path / "two.bin")
    assert {n: (t.shape, t.dtype) for n, (_, t) in ours.items()} == {
        n: (t.shape, t.dtype) for n, (_, t) in theirs.items()
    }
    for name, (file, tensor) in ours.items():
        other, of_other = theirs[name]
        assert np.array_equal(
            file.view(tensor.offset, tensor.num_bytes), other.view(of_other.offset, of_other.num_bytes)
        )


def test_a_modules_state(tmp_path):
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "a.bin")
    equal_to_torchs(tmp_path / "a.bin")


def test_values_that_are_no_tensors_are_named(tmp_path):
    torch.save({"x": torch.zeros(2), "step": 3, "args": {"lr": 0.1}, 7: None}, tmp_path / "a.bin")
    with pytest.warns(UserWarning, match=r"step \(int\), args \(dict\), a int \(NoneType\)"):
        assert set(read_torch_file(tmp_path / "a.bin")) == {"x"}


def test_torch_is_not_imported(model_files):
    folder = model_files().pytorch_bin(shards=2)
    code = "import sys; sys.modules['torch'] = None; from llamarium.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "info", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- folders ------------------------------------------------------------------------------------------------------


def test_safetensors_come_first(model_files):
    files = model_files()
    folder = files.huggingface()
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    assert open_checkpoint(folder).entries[Q].file.name == "model.safetensors"


def test_shards_that_are_missing_or_lie_elsewhere(model_files):
    folder = model_files().pytorch_bin(shards=3)
    part = folder / "pytorch_model-00002-of-00003.bin"
    content = part.read_bytes()
    part.unlink()
    refused(folder, part.name, error=ModelNotFoundError)
    part.write_bytes(content)
    index = folder / "pytorch_model.bin.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"][Q] = "../pytorch_model.bin"
    index.write_text(json.dumps(raw))
    refused(folder, "../pytorch_model.bin", "expected a file name without a folder")


def test_a_tensor_too_many_is_a_warning_and_one_too_few_is_refused(model_files):
    files = model_files()
    files.weights["model.more"] = torch.arange(4)
    with pytest.warns(UserWarning, match=r"model\.more"):
        assert Q in open_checkpoint(files.pytorch_bin()).entries
    del files.weights["model.more"], files.weights[Q]
    refused(files.pytorch_bin(), Q)


def test_a_weight_of_integers_is_refused(model_files):
    files = model_files()
    files.weights[Q] = files.weights[Q].to(torch.int8)
    refused(files.pytorch_bin(), Q, "I8", error=UnsupportedFormatError)


def test_a_file_that_changes_in_use_is_noticed(model_files):
    folder = model_files(dtype=torch.float64).pytorch_bin()
    checkpoint = open_checkpoint(folder)
    checkpoint.stored(Q)
    checkpoint.check_unchanged()
    os.truncate(folder / "pytorch_model.bin", 100)
    with pytest.raises(CheckpointError):
        checkpoint.check_unchanged()


# --- pickles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("beside", [True, False])
def test_code_is_refused_and_does_not_run(tmp_path, protocol, beside):
    proof = tmp_path / "it ran"
    hostile = Hostile(os.system, f"touch '{proof}'")
    torch.save({"x": torch.zeros(2), "y": hostile} if beside else hostile, tmp_path / "a.bin", pickle_protocol=protocol)
    refused(tmp_path / "a.bin", "system", "is not run")
    assert not proof.exists()


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (bytearray, (2**40,)), (collections.Counter, ()), (torch.empty, (2**40,)), (getattr, ("os", "system")),
        (eval, ("1",)), (torch.load, ("x",)), (torch.storage._load_from_bytes, (b"x",)),
    ],
)  # fmt: skip
def test_only_tensors_are_made(tmp_path, call, arguments):
    torch.save({"x": Hostile(call, *arguments)}, tmp_path / "a.bin")
    refused(tmp_path / "a.bin", "its pickle names")


def save_program(path: Path, program: bytes, storage: bytes = bytes(64)) -> Path:
    """Write an archive as torch does, with this pickle and one storage."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/data/0", storage)
        archive.writestr("a/version", "3\n")
    return path


def tensor_program(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int = 0,
    items: Any = 16,
    key: str = "0",
    more: bytes = b"",
) -> bytes:
    """Return the pickle of {"x": a tensor}, written by pickle itself."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", items) if obj == "the storage" else None

    call = Hostile(
        torch._utils._rebuild_tensor_v2, "the storage", offset, shape, strides, False, collections.OrderedDict()
    )
    out = io.BytesIO()
    Pickler(out, 2).dump({"x": call})
    return out.getvalue()[:-1] + more + b"."


def test_the_tests_own_pickle_is_torchs(tmp_path):
    path = save_program(tmp_path / "a.bin", tensor_program((4, 4), (1, 4)), np.arange(16, dtype=np.float32).tobytes())
    file, tensor = read_torch_file(path)["x"]
    expected = np.arange(16, dtype=np.float32).reshape(4, 4).T
    assert np.array_equal(file.array(tensor.offset, tensor.shape, np.float32), expected)
    equal_to_torchs(path)


@pytest.mark.parametrize(
    "arguments",
    {
        "expanded": ((2**20, 2**20), (0, 0)),
        "expanded within": ((2**20, 4), (0, 1)),
        "overlapping": ((16, 16), (0, 1)),
        "past the end": ((4, 4), (4, 1), 1),
        "far offset": ((1,), (1,), 2**62),
        "negative offset": ((1,), (1,), -1),
        "negative stride": ((4,), (-1,), 3),
        "negative size": ((-4,), (1,)),
        "huge product": ((2**62, 2**62, 2**62), (1, 1, 1)),
        "huge number": ((10**5000,), (1,)),
        "huge storage": ((4,), (1,), 0, 10**5000),
        "large storage": ((2**40,), (1,), 0, 2**40),
        "no such storage": ((4,), (1,), 0, 16, "1"),
        "more strides": ((4,), (1, 1)),
        "many dimensions": ((1,) * 100, (1,) * 100),
        "a bool": ((True,), (1,)),
        "a text": (("4",), (1,)),
        "items are a bool": ((1,), (1,), 0, True),
    }.values(),
    ids=lambda value: None,
)
def test_claims_are_checked_before_anything_is_allocated(tmp_path, arguments):
    refused(save_program(tmp_path / "a.bin", tensor_program(*arguments)), "a.bin")


@pytest.mark.parametrize(
    "program",
    {
        "tuples of tuples": b"\x80\x02)" + b"q\x00h\x00h\x00\x86" * 2000 + b".",
        "as a name": b"\x80\x02}" + b")" + b"q\x00h\x00h\x00\x86" * 2000 + b"Ns.",
        "as a size": tensor_program((1,), (1,))[:-1] + b")" + b"q\x00h\x00h\x00\x86" * 2000 + b"0.",
        "many operations": b"\x80\x02" + b"N" * (2**20 - 10) + b".",
        "deep": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "a long text": b"\x80\x02X" + struct.pack("<I", 2**31 - 1) + b"x.",
        "a long number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        "a huge memo": b"\x80\x02Np" + b"9" * 5000 + b"\n.",
        "no stop": b"\x80\x02}",
        "more after the stop": b"\x80\x02}.}.",
        "an empty stack": b"\x80\x02\x85.",
        "no mark": b"\x80\x02}u.",
        "a mark as a value": b"\x80\x02}(.",
        "not in the memo": b"\x80\x02h\x07.",
        "an instance": b"\x80\x02(ios\nsystem\n.",
        "an extension": b"\x80\x02\x82\x01.",
        "a build of nothing": b"\x80\x02NNb.",
        "itself": b"\x80\x02}q\x00U\x01xh\x00s.",
        "empty": b"",
    }.values(),
    ids=lambda value: None,
)
def test_odd_programs(tmp_path, program):
    refused(save_program(tmp_path / "a.bin", program), "a.bin")


def test_tied_weights_may_share_bytes_and_others_may_not(tmp_path):
    shared = torch.zeros(256, 4096)
    torch.save({"a": shared, "b": shared}, tmp_path / "a.bin")
    assert set(read_torch_file(tmp_path / "a.bin")) == {"a", "b"}
    torch.save({f"x{i}": shared for i in range(100)}, tmp_path / "a.bin")
    refused(tmp_path / "a.bin", "share bytes")
    torch.save({f"x{i}": shared[i:] for i in range(100)}, tmp_path / "a.bin")
    refused(tmp_path / "a.bin", "share bytes")


# --- archives -----------------------------------------------------------------------------------------------------


def test_old_layouts_say_what_to_do(tmp_path):
    torch.save({"x": torch.zeros(2)}, tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    refused(tmp_path / "a.bin", "before 1.6", "weights_only=True", error=UnsupportedFormatError)


def change(path: Path, edit: Callable[[bytearray], None]) -> Path:
    content = bytearray(path.read_bytes())
    edit(content)
    path.write_bytes(content)
    return path


def test_a_bomb_is_refused_unopened(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", tensor_program((2**26,), (1,), 0, 2**26))
        archive.writestr("a/data/0", bytes(2**28))
    refused(tmp_path / "a.bin", "is compressed")


def test_records_that_overlap_are_refused(tmp_path):
    """The directory says that two storages are one place in the file."""
    path = tmp_path / "a.bin"
    torch.save({"x": torch.zeros(64), "y": torch.ones(64)}, path)
    with zipfile.ZipFile(path) as archive:
        first, second = (archive.getinfo(f"a/data/{i}").header_offset for i in range(2))

    def edit(content: bytearray) -> None:
        at = content.rindex(struct.pack("<I", second))
        content[at : at + 4] = struct.pack("<I", first)

    refused(change(path, edit), "differs from the header before it")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", tensor_program((4,), (1,)))
        archive.writestr("a/data/0", bytes(64))
        archive.writestr("a/data/1", bytes(64))

    def longer(content: bytearray) -> None:  # both sizes of the first storage in the directory
        at = content.rindex(b"a/data/0") - 46 + 20
        content[at : at + 8] = struct.pack("<2I", 120, 120)

    refused(change(path, longer), "overlaps")


def test_big_endian_numbers_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as archive:
        archive.writestr("a/data.pkl", tensor_program((4,), (1,)))
        archive.writestr("a/byteorder", "big")
        archive.writestr("a/data/0", bytes(64))
    refused(tmp_path / "a.bin", "big-endian", error=UnsupportedFormatError)


def test_a_file_that_python_wrote_with_odd_offsets_is_read(tmp_path):
    """Another writer does not align records, so that floats begin at any byte."""
    numbers = np.arange(16, dtype=np.float32)
    for prefix in ("a", "ab", "abc", "abcd"):
        path = tmp_path / f"{prefix}.bin"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{prefix}/data.pkl", tensor_program((16,), (1,)))
            archive.writestr(f"{prefix}/data/0", numbers.tobytes())
        file, tensor = read_torch_file(path)["x"]
        assert np.array_equal(file.array(tensor.offset, tensor.shape, np.float32), numbers)
