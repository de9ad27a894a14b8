"""Names of models: the base model of an adapter, and the public name of a model. No heavy imports."""

from collections.abc import Mapping
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"
"""The model that is loaded if neither a model nor an adapter is given."""

Adapters = Mapping[str, str] | Mapping[str, Path] | Mapping[str, str | Path]
"""Folders of adapters, by the names that requests select them with."""


def base_model(model: str | Path | None, adapter: str | Path | None, adapters: Adapters) -> str | Path | None:
    """Return `model`, or else the base of `adapter` or of the first of `adapters`; None without all three.

    LlamariumError if an adapter's config cannot be read, or names no base.
    """
    folder = adapter or next(iter(adapters.values()), None)
    if model or folder is None:
        return model
    from llamarium.adapters.files import base_of

    return base_of(Path(folder))


def public_name(model: str | Path | None, adapter: str | Path | None, adapters: Adapters) -> str:
    """Return a model's name in requests: the last part of a path, or that of `adapter` if no model is given.

    For arguments and errors see `base_model`.
    """
    if not model and adapter is not None:
        return _last_name(adapter)
    name = base_model(model, None, adapters) or DEFAULT_MODEL
    path = Path(name)
    return _last_name(path) if path.is_absolute() or path.exists() else str(name)


def _last_name(path: str | Path) -> str:
    return Path(path).absolute().name or str(path)
