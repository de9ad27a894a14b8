"""Where letters stand on the page, in the DOM, in drawings and on canvases: which lie over each other or are cut."""

from pathlib import Path

from playwright.sync_api import Page

RECORDS = (Path(__file__).parent / "letters_recorded.js").read_text()
"""To run before the page's own scripts: canvases tell what is written on them."""

_FAULTS = (Path(__file__).parent / "letters_faults.js").read_text()


def faults(page: Page) -> list[str]:
    """Return what lies over something else or is cut, of all that can be read now."""
    return page.evaluate(_FAULTS)
