"""Folders that are mistaken for a model: a training run's, whose checkpoints are models, and an adapter's.

A run's folder holds `step-00000500/`, ... and `best`, a link to the one with the lowest validation loss. A checkpoint
is a model's folder, or an adapter's where an adapter was trained; that one is put on a model, not in its place.
"""

import re
from pathlib import Path

from llamarium.errors import escape

ADAPTER_CONFIG = "adapter_config.json"
_CHECKPOINT = re.compile(r"step-[0-9]{8,18}")


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder holds a LoRA adapter and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


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
        named = best if best.is_dir() else newest
        why = "the lowest validation loss" if best.is_dir() else "the newest, as nothing was validated yet"
        return f"{escape(path)}: is the folder of a training run; {_naming(named)} ({why})"
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
    found = [path for path in run.iterdir() if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)
