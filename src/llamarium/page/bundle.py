"""Location of the built page, and its content security policy. Needs neither torch nor a web framework."""

from pathlib import Path

DIST = Path(__file__).with_name("dist")
"""Folder of the bundle."""

HOW_TO_BUILD = "install Node.js 20 or newer and run `make page`, or install the package again where Node.js is"
"""Shown if the page is not built."""

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'"
"""The page's content security policy: no external or inline resources. A header adds `frame-ancestors`."""


def is_built(folder: Path = DIST) -> bool:
    """Return whether the folder has a built page."""
    return (folder / "index.html").is_file()
