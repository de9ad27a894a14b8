"""The evaluation harness, where it is installed."""

import importlib
from typing import Any

from llamarium.errors import OptionError


def harness(module: str) -> Any:
    """Import a module of the harness; an OptionError, before torch is loaded, names the command that installs it."""
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise OptionError(
            f"the evaluation harness cannot be imported ({error}): pip install 'llamarium[eval]'"
        ) from None
