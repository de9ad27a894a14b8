"""Which model is meant where an adapter may name it, and what requests call it. Imports nothing heavy by itself."""

from collections.abc import Mapping
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"
"""What is loaded where neither a model nor an adapter is named."""

Adapters = Mapping[str, str] | Mapping[str, Path] | Mapping[str, str | Path]
"""Folders of adapters by the names that requests choose them by."""


def base_model(model: str | Path | None, adapter: str | Path | None, adapters: Adapters) -> str | Path | None:
    """Return the model that adapters are put on, which the first of them names where it is not given.

    Args:
        model: What was asked for.
        adapter: The folder of one that is in all answers.
        adapters: Those that requests choose.

    Returns:
        None if there is no model and no adapter.

    Raises:
        LlamariumError: If an adapter's config is read, and cannot be, or names no base.
    """
    folder = adapter or next(iter(adapters.values()), None)
    if model or folder is None:
        return model
    from llamarium.adapters.files import base_of

    return base_of(Path(folder))


def public_name(model: str | Path | None, adapter: str | Path | None, adapters: Adapters) -> str:
    """Return what requests call a model: a folder's or a file's own name, not where it lies.

    An adapter that is in all answers names the model where nothing else does. Arguments and errors are those of
    `base_model`.
    """
    if not model and adapter is not None:
        return _last_name(adapter)
    name = base_model(model, None, adapters) or DEFAULT_MODEL
    path = Path(name)
    return _last_name(path) if path.is_absolute() or path.exists() else str(name)


def _last_name(path: str | Path) -> str:
    return Path(path).absolute().name or str(path)
