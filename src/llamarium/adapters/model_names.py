"""Resolve the base model of an adapter, and the public name of a model. No heavy imports."""

from collections.abc import Mapping
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"
"""What is loaded where neither a model nor an adapter is named."""

Adapters = Mapping[str, str] | Mapping[str, Path] | Mapping[str, str | Path]
"""Folders of adapters by the names that requests choose them by."""


def base_model(model: str | Path | None, adapter: str | Path | None, adapters: Adapters) -> str | Path | None:
    """Return the given model, else the base that `adapter`, or the first of `adapters`, names; or None.

    LlamariumError if an adapter's config cannot be read, or names no base.
    """
    folder = adapter or next(iter(adapters.values()), None)
    if model or folder is None:
        return model
    from llamarium.adapters.files import base_of

    return base_of(Path(folder))


def public_name(model: str | Path | None, adapter: str | Path | None, adapters: Adapters) -> str:
    """Return the name by which requests address a model: the last part of a path; of `adapter` where no model is given.

    Arguments and errors are those of `base_model`.
    """
    if not model and adapter is not None:
        return _last_name(adapter)
    name = base_model(model, None, adapters) or DEFAULT_MODEL
    path = Path(name)
    return _last_name(path) if path.is_absolute() or path.exists() else str(name)


def _last_name(path: str | Path) -> str:
    return Path(path).absolute().name or str(path)
