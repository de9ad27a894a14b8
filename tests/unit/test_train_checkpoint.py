"""Checkpoints: killed at every operation on the disk, full disks, damage, locks, and what a run goes on from."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llamarium.checkpoints.save import save_model
from llamarium.config import ModelConfig
from llamarium.errors import OutputError, TrainingError
from llamarium.io import write_json
from llamarium.model import LlamaForCausalLM
from llamarium.tokenizer.backends.characters import CharacterTokenizer
from llamarium.train.state.checkpoint import (
    MANIFEST,
    checkpoint_step,
    latest_checkpoint,
    point_at,
    remove_leftovers,
    save_checkpoint,
    verify_checkpoint,
)
from llamarium.train.state.lock import run_lock
from llamarium.train.state.resume import load_resume, save_resume

pytestmark = pytest.mark.torch

TINY = ModelConfig(
    vocab_size=8,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=16,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sync does is not seen by any test, but its time is."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def write(model: LlamaForCausalLM) -> Callable[[Path], None]:
    """Fills a checkpoint as a run does: the model, its tokenizer, the optimizer's state."""
    tokenizer = CharacterTokenizer.from_text("abcdefgh")

    def fill(folder: Path) -> None:
        save_model(model, folder, tokenizer=tokenizer)
        save_resume(folder, {"exp_avg": torch.ones(3)}, {"step": int(folder.name.rpartition("-")[2])})

    return fill


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def plain(folder: Path) -> None:
    (folder / "a").write_text("a")


# --- a disk that fails ------------------------------------------------------------------------------------------------


class Operations:
    """Counts every call that changes the disk; `before(name, path)` is called ahead of each."""

    NAMES = (
        "fsync",
        "rename",
        "replace",
        "unlink",
        "remove",
        "rmdir",
        "mkdir",
        "chmod",
        "link",
        "symlink",
        "ftruncate",
    )

    def __init__(self, before: Callable[[str, Any], None]) -> None:
        self.before = before

    def install(self, patch: Callable[[Any, str, Any], None]) -> None:
        for name in self.NAMES:
            patch(os, name, self._announced(name, getattr(os, name)))
        real_open, real_fdopen = os.open, os.fdopen

        def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR):
                self.before("open", path)
            return real_open(path, flags, *args, **kwargs)

        patch(os, "open", open_)
        patch(os, "fdopen", lambda handle, mode: _File(real_fdopen(handle, mode), self.before))

    def _announced(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.before(name, args)
            return real(*args, **kwargs)

        return call


class _File:
    """A file whose writes are announced, at the beginning and in the middle."""

    def __init__(self, real: Any, before: Callable[[str, Any], None]) -> None:
        self.real = real
        self.before = before

    def write(self, data: Any) -> None:
        data = memoryview(data)
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self.before("write", self.real.fileno())
            self.real.write(part)
            self.real.flush()

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.real.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def killed_at(operation: int, action: Callable[[], Any]) -> bool:
    """Do `action` in a process that is killed ahead of its n-th operation; False if it was done before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike fork beside torch's threads
        process = os.fork()
    if process == 0:
        left = [operation]

        def count(name: str, path: Any) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        Operations(count).install(setattr)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.mark.parametrize("step", [300, 200])  # a new one, and one in place of the newest
def test_killed_at_every_operation_there_is_a_checkpoint_one_interval_old_at_most(
    step: int, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    before, run = tmp_path / "before", tmp_path / "run"
    for old in (100, 200):
        save_checkpoint(before, old, write, best=100)

    def save() -> None:
        save_checkpoint(run, step, write, save_total_limit=1, best=step)

    operation, seen = 0, set()
    while True:
        shutil.copytree(before, run, symlinks=True)
        was_killed = killed_at(operation, save)
        latest = latest_checkpoint(run)  # and no warning of a damaged one
        assert latest is not None and checkpoint_step(latest) >= 200, f"killed at operation {operation}"
        for folder in run.glob("step-*"):  # whatever has a checkpoint's name is whole
            verify_checkpoint(folder)
        assert (run / "best" / MANIFEST).exists(), f"killed at operation {operation}"
        state = load_resume(latest)[1]
        assert state["step"] == checkpoint_step(latest)
        seen.add(checkpoint_step(latest))
        if not was_killed:
            break
        if operation % 7 == 0:  # the next save clears up whatever was left
            save()
            assert steps(run) == ["best", f"step-{step:08d}"], f"killed at operation {operation}"
        shutil.rmtree(run)
        operation += 1
    assert steps(run) == ["best", f"step-{step:08d}"]
    assert operation > 70 and seen == {200, step}


def test_killed_at_every_operation_of_the_first_save_there_is_one_or_none(tmp_path: Path) -> None:
    operation = 0
    while killed_at(operation, lambda: save_checkpoint(tmp_path / "run", 1, plain)):
        latest = latest_checkpoint(tmp_path / "run")
        assert latest is None or checkpoint_step(latest) == 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        operation += 1
    assert operation > 10


@pytest.mark.parametrize(("code", "step"), [(errno.ENOSPC, 300), (errno.EROFS, 200)])
def test_an_error_at_any_operation_loses_nothing(
    code: int, step: int, tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, run = tmp_path / "before", tmp_path / "run"
    save_checkpoint(before, 200, write, save_total_limit=1)
    num_errors = 0
    for operation in range(10_000):
        shutil.copytree(before, run)
        left = [operation]

        def count(name: str, path: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as context, warnings.catch_warnings():
            Operations(count).install(context.setattr)
            warnings.filterwarnings("ignore", ".*an old checkpoint cannot be deleted")
            try:
                save_checkpoint(run, step, write, save_total_limit=1)
            except OutputError as error:
                assert os.strerror(code) in str(error)
                num_errors += 1
                assert not list(run.glob(".saving*"))
        latest = latest_checkpoint(run)
        assert latest is not None and latest.name in ("step-00000200", f"step-{step:08d}")
        shutil.rmtree(run)
        if left[0] >= 0:
            break
    assert num_errors > 50


def test_everything_is_synced_before_it_is_renamed_and_the_rename_before_anything_is_deleted(
    tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves: only what was synced is on the disk for certain."""
    run = tmp_path / "run"
    save_checkpoint(run, 1, write, save_total_limit=1)
    synced: set[Path] = set()
    renamed = False

    def observe(name: str, args: Any) -> None:
        nonlocal renamed
        if name == "fsync":
            synced.add(_path_of(args[0]))
        elif name == "write":
            synced.discard(_path_of(args))
        elif name in ("rename", "replace"):
            source, target = Path(args[0]), Path(args[1])
            if target.name == "step-00000002":
                assert (source / MANIFEST).exists()
                assert not [path for path in (source, *source.rglob("*")) if path not in synced]
                renamed = True
            elif target.name.startswith(".old"):
                assert renamed and run in synced, "the new name must be on the disk before an older one is touched"
            if source in synced:
                synced.add(target)
            synced.discard(target.parent)
        elif name in ("unlink", "rmdir", "remove"):
            assert renamed
        elif name in ("mkdir", "open"):
            synced.discard(Path(args[0] if name == "mkdir" else args).parent)

    def write_more(folder: Path) -> None:
        write(folder)
        (folder / "more").mkdir()
        (folder / "more" / "unsynced").write_text("a")

    Operations(observe).install(monkeypatch.setattr)
    save_checkpoint(run, 2, write_more, save_total_limit=1)
    monkeypatch.undo()
    assert renamed and steps(run) == ["step-00000002"]


def _path_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


# --- which are kept ---------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        save_checkpoint(tmp_path, step, plain, save_total_limit=3, best=min(step, 2))
    assert [int(name[5:]) for name in steps(tmp_path)[1:]] == [2, 4, 5, 6]
    assert (tmp_path / "best").readlink() == Path("step-00000002")
    save_checkpoint(tmp_path, 7, plain, save_total_limit=9)
    assert [int(name[5:]) for name in steps(tmp_path)[1:]] == [2, 4, 5, 6, 7]


def test_later_ones_and_other_files_are_left_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 900, plain)
    (tmp_path / "metrics.jsonl").write_text("{}")
    save_checkpoint(tmp_path, 500, plain, save_total_limit=1)
    assert steps(tmp_path) == ["metrics.jsonl", "step-00000500", "step-00000900"]


def test_a_checkpoint_that_cannot_be_filled_leaves_no_trace(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        plain(folder)
        raise TrainingError("no")

    save_checkpoint(tmp_path, 1, plain)
    with pytest.raises(TrainingError, match="no"):
        save_checkpoint(tmp_path, 2, fail)
    assert steps(tmp_path) == ["step-00000001"]


def test_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None
    with pytest.raises(TrainingError, match="step-00000500"):
        checkpoint_step(tmp_path / "step-5")


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit": (lambda f: flip(f / "config.json"), "config.json is damaged: its SHA-256"),
    "cut": (lambda f: os.truncate(f / "resume/optimizer.safetensors", 9), "has 9 bytes"),
    "missing": (lambda f: (f / "resume/state.json").unlink(), "resume/state.json is missing"),
    "more": (lambda f: (f / "more.json").write_text(""), "more.json is not in manifest.json"),
    "a link": (lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("x")), "config.json is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "there is no manifest.json"),
    "empty manifest": (lambda f: (f / MANIFEST).write_text("{}"), "manifest.json: is damaged"),
    "no JSON": (lambda f: (f / MANIFEST).write_text("{"), "manifest.json: is damaged"),
    "no files": (lambda f: (f / MANIFEST).write_text('{"files": [1]}'), "manifest.json: is damaged"),
    "endless": (lambda f: (f / MANIFEST).write_text('{"files": {"a": {"bytes": 1e999}}}'), "manifest.json: is damaged"),
    "no sizes": (lambda f: (f / MANIFEST).write_text('{"files": {"a": 1}}'), "manifest.json: is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    kind: str, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    damage, message = DAMAGE[kind]
    for step in (1, 2):
        save_checkpoint(tmp_path, step, write)
    damage(tmp_path / "step-00000002")
    with pytest.raises(TrainingError, match=f"step-00000002.*{message}"):
        verify_checkpoint(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match=f"passed over: .*step-00000002.*{message}"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"


def test_all_damaged_is_no_new_run(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, plain)
    (tmp_path / "step-00000001/a").unlink()
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(TrainingError, match="no checkpoint is whole"):
        latest_checkpoint(tmp_path)


def test_a_file_managers_leavings_do_no_harm(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, plain)
    (folder / ".DS_Store").write_text("")
    verify_checkpoint(folder)


# --- what a run goes on from ------------------------------------------------------------------------------------------


def test_tensors_and_state_come_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = {
        "nan": torch.tensor([float("nan"), -0.0, 1e-45]),
        "bf16": torch.randn(3, 5).bfloat16(),
        "rng": torch.get_rng_state(),
        "step": torch.tensor(7.0),
        "count": torch.tensor([2**40]),
        "flag": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "strided": torch.randn(4, 6).T,
        "double": torch.randn(2, dtype=torch.float64),
    }
    state = {"cursor": [1, 2], "loss": 0.1 + 0.2, "best": None, "name": "ä\u2028", "big": 2**70}
    save_resume(tmp_path, tensors, state)
    found, read = load_resume(tmp_path)
    assert read == state and found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].numpy(force=True).tobytes() == tensor.numpy(force=True).tobytes() if (
            tensor.dtype != torch.bfloat16
        ) else torch.equal(found[name], tensor)  # fmt: skip
    names = [path.name for path in (tmp_path / "resume").iterdir()]
    assert sorted(names) == ["optimizer.safetensors", "state.json"]


@pytest.mark.parametrize("state", [{"a": (1, 2)}, {1: 2}, {"a": float("inf")}, {"a": torch.ones(1)}, {"a": {2}}])
def test_a_state_that_json_would_change_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="JSON"):
        save_resume(tmp_path, {}, state)


def test_a_folder_to_go_on_from_is_checked(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no folder resume"):
        load_resume(tmp_path)
    save_resume(tmp_path, {"a": torch.ones(2)}, {})
    (tmp_path / "resume/state.json").write_text("[]")
    with pytest.raises(TrainingError, match=r"state\.json"):
        load_resume(tmp_path)
    (tmp_path / "resume/state.json").write_text("{}")
    (tmp_path / "resume/optimizer.safetensors").write_bytes(b"\x80\x04.")
    with pytest.raises(TrainingError, match=r"optimizer\.safetensors"):
        load_resume(tmp_path)
    (tmp_path / "resume/optimizer.safetensors").unlink()
    with pytest.raises(TrainingError, match="no such file"):
        load_resume(tmp_path)


def test_nothing_is_pickled(tmp_path: Path, write: Callable[[Path], None]) -> None:
    folder = save_checkpoint(tmp_path, 1, write)
    for path in folder.rglob("*"):
        assert path.is_dir() or path.suffix in (".json", ".safetensors")
        assert path.is_dir() or path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


# --- two runs ---------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from llamarium.train.state.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        with pytest.raises(TrainingError, match=f"run: another run .*process {holder.pid} on {os.uname().nodename}"):
            run_lock(run).__enter__()
        holder.kill()
        holder.wait()
    with run_lock(run):
        assert (run / ".lock").read_text().startswith(f"{os.getpid()} on ")
        with pytest.raises(TrainingError, match=f"process {os.getpid()}"), run_lock(run):
            pass
    with run_lock(run):  # the refused one has left no lock behind
        pass


def test_a_folder_that_cannot_be_written_or_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match=r"file.*cannot be written"), run_lock(tmp_path / "file"):
        pass
    with pytest.raises(OutputError, match="step-00000001: cannot be written"):
        save_checkpoint(tmp_path / "file", 1, plain)

    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "file")
    with pytest.raises(OutputError, match="linked: cannot be written: Too many levels"), run_lock(tmp_path / "linked"):
        pass
    assert (tmp_path / "file").read_text() == "precious"

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(TrainingError, match="cannot lock the folder"), run_lock(tmp_path):
        pass


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 5, plain)
    assert json.loads((folder / MANIFEST).read_text()) == {
        "format": 1,
        "files": {
            "a": {"bytes": 1, "sha256": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"},
        },
    }


def test_any_string_can_be_saved(tmp_path: Path) -> None:
    value = {"half of a pair": "\udcff", "é\n": "\\udcff"}
    write_json(tmp_path / "any.json", value)
    assert json.loads((tmp_path / "any.json").read_bytes()) == value


def test_a_name_stands_for_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, lambda folder: (folder / "x").write_text(str(folder)))
        point_at(tmp_path, "best", step)
        assert (tmp_path / "best").readlink() == Path(f"step-{step:08d}")
        assert latest_checkpoint(tmp_path / "best" / "..") == tmp_path / "best" / ".." / f"step-{step:08d}"
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()  # somebody's own
    with pytest.warns(UserWarning, match="best: the link cannot be made"):
        point_at(tmp_path, "best", 1)
    assert (tmp_path / "best").is_dir()


def test_a_run_that_came_to_nothing_leaves_nothing(tmp_path: Path) -> None:
    with run_lock(tmp_path / "runs" / "x"):
        assert (tmp_path / "runs" / "x" / ".lock").exists()
    assert list(tmp_path.iterdir()) == []

    with run_lock(tmp_path / "runs" / "x"):
        (tmp_path / "runs" / "x" / "train.toml").touch()
    with run_lock(tmp_path / "runs" / "x"):
        pass
    assert (tmp_path / "runs" / "x" / "train.toml").exists()
    (tmp_path / "mine").mkdir()  # a folder that was there before stays
    with run_lock(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir()


def test_leftovers_go_but_the_only_whole_checkpoint(tmp_path: Path) -> None:
    names = [".saving-00000009", ".old-00000003", ".old-00000006", "step-00000003", "embeddings"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    parts = [tmp_path / ".train.toml.abc.part", tmp_path / "embeddings" / ".x.safetensors.abc.part"]
    for path in (*parts, tmp_path / "train.toml"):
        path.write_text("x")
    remove_leftovers(tmp_path, 6)
    assert {path.name for path in tmp_path.iterdir()} == {".old-00000006", "step-00000003", "embeddings", "train.toml"}
    assert [path.name for path in (tmp_path / "embeddings").iterdir()] == ["file"]
