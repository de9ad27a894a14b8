"""Checkpoints that survive a kill at any moment.

    run/.lock                           held by the process that trains (`run_lock`)
    run/best                            a link to the checkpoint of the lowest validation loss (`point_at`)
    run/step-00000500/                  a Hugging Face folder, and
        resume/optimizer.safetensors    the rest of the state that the next step depends on (`save_resume`)
        resume/state.json
        manifest.json                   SHA-256 and size of every other file

A checkpoint is written into `run/.saving-...`. All of its files and folders are synced, then the manifest, and only
then is the folder renamed: whatever has its name is complete. The rename is synced before anything older is deleted, so
there is always a complete checkpoint, once there was one. Folders are renamed (`.old-...`) before they are deleted, so
that a deletion cut short leaves no damaged checkpoint.

Renames protect against a killed process; the manifest protects against a disk that returns other bytes, and is verified
before a run resumes.

Source: the order of syncs is that of POSIX's rename (2) and fsync (2): a file's content and its name in the folder are
made durable by two different calls.
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
    """Save a checkpoint and return its folder, then delete old ones. The caller holds the `run_lock`.

    `write` fills the folder, and need not sync; a checkpoint of the same step is replaced. `save_total_limit` are kept
    up to this step, this one included; later ones, after a step back, are kept. `best` is a step that is also kept, and
    `run/best` points to it before older checkpoints are deleted. OutputError if something cannot be written: older
    checkpoints are unchanged.
    """
    assert save_total_limit >= 1
    final, saving = checkpoint_folder(run, step), run / f"{_SAVING}{step:08d}"
    try:
        for leftover in run.glob(f"{_SAVING}*"):  # of a process that was killed
            shutil.rmtree(leftover)
        try:
            saving.mkdir(parents=True)
            write(saving)
            _seal(saving)
            _put(saving, final)
        except BaseException:  # a full disk has its space back
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
    except OSError as error:  # nothing is lost by it
        warn_caller(f"{escape(run)}: an old checkpoint cannot be deleted: {escape(error)}")
    return final


def point_at(run: Path, name: str, step: int) -> None:
    """Link `run/<name>` to a step's checkpoint, atomically; warn where links cannot be made."""
    link, fresh = run / name, run / f".{name}-link"
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(checkpoint_folder(run, step).name, target_is_directory=True)
        fresh.replace(link)
        sync(run)
    except OSError as error:
        warn_caller(f"{escape(link)}: the link cannot be made: {escape(error)}")


def checkpoints(run: Path) -> list[Path]:
    """Return the folders with a checkpoint's name, oldest first; of one step, `.old-...` before `step-...`."""
    try:
        folders = [path for path in run.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TrainingError(f"{escape(run)}: cannot be read: {escape(error)}") from None
    return sorted(folders, key=lambda path: (checkpoint_step(path), path.name.startswith("step-")))


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, in order, unverified; TrainingError if the folder cannot be read."""
    return [checkpoint_step(path) for path in checkpoints(run) if not path.name.startswith(_OLD)]


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint that verifies, or None; warn of damaged ones, TrainingError if all are."""
    damaged: list[str] = []
    for folder in reversed(checkpoints(run)):
        try:
            verify_checkpoint(folder)
        except TrainingError as error:
            if not folder.name.startswith(_OLD):  # those are half deleted as a rule
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
    """Remove a killed process's leftovers from a run's folder. The caller holds the `run_lock`.

    An `.old-...` checkpoint of `step`, where the run continues, is kept: it may be the only complete one.
    """
    kept = _old_name(checkpoint_folder(run, step)).name
    for path in [*run.glob(f"{_SAVING}*"), *run.glob(f"{_OLD}*"), *run.glob(".*.part"), *run.glob("*/.*.part")]:
        if path.is_dir() and path.name != kept:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file():
            path.unlink(missing_ok=True)


def verify_checkpoint(folder: Path) -> None:
    """Check a checkpoint's files against its manifest, except hidden ones; TrainingError names the first bad file."""
    try:
        promised = _read_manifest(folder)
        found = set(_files(folder)) - {MANIFEST}
        for name in sorted(found ^ promised.keys()):
            how = "is missing" if name in promised else f"is not in {MANIFEST}; take it out"
            raise TrainingError(f"{escape(folder)}: {escape(name)} {how}")
        for name, (size, digest) in promised.items():
            if (actual := (folder / name).stat().st_size) != size:
                raise TrainingError(f"{escape(folder)}: {escape(name)} has {actual} bytes; {size} were written")
            if file_sha256(folder / name) != digest:
                raise TrainingError(f"{escape(folder)}: {escape(name)} is damaged: its SHA-256 is another")
    except OSError as error:
        raise TrainingError(f"{escape(folder)}: cannot be read: {escape(error)}") from None


def _seal(folder: Path) -> None:
    """Sync everything in `folder`, and write its manifest last."""
    sync_tree(folder)
    sizes = {name: (folder / name).stat().st_size for name in _files(folder)}
    files = {name: {"bytes": size, "sha256": file_sha256(folder / name)} for name, size in sizes.items()}
    write_json(folder / MANIFEST, {"format": 1, "files": files})
    sync(folder)


def _put(saving: Path, final: Path) -> None:
    """Rename a sealed folder to its name; an older one becomes `.old-...` until it is pruned."""
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
    """Delete old checkpoints, oldest first; that of `step` is synced already."""
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
