"""What is written for Windows, on any system: the functions that call it, over stand-ins for its libraries.

test_wheels.py builds the library for Windows, and runs it under Wine.
"""

import ast
import ctypes
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llamarium import leftovers, system
from llamarium.course import check_steps
from llamarium.engine.tiers import disk_cache
from llamarium.errors import OptionError
from llamarium.io import atomic_file, atomic_folder
from llamarium.server import hosts, recorder
from llamarium.server.batch.output import OutputFile
from llamarium.server.http import access_keys
from llamarium.server.settings import Settings

FOLDER = Path(system.__file__).parent
HANDLES = 1000  # added to a descriptor, a handle


class Kernel32:
    """Stands for kernel32.dll: what is called, and what it says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., int]] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.calls.append((name, args))
            return self.answers[name](*args)

        return call


@pytest.fixture
def kernel32() -> Kernel32:
    return Kernel32()


@pytest.fixture
def windows(kernel32: Kernel32, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module for Windows, whose libraries are stand-ins."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda number: number + HANDLES))
    monkeypatch.setitem(sys.modules, "winreg", SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=None, QueryValueEx=None))
    monkeypatch.setattr(ctypes, "WinDLL", lambda name, **_: kernel32, raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 0, raising=False)
    monkeypatch.setattr(signal, "SIGBREAK", 21, raising=False)
    monkeypatch.setattr(os, "O_BINARY", 0, raising=False)
    monkeypatch.setattr(os, "O_NOINHERIT", 0, raising=False)
    spec = importlib.util.spec_from_file_location("llamarium_on_windows", FOLDER / "windows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functions(path: Path) -> dict[str, str]:
    """Return the signatures of a module's public functions."""
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {
        node.name: f"{ast.unparse(node.args)} -> {ast.unparse(node.returns or ast.Constant(None))}" for node in found
    }


def test_both_systems_offer_the_same_functions() -> None:
    signatures = functions(FOLDER / "posix.py")
    assert functions(FOLDER / "windows.py") == signatures
    assert {*signatures, "STOP_SIGNALS"} == set(system.__all__)


# --- locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("granted", "error", "expected"), [(1, 0, True), (0, 33, False), (0, 1, None)])
def test_a_lock_is_on_a_byte_that_no_file_has(
    granted: int,
    error: int,
    expected: bool | None,
    windows: ModuleType,
    kernel32: Kernel32,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processes cannot read a byte that is locked."""
    kernel32.answers["LockFileEx"] = lambda *_: granted
    monkeypatch.setattr(ctypes, "get_last_error", lambda: error)
    with (tmp_path / "file").open("wb") as file:
        assert windows.lock(file.fileno()) is expected
        ((_, (handle, flags, zero, low, high, at)),) = kernel32.calls
        assert handle.value == file.fileno() + HANDLES
    assert (flags, zero, low, high) == (3, 0, 1, 0), "exclusively, without waiting, one byte"
    assert at._obj.offset_high << 32 | at._obj.offset == 2**63 - 2
    assert ctypes.sizeof(at._obj) == 32, "OVERLAPPED"


def test_a_folder_is_locked_by_a_file_in_it(
    windows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows opens no folder. The next writer removes what a killed one has left, and nothing that is in use."""
    monkeypatch.setattr(leftovers, "lock_path", windows.lock_path)
    killed, used = tmp_path / ".out.abcdefgh", tmp_path / ".out.bcdefghi"
    for folder in (killed, used):
        (folder / "new").mkdir(parents=True)
        (folder / "lock").touch()
    with leftovers.held(used), atomic_folder(tmp_path / "out", replace=True) as fresh:
        assert (fresh.parent / "lock").exists()
        (fresh / "config.json").write_text("{}")
    assert {path.name for path in tmp_path.iterdir()} == {"out", used.name}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_are_read_and_written_in_parts_and_at_offsets(windows: ModuleType, tmp_path: Path) -> None:
    path, parts = tmp_path / "file", [bytes(range(7)), b"", b"\r\n" * 3]
    descriptor = windows.open_file(path, os.O_RDWR | os.O_CREAT)
    assert windows.write_parts(descriptor, [memoryview(part) for part in parts]) == 13
    windows.write_at(descriptor, b"ab", 1)
    assert windows.read_at(descriptor, 4, 0) == b"\0ab\3"
    buffers = [bytearray(8), bytearray(10)]
    assert windows.read_parts(descriptor, [memoryview(buffer) for buffer in buffers]) == 13
    assert b"".join(buffers)[:13] == b"\0ab" + b"".join(parts)[3:] == path.read_bytes()
    assert windows.file_number(descriptor) == descriptor + HANDLES
    windows.remove_open(path, descriptor)
    assert not path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_link_is_followed_only_if_it_may_be(windows: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.close(windows.open_file(tmp_path / "link", os.O_RDWR | os.O_CREAT))
    with pytest.raises(OSError, match="symbolic link"):
        windows.open_file(tmp_path / "link", os.O_RDWR, follows_links=False)


def test_a_folder_needs_no_sync_and_a_file_is_opened_for_writing(
    windows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Path, int]] = []
    real = os.open
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append((path, flags)) or real(path, flags))
    windows.sync(tmp_path)
    windows.sync(tmp_path / "file")
    assert opened == [(tmp_path / "file", os.O_RDWR)]


def test_what_the_library_writes_is_the_same_with_the_functions_for_windows(
    windows: ModuleType, kernel32: Kernel32, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a prefix cache, records, outputs of batches, and files that replace others."""
    kernel32.answers["LockFileEx"] = lambda *_: 1
    names = (
        "open_file",
        "read_parts",
        "write_parts",
        "read_at",
        "hide_from_others",
        "remove_open",
        "lock",
        "lock_path",
    )
    for module in (disk_cache, recorder, leftovers, sys.modules[OutputFile.__module__]):
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(windows, name))
    with closing(disk_cache.DiskCache(tmp_path / "cache")) as cache:
        parts = [memoryview(b"keys"), memoryview(b"values")]
        assert cache.write(b"k" * 16, b"p" * 16, b"head", parts, lambda: True)
        read = [memoryview(bytearray(4)), memoryview(bytearray(6))]
        assert cache.read(b"k" * 16, b"head", read) and read == parts
    recorder.Recorder(tmp_path / "record")
    recorder.Recorder(tmp_path / "record")  # one that is there already
    with OutputFile(tmp_path / "out.jsonl") as output:
        output.begin()
        output.write(b"{}\n")
    with OutputFile(tmp_path / "empty.jsonl"):
        pass
    for text in (b"old", b"new"):
        with atomic_file(tmp_path / "file") as file:
            file.write(text)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"record": b"", "out.jsonl": b"{}\n", "file": b"new"}


# --- memory and processors --------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_machine(windows: ModuleType, kernel32: Kernel32) -> None:
    def answer(status: Any) -> int:
        assert status._obj.length == 64, "MEMORYSTATUSEX"
        status._obj.total, status._obj.free = 16 << 30, 5 << 30
        return 1

    kernel32.answers["GlobalMemoryStatusEx"] = answer
    assert windows.memory() == (5 << 30, 16 << 30)


def test_cores_and_processors_are_those_of_this_process(
    windows: ModuleType, kernel32: Kernel32, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four cores of two threads and a cache; the process may run on three of the cores."""

    def affinity(process: Any, own: Any, all_: Any) -> int:
        own._obj.value, all_._obj.value = 0b00111111, 0b11111111
        return 1

    def processors(cores: Any, length: Any) -> int:
        if cores is None:
            length._obj.value = 5 * 32
            return 0
        for i in range(4):
            cores[i].cpus, cores[i].relationship = 0b11 << 2 * i, 0
        cores[4].cpus, cores[4].relationship = 0b11111111, 2
        return 1

    kernel32.answers |= {"GetProcessAffinityMask": affinity, "GetLogicalProcessorInformation": processors}
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 122)
    assert (windows.usable_cpus(), windows.physical_cores()) == (6, 3)


def test_this_system_knows_its_memory_and_processors() -> None:
    free, total = system.memory()
    assert (free is None or 0 < free <= total) and total > 1 << 28
    assert 1 <= system.physical_cores() <= system.usable_cpus() <= (os.cpu_count() or 1)


# --- text and signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variable", "encoding"), [(None, "utf-8"), ("cp1252", "cp1252")])
def test_pipes_are_utf8_unless_the_user_chose(
    variable: str | None, encoding: str, windows: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYTHONIOENCODING", variable)
    out = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode(encoding)), encoding="cp1252"))
    monkeypatch.setattr(sys, "stdout", out)
    windows.prepare_streams()
    assert sys.stdin.read() == "é\n"
    out.write("é")
    out.flush()
    assert out.buffer.getvalue() == "é".encode(encoding)  # pyright: ignore[reportAttributeAccessIssue]
    assert out.errors == "backslashreplace"


def test_ctrl_break_ends_programs_too(windows: ModuleType) -> None:
    assert set(windows.STOP_SIGNALS) == {signal.SIGINT, signal.SIGTERM, 21}


# --- what is refused, and what is not ---------------------------------------------------------------------------------


def test_what_windows_lacks_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(OptionError, match="--uds"):
        hosts.listen(Settings(uds=str(tmp_path / "socket")))
    with pytest.raises(OptionError, match="Windows"):
        check_steps(tmp_path)


def test_key_files_have_no_permissions_to_warn_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    file.chmod(0o666)
    with pytest.warns(UserWarning, match="666"):
        access_keys._read(file)
    monkeypatch.setattr(sys, "platform", "win32")
    assert access_keys._read(file) == "secret\n"  # a warning would be an error
