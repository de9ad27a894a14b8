"""Models that lie in the package itself: small enough to ship, and there where nothing can be downloaded.

Each is a folder below `llamarium/models/`, a Hugging Face folder like any other, with a card (README.md) that says how
it was trained.
"""

from collections.abc import Mapping
from pathlib import Path

PACKAGED: Mapping[str, str] = {
    "shakespeare-char": "2.4M parameters; writes like Shakespeare, by characters",
}
"""Their names, and what they are in a line."""


def packaged_path(name: str) -> Path:
    """Return the folder of a packaged model."""
    return Path(__file__).parents[1] / "models" / name
