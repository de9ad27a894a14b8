"""Optional packages: extras, imported when they are needed."""

import importlib
from importlib.util import find_spec
from typing import Any

from llamarium.errors import MissingPackageError


def optional(module: str, extra: str, purpose: str, package: str | None = None) -> Any:
    """Import an optional package's module, which an `extra` installs and a `purpose` needs.

    MissingPackageError has the command that installs the `package`, which is the module's name where left out.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _missing(purpose, f"the package {package or module.partition('.')[0]}", extra) from None


def has_torch() -> bool:
    """Return whether PyTorch is installed, without importing it."""
    return find_spec("torch") is not None


def need_torch(purpose: str, extra: str = "torch") -> None:
    """Check that PyTorch is installed, without the seconds of importing it; MissingPackageError as of `optional`."""
    if not has_torch():
        raise _missing(purpose, "PyTorch", extra)


def _missing(purpose: str, what: str, extra: str) -> MissingPackageError:
    return MissingPackageError(f"{purpose} needs {what}: pip install 'llamarium[{extra}]'")
