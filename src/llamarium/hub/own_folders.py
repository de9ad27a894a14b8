"""Folders of `llamarium build` whose code may be run as a model: those that were begun or checked on this machine.

No model file can run code; a learner's functions are code. So a folder that came from somewhere else is refused until
`llamarium build check` was asked to run it. The list lies in the cache folder, an absolute path a line, as JSON.
"""

import json
from pathlib import Path

from llamarium.errors import LlamariumError, escape, warn_caller
from llamarium.hub.builtin import cache_folder
from llamarium.io import atomic_file

COURSE = "course.json"
"""The file by which such a folder is known: steps, texts, and the model whose weights are used."""


def is_learner_folder(name: object) -> bool:
    """Return whether a model's name is a folder that holds a course of `llamarium build`, and no model of its own."""
    if not isinstance(name, (str, Path)):
        return False
    path = Path(name).expanduser()
    return (path / COURSE).is_file() and not (path / "config.json").exists()


def trust(folder: Path) -> None:
    """Let a folder's code be run from now on, and drop those that are gone; a warning says if it cannot be written."""
    if is_trusted(folder):
        return
    try:
        path = _list()
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines() if Path(json.loads(line)).is_dir()]
        with atomic_file(path) as file:
            file.write("".join(f"{line}\n" for line in (*kept, json.dumps(str(folder.resolve())))).encode())
    except (OSError, ValueError, TypeError, LlamariumError) as error:
        warn_caller(f"that {escape(folder)} is yours could not be noted ({escape(error)}), so -m will refuse it")


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
