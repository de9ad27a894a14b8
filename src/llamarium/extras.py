"""Packages that only some people need: extras of the package, imported when they are asked for."""

import importlib
from typing import Any

from llamarium.errors import OptionError


def optional(module: str, extra: str, purpose: str, package: str | None = None) -> Any:
    """Import an optional package's module.

    Args:
        module: Its dotted name.
        extra: The extra that installs it.
        purpose: What needs it, for the message.
        package: Its name, where it is not the module's.

    Raises:
        OptionError: With the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = package or module.partition(".")[0]
        raise OptionError(f"{purpose} needs the package {package}: pip install 'llamarium[{extra}]'") from None
