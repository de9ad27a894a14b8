"""Folders that are no model by themselves: a training run's, whose checkpoints are models, an adapter's, a learner's.

A run's folder holds `step-00000500/`, ... and `best`, a link to the one with the lowest validation loss. A checkpoint
is a model's folder, or an adapter's where an adapter was trained; that one is put on a model, not in its place.

No model file can run code; the functions in a folder of `llamarium build` are code. So one that was neither begun nor
checked on this machine is refused until `llamarium build check` was asked to run it. The list lies in the cache folder,
an absolute path a line, as JSON.
"""

import json
import os
import re
from pathlib import Path

from llamarium.errors import LlamariumError, escape, warn_caller
from llamarium.file_names import ADAPTER_CONFIG, CONFIG
from llamarium.hub.builtin import cache_folder
from llamarium.io import atomic_file

_CHECKPOINT = re.compile(r"step-[0-9]{8,18}")


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds a LoRA adapter and no model; not so where no folder can have that name."""
    has_adapter, has_model = (os.path.isfile(folder / name) for name in (ADAPTER_CONFIG, CONFIG))  # noqa: PTH113
    return has_adapter and not has_model


def what_to_name(path: Path, *, adapter: bool = False) -> str | None:
    """Say what to name instead of a folder that is, or lies in, a training run; or, unless `adapter`, holds an adapter.

    None if the folder is none of those, or is what is looked for.
    """
    try:
        return _what_to_name(path, adapter)
    except (OSError, ValueError):  # a name that no file can have, or a folder that may not be read
        return None


def _what_to_name(path: Path, adapter: bool) -> str | None:
    if path.is_dir() and is_adapter(path):
        advice = f"{escape(path)}: is a LoRA adapter, not a model; name it with --adapter {escape(path)}"
        return None if adapter else advice
    newest = _newest(path)
    if newest is not None:
        best = path / "best"
        checkpoint = best if best.is_dir() else newest
        why = "the lowest validation loss" if best.is_dir() else "the newest, as nothing was validated yet"
        return f"{escape(path)}: is the folder of a training run; {_naming(checkpoint)} ({why})"
    if path.name == "best" and not path.exists() and (newest := _newest(path.parent)) is not None:
        return (
            f"{escape(path)}: is not there yet: the run ended before its first validation, which chooses it; "
            f"{_naming(newest)} (the newest), or go on with the run (--resume)"
        )
    return None


def _naming(folder: Path) -> str:
    kind = "its adapter with --adapter" if is_adapter(folder) else "its model,"
    return f"name {kind} {escape(folder)}"


def _newest(run: Path) -> Path | None:
    if not run.is_dir():
        return None
    checkpoints = [path for path in run.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return max(checkpoints, key=lambda path: int(path.name.removeprefix("step-")), default=None)


COURSE = "course.json"
"""The file by which such a folder is known: steps, texts, and the model whose weights are used."""


def is_learner_folder(name: object) -> bool:
    """Return whether a model's name is a folder that holds a course of `llamarium build`, and no model of its own."""
    if not isinstance(name, (str, Path)):
        return False
    path = Path(name).expanduser()
    return (path / COURSE).is_file() and not (path / CONFIG).exists()


def trust(folder: Path) -> None:
    """Let a folder's code be run from now on, and drop those that are gone; a warning says if it cannot be written."""
    if is_trusted(folder):
        return
    try:
        path = _list()
        path.parent.mkdir(parents=True, exist_ok=True)
        existing = [line for line in _lines() if Path(json.loads(line)).is_dir()]
        with atomic_file(path) as file:
            file.write("".join(f"{line}\n" for line in (*existing, json.dumps(str(folder.resolve())))).encode())
    except (OSError, ValueError, TypeError, LlamariumError) as error:
        warn_caller(f"cannot record that {escape(folder)} is yours ({escape(error)}); -m will refuse it")


def is_trusted(folder: Path) -> bool:
    """Return whether a folder's code may be run."""
    return json.dumps(str(folder.resolve())) in _lines()


def _lines() -> list[str]:
    try:
        return _list().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, LlamariumError):
        return []


def _list() -> Path:
    return cache_folder() / "own_folders.jsonl"
