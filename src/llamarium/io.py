"""Opening files that came from outside, and writing files that are complete or absent."""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from llamarium.errors import CheckpointError, ModelNotFoundError, OutputError, escape
from llamarium.file_names import other_files
from llamarium.leftovers import held, remove_leftovers


def regular_size(path: Path) -> int:
    """Return the size in bytes of the regular file at `path`; a symbolic link is followed, as the hub's cache needs.

    Raises:
        ModelNotFoundError: If nothing is there, or a link leads nowhere.
        CheckpointError: If it cannot be looked at, or is a folder, a pipe or a device, which reading might block on.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        link = " (a symbolic link that leads nowhere)" if path.is_symlink() else ""
        raise ModelNotFoundError(f"{escape(path)}: no such file{link}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{escape(path)}: cannot be opened: {escape(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise CheckpointError(f"{escape(path)}: is {kind}; expected a file")
    return status.st_size


def read_small(path: Path, most_bytes: int = 1 << 20) -> bytes:
    """Return the content of a regular file; OSError if it is another kind of file, or has more bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    if status.st_size > most_bytes:
        raise OSError(f"larger than {most_bytes >> 10} KiB")
    return path.read_bytes()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hex; OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """Write `path` so that it is complete or untouched: a temporary file beside it, synced, then renamed over it.

    After an OSError, as the file system says, the temporary file is gone and `path` is what it was.
    """
    remove_leftovers(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file, held(Path(temporary)):
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp's 0600 is for secrets
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object as `atomic_file` does; ValueError for a NaN or an infinity, which JSON lacks."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # half a surrogate pair as JSON's \udcff


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files below `folder`, then the folders, the innermost first."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


@contextlib.contextmanager
def atomic_folder(
    target: Path, *, replace: bool, others: Callable[[Path], Iterable[Path]] = other_files, whose: str = "a model's"
) -> Generator[Path]:
    """Fill a folder so that it is complete or untouched: a temporary one beside it, synced, then renamed.

    Args:
        target: The folder.
        replace: Allow that it exists and holds nothing else.
        others: Returns what else a folder holds; by default all but the files of a model (`file_names.MODEL_FILES`).
        whose: Whose files may be replaced, for messages.

    Yields:
        The folder to fill.

    Raises:
        OutputError: If `target` may not be replaced, or cannot be written.
    """
    if target.exists() or target.is_symlink():
        check_replaceable(target, replace=replace, others=others, whose=whose)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        with (
            tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary,
            held(Path(temporary)),
        ):
            fresh, old = Path(temporary, "new"), Path(temporary, "old")
            fresh.mkdir()
            yield fresh
            sync_tree(fresh)
            if target.exists():
                target.rename(old)
            try:
                fresh.rename(target)
            except BaseException:
                if old.exists():
                    old.rename(target)
                raise
            sync(target.parent)
    except OSError as error:
        raise unwritable(target, error) from error
    except OutputError as error:  # of the writer, and names a file in the temporary folder
        if not isinstance(error.__cause__, OSError):
            raise
        raise unwritable(target, error.__cause__) from error


def check_replaceable(
    folder: Path, *, replace: bool, others: Callable[[Path], Iterable[Path]] = other_files, whose: str = "a model's"
) -> None:
    """Check that an existing folder may be replaced; arguments as of `atomic_folder`.

    OutputError without `replace`, or if it holds other files, which would be lost.
    """
    if not replace:
        raise OutputError(f"{escape(folder)}: exists already; --force replaces it")
    if folder.is_symlink() or not folder.is_dir():
        raise OutputError(f"{escape(folder)}: exists and is not a directory; remove it or choose another folder")
    for path in others(folder):
        raise OutputError(
            f"{escape(folder)}: holds {escape(path.relative_to(folder))}, which --force would delete and which is not "
            f"one of {whose} files; move it, or choose another folder"
        )


def unwritable(path: Path, error: OSError) -> OutputError:
    """Say that something cannot be written, and why; without the temporary file's name."""
    named = str(error.filename or path)
    is_temporary = f"{os.sep}.{path.name}." in named or named.endswith(".part") or f"{os.sep}.saving-" in named
    where = "" if is_temporary or named == str(path) else f" ({escape(named)})"
    return OutputError(f"{escape(path)}: cannot be written: {escape(error.strerror or error)}{where}")
