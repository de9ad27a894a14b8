"""The check of a setting's text, which has to fit into the file of a run's settings."""

import re
from collections.abc import Mapping
from typing import cast

from llamarium.errors import TrainingError, show_value

_HALF_PAIR = re.compile("[\ud800-\udfff]")  # a byte of the shell that is no UTF-8 comes as one; no TOML can hold it


def check_text(name: str, value: object) -> None:
    """Refuse a text that is no valid Unicode, or a name of several sources or functions; TrainingError."""
    texts = list(cast("Mapping[str, float]", value)) if isinstance(value, Mapping) else [value]
    if any(isinstance(text, str) and _HALF_PAIR.search(text) for text in texts):
        raise TrainingError(
            f"{name} is {show_value(value)}; expected a text that is valid Unicode (rename a file whose name is not)"
        )
