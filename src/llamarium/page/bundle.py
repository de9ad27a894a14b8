"""Where the built page lies, and its content security policy. Needs neither torch nor a web framework."""

from pathlib import Path

DIST = Path(__file__).with_name("dist")
"""Where the bundle lies."""

HOW_TO_BUILD = "install Node.js 20 or newer and run `make page`, or install the package again where Node.js is"
"""Shown where the page was not built."""

POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none'"
"""The page's content security policy: nothing from elsewhere, nothing inline. A header adds `frame-ancestors`."""


def is_built(folder: Path = DIST) -> bool:
    """Whether the folder holds a built page."""
    return (folder / "index.html").is_file()
