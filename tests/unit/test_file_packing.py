"""Blocks that are packed as they are read from a file: the tiles of blocks in memory, and faults of the file."""

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from llamarium.checkpoints.beside import Beside
from llamarium.checkpoints.checkpoint import TensorEntry
from llamarium.checkpoints.gguf.packing import FilePacking
from llamarium.checkpoints.gguf.reader import FilePlace
from llamarium.checkpoints.storage import unpermute
from llamarium.errors import CheckpointError, TokenizerError, warn_caller
from llamarium.kernels import native
from llamarium.quant.formats import FORMATS, PACKED_FORMATS
from llamarium.quant.packing import count_nonfinite_tiles, pack_blocks

pytestmark = [pytest.mark.quick, pytest.mark.skipif(native.library() is None, reason="needs the C kernels")]
HALF_NAN, HALF_INFINITY = 0x7E00, 0xFC00


@dataclass
class File:
    """A file of blocks at random, and what `FilePacking` asks a checkpoint."""

    path: Path
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    places: dict[str, FilePlace] = field(default_factory=dict)

    def add(self, key: str, type_name: str, shape: tuple[int, int], head_rows: int = 0, seed: int = 0) -> None:
        num_bytes = FORMATS[type_name].row_bytes(shape[1])
        rows = np.random.default_rng(seed).integers(0, 0x78, (shape[0], num_bytes), dtype=np.uint8)  # no NaN
        offset = self.path.stat().st_size if self.path.exists() else 0
        with self.path.open("ab") as file:
            file.write(b"gap" + rows.tobytes())
        self.entries[key] = TensorEntry(key, shape, type_name, rows.nbytes, self.path, key)
        self.rows[key], self.places[key] = rows, FilePlace(self.path, offset + 3, head_rows)

    def place(self, key: str) -> FilePlace:
        return self.places[key]

    def expected(self, key: str) -> np.ndarray:
        """Return the tiles of the rows in memory, moved by `unpermute`."""
        entry, head_rows = self.entries[key], self.places[key].head_rows
        rows = unpermute(self.rows[key], entry.shape[0] // head_rows) if head_rows else self.rows[key]
        return pack_blocks(rows, entry.shape[1], PACKED_FORMATS[entry.dtype])


@pytest.mark.parametrize("type_name", sorted(PACKED_FORMATS))
def test_tiles_are_those_of_blocks_in_memory(tmp_path, type_name):
    file = File(tmp_path / "blocks")
    file.add("heads of 24", type_name, (24 * 7, 512), head_rows=24)
    file.add("one row", type_name, (1, 256))
    file.add("several pieces, not of whole panels", type_name, (2055, 768), seed=1)
    file.add("heads over several pieces", type_name, (64 * 40, 512), head_rows=64, seed=2)
    file.add("wide", type_name, (33, 256 * 200), seed=3)
    with FilePacking(file, file.entries) as packing:
        told = list[int]()
        packing.wait(told.append)
    assert told[-1] == sum(entry.num_bytes for entry in file.entries.values()) and told == sorted(told)
    for key, weight in packing.weights.items():
        assert (weight.key, weight.type_name, weight.shape) == (key, type_name, file.entries[key].shape)
        assert weight.data.flags.c_contiguous and np.array_equal(weight.data, file.expected(key)), key
        assert packing.num_nonfinite(key) == 0


@pytest.mark.parametrize("type_name", sorted(PACKED_FORMATS))
def test_scales_that_are_no_numbers_are_counted(tmp_path, type_name):
    file = File(tmp_path / "blocks")
    file.add("w", type_name, (40, 512))
    file.add("clean", type_name, (40, 512))
    format = FORMATS[type_name]
    num_blocks = 512 // format.block_size
    blocks = file.rows["w"].reshape(40, num_blocks, -1)
    at = slice(-2, None) if type_name == "Q6_K" else slice(0, 2)
    for row, block, bits in ((0, 0, HALF_NAN), (17, num_blocks - 1, HALF_INFINITY), (39, 0, HALF_NAN)):
        blocks[row, block, at] = np.array([bits], np.uint16).view(np.uint8)
    with file.path.open("r+b") as out:
        out.seek(file.places["w"].offset)
        out.write(blocks.tobytes())
    with FilePacking(file, file.entries) as packing:
        packing.wait(lambda num_bytes: None)
    assert packing.num_nonfinite("w") == 3 * format.block_size
    assert packing.num_nonfinite("w") == count_nonfinite_tiles(packing.weights["w"].data, PACKED_FORMATS[type_name])
    assert packing.num_nonfinite("clean") == 0


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    file = File(tmp_path / "blocks")
    file.add("w", "Q4_0", (256, 512))
    with file.path.open("r+b") as out:
        out.truncate(file.path.stat().st_size - 100)
    with FilePacking(file, file.entries) as packing, pytest.raises(CheckpointError, match="ended early"):
        packing.wait(lambda num_bytes: None)
    file.path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        FilePacking(file, file.entries)


def test_leaving_ends_the_work(tmp_path):
    file = File(tmp_path / "blocks")
    file.add("w", "Q4_0", (2**15, 4096))
    begin = time.process_time()
    with FilePacking(file, file.entries) as packing:
        packing.wait(lambda num_bytes: None)
    whole = time.process_time() - begin
    begin = time.process_time()
    with pytest.raises(KeyboardInterrupt), FilePacking(file, file.entries):
        raise KeyboardInterrupt
    assert time.process_time() - begin < whole / 2


def test_nothing_to_pack_is_done_at_once(tmp_path):
    with FilePacking(File(tmp_path / "none"), ()) as packing:
        packing.wait(lambda num_bytes: None)
    assert packing.weights == {}


def test_what_is_beside_warns_where_its_result_is_taken():
    def work() -> str:
        warn_caller("of something")
        return "done"

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Beside(work) as beside:
            beside.check()
        assert caught == []
        assert beside.result() == "done"
    (warning,) = caught
    assert str(warning.message) == "of something" and warning.filename == __file__


def test_what_has_failed_beside_fails_at_the_next_check():
    def fail() -> None:
        raise TokenizerError("no")

    with Beside(fail) as beside:
        pass
    with pytest.raises(TokenizerError, match="no"):
        beside.check()
    with pytest.raises(TokenizerError, match="no"):
        beside.result()
