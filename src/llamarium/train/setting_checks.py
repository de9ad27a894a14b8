"""Check that text settings can be written to a run's TOML file."""

import re
from collections.abc import Mapping
from typing import cast

from llamarium.errors import TrainingError, show_value

# Python decodes bytes of the command line that are not UTF-8 to lone surrogates, which TOML cannot represent.
_HALF_PAIR = re.compile("[\ud800-\udfff]")


def check_text(name: str, value: object) -> None:
    """Raise TrainingError if a text, or a name in a mapping of sources or functions, is not valid Unicode."""
    texts = list(cast("Mapping[str, float]", value)) if isinstance(value, Mapping) else [value]
    if any(isinstance(text, str) and _HALF_PAIR.search(text) for text in texts):
        raise TrainingError(
            f"{name} is {show_value(value)}; expected a text that is valid Unicode (rename a file whose name is not)"
        )
