"""Validate files before they are read, and write files and directories atomically."""

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
from llamarium.system import sync


def regular_size(path: Path) -> int:
    """Return the size in bytes of a regular file; symbolic links are followed, as the hub's cache needs.

    Raises:
        ModelNotFoundError: If it does not exist, or is a broken link.
        CheckpointError: If it cannot be accessed, or is not a regular file: reading a pipe or a device could block.
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
    """Return the content of a regular file of up to `most_bytes`; OSError for other kinds of files and larger ones."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    if status.st_size > most_bytes:
        raise OSError(f"larger than {most_bytes >> 10} KiB")
    return path.read_bytes()


def file_sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file; OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_file(path: Path) -> Generator[BinaryIO]:
    """Write a file atomically: to a temporary file next to it, which is synced and renamed.

    After an OSError, the temporary file is gone and `path` is unchanged.
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
    """Write a JSON object atomically; ValueError for NaN and infinities, which JSON does not support."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # lone surrogates become JSON's \udcff


def sync_tree(folder: Path) -> None:
    """Sync all files in a directory tree, and its directories, innermost first."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


@contextlib.contextmanager
def atomic_folder(
    target: Path, *, replace: bool, others: Callable[[Path], Iterable[Path]] = other_files, whose: str = "a model's"
) -> Generator[Path]:
    """Write a directory atomically: to a temporary one next to it, which is synced and renamed.

    Args:
        target: The directory.
        replace: Whether it may exist, if it contains no other files.
        others: Returns the other files of a directory; by default all except those of a model
            (`file_names.MODEL_FILES`).
        whose: Whose files may be replaced, for messages.

    Yields:
        The directory to fill.

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
    except OutputError as error:  # from the writer; it names a file in the temporary directory
        if not isinstance(error.__cause__, OSError):
            raise
        raise unwritable(target, error.__cause__) from error


def check_replaceable(
    folder: Path, *, replace: bool, others: Callable[[Path], Iterable[Path]] = other_files, whose: str = "a model's"
) -> None:
    """Validate that an existing directory may be replaced; arguments as in `atomic_folder`.

    Raises:
        OutputError: Without `replace`, or if other files would be lost.
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
    """Return the error for a path that cannot be written, without the name of a temporary file."""
    file = str(error.filename or path)
    is_temporary = f"{os.sep}.{path.name}." in file or file.endswith(".part") or f"{os.sep}.saving-" in file
    where = "" if is_temporary or file == str(path) else f" ({escape(file)})"
    return OutputError(f"{escape(path)}: cannot be written: {escape(error.strerror or error)}{where}")
