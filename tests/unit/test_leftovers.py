"""What writers that were killed leave beside their targets."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llamarium.io import atomic_file, atomic_folder

WRITER = """
import sys, time
from pathlib import Path
from llamarium.io import atomic_file, atomic_folder
target = Path(sys.argv[1])
with (atomic_file(target) if sys.argv[2] == "file" else atomic_folder(target, replace=True)):
    print("writing", flush=True)
    time.sleep(60)
"""


def killed(target: Path, kind: str, number: int) -> int:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(target), kind], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        writer.send_signal(number)
        return writer.wait(30)


def write(target: Path, kind: str) -> None:
    if kind == "file":
        with atomic_file(target) as file:
            file.write(b"x")
    else:
        with atomic_folder(target, replace=True) as folder:
            Path(folder, "config.json").write_text("{}")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_sigterm_removes_what_was_being_written(kind: str, tmp_path: Path) -> None:
    assert killed(tmp_path / "out", kind, signal.SIGTERM) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_next_writer_of_a_target_removes_what_a_killed_one_left(kind: str, tmp_path: Path) -> None:
    assert killed(tmp_path / "out", kind, signal.SIGKILL) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    foreign = [tmp_path / ".out.backup", tmp_path / ".other.abcdefgh.part", tmp_path / ".out.abcdefgh"]
    for path in foreign:
        path.write_text("not ours")
    write(tmp_path / "out", kind)
    assert {*tmp_path.iterdir()} == {tmp_path / "out", *foreign}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_somebody_is_writing_stays(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_file(target) if kind == "file" else atomic_folder(target, replace=True):
        write(target, kind)
        assert len(list(tmp_path.iterdir())) == 2


def test_a_model_that_was_moved_away_comes_back(tmp_path: Path) -> None:
    old = tmp_path / ".out.abcd_123" / "old"
    old.mkdir(parents=True)
    Path(old, "config.json").write_text("kept")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out", replace=True):
        raise RuntimeError
    assert Path(tmp_path, "out", "config.json").read_text() == "kept"
