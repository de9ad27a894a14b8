"""Imports of the harness's modules; if it is not installed, one line says so, before torch is loaded."""

import importlib
from typing import Any

from llamarium.errors import OptionError


def harness(module: str) -> Any:
    """Import a module of the harness.

    Raises:
        OptionError: With the command that installs it.
    """
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise OptionError(
            f"the evaluation harness cannot be imported ({error}): pip install 'llamarium[eval]'"
        ) from None
