"""Writing: what a message names when the disk says no."""

import errno
import os
from pathlib import Path

import pytest

from llamarium.errors import OutputError
from llamarium.io import atomic_file, atomic_folder, unwritable
from llamarium.tokenizer.backends.files import write_text
from llamarium.train.state.checkpoint import save_checkpoint

pytestmark = pytest.mark.quick

FULL = os.strerror(errno.ENOSPC)


def full_disk(path: Path) -> OSError:
    return OSError(errno.ENOSPC, FULL, str(path))


def test_a_full_disk_names_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    for inner in (lambda path: full_disk(path), lambda path: unwritable(path, full_disk(path))):
        with pytest.raises(OutputError) as caught, atomic_folder(tmp_path / "model", replace=False) as folder:
            raise inner(folder / "model.safetensors") from full_disk(folder)
        assert str(caught.value) == f"{tmp_path / 'model'}: cannot be written: {FULL}"
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_checkpoint(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise unwritable(folder, full_disk(folder / "x")) from full_disk(folder / "x")

    with pytest.raises(OutputError) as caught:
        save_checkpoint(tmp_path, 3, write)
    expected = f"{tmp_path / 'step-00000003'}: cannot be written: {FULL}; the checkpoints before it are as they were"
    assert str(caught.value) == expected


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise full_disk(next(tmp_path.glob(".*.part")))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError) as caught:
        write_text(tmp_path / "a.json", "{}")
    assert str(caught.value) == f"{tmp_path / 'a.json'}: cannot be written: {FULL}"
    with pytest.raises(OSError, match=FULL), atomic_file(tmp_path / "b"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_another_file_s_name_is_told(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    assert str(unwritable(tmp_path / "model", full_disk(other))).endswith(f"{FULL} ({other})")


def test_other_errors_of_who_fills_a_folder_pass(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="of its own"), atomic_folder(tmp_path / "model", replace=False):
        raise OutputError("of its own")
