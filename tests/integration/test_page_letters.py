"""Nothing that is written lies over something else or is cut: every view, in all sizes of window, light and dark."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from page_browser import link, settled
from page_bundle import WEB
from page_letters import RECORDS, faults
from serving import Running, small_llama

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

SIZES = ((360, 740), (640, 360), (768, 1000), (1280, 900), (1920, 1080))
"""Width and height; at 200 %, a window of 1280 x 720 has 640 x 360 CSS pixels."""

TEXT = "My grandmother baked a delicious apple"

UNHURRIED = ("first", "story", "glossary", "lesson", "bits-cost", "compare")
"""Views without a frame that says when it is ready, and those that first make another model: read as they come."""


def views() -> list[str]:
    """The ids of all views that are listed in a room, and a chapter of the course."""
    lists = sorted((WEB / "src").glob("*/index.ts"))
    return [one for path in lists for one in re.findall(r'\{ id: "([a-z-]+)"', path.read_text())]


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> Any:
    """As many layers as a real model has, so that they are folded."""
    return small_llama(smollm2_path, num_hidden_layers=30)


@pytest.fixture
def read_page(window: BrowserContext, page: Page) -> Page:
    page.add_init_script(RECORDS)
    return page


@pytest.mark.parametrize("view", views())
def test_what_is_written_can_be_read(read_page: Page, served: Running, view: str) -> None:
    page = read_page
    found = list[str]()
    page.goto(link(served, TEXT, stage=view, pos=5, layer=3, head=1, details=0))
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if width == 768 else "light", reduced_motion="reduce")
        if view not in UNHURRIED:
            settled(page)
        page.wait_for_timeout(300)
        found += [f"{width}: {one}" for one in faults(page)]
    assert not found, "\n".join(found)
