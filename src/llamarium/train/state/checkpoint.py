"""Crash-safe checkpoints.

    run/.lock                           held by the training process (`run_lock`)
    run/best                            link to the checkpoint with the lowest validation loss (`point_at`)
    run/step-00000500/                  a Hugging Face folder, and
        resume/optimizer.safetensors    the optimizer state, and the rest of the run's state (`save_resume`)
        resume/state.json
        manifest.json                   SHA-256 and size of every other file

A checkpoint is written to `run/.saving-...`. All of its files and folders are synced, then the manifest, and only then
the folder is renamed, so a folder with a checkpoint's name is complete. The rename is synced before older checkpoints
are deleted, so once there is a complete checkpoint, there always is one. Folders are renamed to `.old-...` before they
are deleted, so that an interrupted deletion does not leave a damaged checkpoint.

Renames protect against a killed process. The manifest protects against corruption on disk; it is verified before a run
resumes.

Source: POSIX rename(2) and fsync(2): a file's content and its directory entry are made durable by different calls.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from llamarium.checkpoints.checkpoint import list_some
from llamarium.config import read_json_object
from llamarium.errors import LlamariumError, OutputError, TrainingError, escape, warn_caller
from llamarium.io import file_sha256, sync, sync_tree, unwritable, write_json

MANIFEST = "manifest.json"
_NAME = re.compile(r"(?:step|\.old)-([0-9]{8,18})")
_SAVING, _OLD = ".saving-", ".old-"
_MAX_MANIFEST_BYTES = 2**20


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return run / f"step-{step:08d}"


def checkpoint_step(folder: Path) -> int:
    """Return the step in a checkpoint's name; TrainingError for another name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise TrainingError(f"{escape(folder)}: is no checkpoint of a run; expected a folder called step-00000500")
    return int(match[1])


def save_checkpoint(
    run: Path, step: int, write: Callable[[Path], None], *, save_total_limit: int = 2, best: int | None = None
) -> Path:
    """Save a checkpoint, delete old ones, and return its folder. The caller holds the `run_lock`.

    A checkpoint of the same step is replaced.

    Args:
        run: Folder of the run.
        step: Step of the checkpoint.
        write: Writes the files into a folder; it need not sync them.
        save_total_limit: Number of checkpoints up to this step to keep, including this one. Later ones, from before the
            run was reset to an earlier step, are also kept.
        best: Step of the best checkpoint, which is also kept; `run/best` is linked to it before others are deleted.

    Raises:
        OutputError: If the checkpoint cannot be written; older checkpoints are unchanged.
    """
    assert save_total_limit >= 1
    final, saving = checkpoint_folder(run, step), run / f"{_SAVING}{step:08d}"
    try:
        for leftover in run.glob(f"{_SAVING}*"):  # from a killed process
            shutil.rmtree(leftover)
        try:
            saving.mkdir(parents=True)
            write(saving)
            _seal(saving)
            _put(saving, final)
        except BaseException:  # free the space of a full disk
            shutil.rmtree(saving, ignore_errors=True)
            raise
    except (OSError, OutputError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError):
            raise
        raise OutputError(f"{unwritable(final, reason)}; the checkpoints before it are as they were") from error
    if best is not None:
        point_at(run, "best", best)
    try:
        _prune(run, step, save_total_limit, best)
    except OSError as error:  # the new checkpoint is complete
        warn_caller(f"{escape(run)}: an old checkpoint cannot be deleted: {escape(error)}")
    return final


def point_at(run: Path, name: str, step: int) -> None:
    """Link `run/<name>` to a step's checkpoint atomically; warn if links are not possible."""
    link, fresh = run / name, run / f".{name}-link"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(checkpoint_folder(run, step).name, target_is_directory=True)
        fresh.replace(link)
        sync(run)
    except OSError as error:
        warn_caller(f"{escape(link)}: the link cannot be made: {escape(error)}")


def checkpoints(run: Path) -> list[Path]:
    """Return the folders with a checkpoint's name by ascending step; for the same step, `.old-...` is first."""
    try:
        folders = [path for path in run.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TrainingError(f"{escape(run)}: cannot be read: {escape(error)}") from None
    return sorted(folders, key=lambda path: (checkpoint_step(path), path.name.startswith("step-")))


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, ascending, unverified; TrainingError if the folder cannot be read."""
    return [checkpoint_step(path) for path in checkpoints(run) if not path.name.startswith(_OLD)]


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest intact checkpoint, or None; warn about damaged ones, TrainingError if all are damaged."""
    damaged: list[str] = []
    for folder in reversed(checkpoints(run)):
        try:
            verify_checkpoint(folder)
        except TrainingError as error:
            if not folder.name.startswith(_OLD):  # usually partly deleted
                warn_caller(f"passed over: {error}")
                damaged.append(folder.name)
            continue
        return folder
    if damaged:
        raise TrainingError(
            f"{escape(run)}: no checkpoint is whole; damaged are {list_some(damaged)}. Restore one of them, or begin a "
            "new run in another folder"
        )
    return None


def remove_leftovers(run: Path, step: int) -> None:
    """Remove files of a killed process from a run's folder. The caller holds the `run_lock`.

    An `.old-...` checkpoint of `step`, from which the run continues, is kept: it may be the only complete one.
    """
    kept = _old_name(checkpoint_folder(run, step)).name
    for path in [*run.glob(f"{_SAVING}*"), *run.glob(f"{_OLD}*"), *run.glob(".*.part"), *run.glob("*/.*.part")]:
        if path.is_dir() and path.name != kept:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink(missing_ok=True)


def verify_checkpoint(folder: Path) -> None:
    """Check a checkpoint's files, except hidden ones, against its manifest; TrainingError for the first mismatch."""
    try:
        promised = _read_manifest(folder)
        present = set(_files(folder)) - {MANIFEST}
        for name in sorted(present ^ promised.keys()):
            problem = "is missing" if name in promised else f"is not in {MANIFEST}; take it out"
            raise TrainingError(f"{escape(folder)}: {escape(name)} {problem}")
        for name, (size, digest) in promised.items():
            if (actual := (folder / name).stat().st_size) != size:
                raise TrainingError(f"{escape(folder)}: {escape(name)} has {actual} bytes; {size} were written")
            if file_sha256(folder / name) != digest:
                raise TrainingError(f"{escape(folder)}: {escape(name)} is damaged: its SHA-256 is another")
    except OSError as error:
        raise TrainingError(f"{escape(folder)}: cannot be read: {escape(error)}") from None


def _seal(folder: Path) -> None:
    """Sync everything in `folder`, then write its manifest."""
    sync_tree(folder)
    sizes = {name: (folder / name).stat().st_size for name in _files(folder)}
    files = {name: {"bytes": size, "sha256": file_sha256(folder / name)} for name, size in sizes.items()}
    write_json(folder / MANIFEST, {"format": 1, "files": files})
    sync(folder)


def _put(saving: Path, final: Path) -> None:
    """Rename a sealed folder to its final name; an existing one becomes `.old-...` until it is pruned."""
    old = _old_name(final)
    if replaces := final.exists():
        if old.exists():
            shutil.rmtree(old)
        final.rename(old)
    try:
        saving.rename(final)
    except BaseException:
        if replaces:
            old.rename(final)
        raise
    sync(final.parent)


def _old_name(folder: Path) -> Path:
    return folder.with_name(folder.name.replace("step-", _OLD))


def _prune(run: Path, step: int, save_total_limit: int, best: int | None) -> None:
    """Delete old checkpoints, oldest first; the checkpoint of `step` is already synced."""
    past = [folder for folder in checkpoints(run) if checkpoint_step(folder) < step and folder.name[0] != "."]
    for folder in past[: max(0, len(past) - (save_total_limit - 1))]:
        if checkpoint_step(folder) != best:
            folder.rename(_old_name(folder))
    for folder in run.glob(f"{_OLD}*"):
        shutil.rmtree(folder)


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    path = folder / MANIFEST
    if not path.is_file():
        raise TrainingError(f"{escape(folder)}: there is no {MANIFEST}; the checkpoint is not whole")
    try:
        files = read_json_object(path, _MAX_MANIFEST_BYTES)["files"]
        return {str(name): (int(row["bytes"]), str(row["sha256"])) for name, row in files.items()}
    except (LlamariumError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TrainingError(f"{escape(path)}: is damaged: {escape(error)}") from None


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of the regular files below `folder`, relative to it, except hidden ones."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and stat.S_ISREG(path.lstat().st_mode):
                yield path.relative_to(folder).as_posix()
