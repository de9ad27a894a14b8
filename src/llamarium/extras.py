"""Optional packages (extras), imported on first use."""

import importlib
from importlib.util import find_spec
from typing import Any, NoReturn

from llamarium.errors import MissingPackageError


def optional(module: str, extra: str, purpose: str, package: str | None = None) -> Any:
    """Import a module of an optional package, which `extra` installs and `purpose` needs.

    `package` is the package's name if it differs from the module's. The MissingPackageError has the command that
    installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _missing(purpose, f"the package {package or module.partition('.')[0]}", extra) from None


def has_torch() -> bool:
    """Return whether PyTorch is installed, without importing it."""
    return find_spec("torch") is not None


def need_torch(purpose: str, extra: str = "torch") -> None:
    """Check that PyTorch is installed without importing it, which takes seconds; MissingPackageError as `optional`."""
    if not has_torch():
        raise _missing(purpose, "PyTorch", extra)


class _NeedsTorch(type):
    """Metaclass of placeholders for classes that need PyTorch."""

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> "_NeedsTorch":
        if bases:  # of a subclass
            bases[0]()
        return super().__new__(cls, name, bases, members)

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise _missing(cls.__name__, "PyTorch", "torch")

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("_"):  # `help`, `copy` and others look up such names
            raise AttributeError(name)
        raise _missing(f"{cls.__name__}.{name}", "PyTorch", "torch")


def stand_in(name: str, doc: str) -> type:
    """Return a placeholder for a class that needs PyTorch; it can be imported, but use raises MissingPackageError."""
    return _NeedsTorch(name, (), {"__doc__": doc, "__module__": "llamarium"})


def _missing(purpose: str, package: str, extra: str) -> MissingPackageError:
    return MissingPackageError(f"{purpose} needs {package}: pip install 'llamarium[{extra}]'")
