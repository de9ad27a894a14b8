"""A view as PNG for a slide, as SVG of plain shapes and as CSV; and long texts, whose picture comes in pieces."""

import csv
import struct
import xml.etree.ElementTree as ElementTree

import pytest
from playwright.sync_api import Page, expect

from page_browser import HOSTILE, Held, link, saved, settled
from serving import Running

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("stage", ["first", "story", "attention", "attribution"])
def test_any_view_is_saved_for_a_slide_and_its_numbers_for_a_spreadsheet(
    page: Page, served: Running, stage: str
) -> None:
    page.goto(link(served, "The cat <b>sat", stage=stage))
    settled(page)
    page.wait_for_timeout(300)
    png = saved(page, "PNG")[1]
    assert png.startswith(b"\x89PNG") and struct.unpack(">I", png[16:20]) == (1920,)
    drawn = ElementTree.fromstring(saved(page, "SVG")[1])
    kinds = {one.tag.removeprefix(SVG) for one in drawn.iter()}
    assert {"text", "path"} <= kinds <= {"svg", "rect", "text", "path", "image"}
    texts = " ".join(one.text or "" for one in drawn.iter(f"{SVG}text"))
    assert "cat" in texts or stage not in ("first", "story")
    for image in drawn.iter(f"{SVG}image"):
        assert image.attrib["href"].startswith("data:image/png;base64,")
    rows = list(csv.reader(saved(page, "CSV")[1].decode().splitlines()))
    assert rows[0][0] == "name" and rows[0][-1] == "value" and len(rows) > 2
    assert {len(row) for row in rows} == {len(rows[0])}


def test_a_hostile_text_is_text_in_a_file_too(page: Page, served: Running) -> None:
    page.goto(link(served, HOSTILE, stage="first"))
    settled(page)
    drawn = ElementTree.fromstring(saved(page, "SVG")[1])
    assert {one.tag.removeprefix(SVG) for one in drawn.iter()} <= {"svg", "rect", "text", "path"}
    assert "<img src=x" in " ".join(one.text or "" for one in drawn.iter(f"{SVG}text"))


def test_a_long_text_comes_in_pieces_that_can_be_stopped(page: Page, served: Running) -> None:
    """And what is drawn in pieces is what is drawn at once; the text before it is not shown meanwhile."""
    text = "The old cat sat on the red mat and saw a small bird. " * 20
    page.goto(link(served, stage="map"))
    settled(page)
    before = page.locator(".picture").screenshot()
    held = Held(page, "**/picture?*", of="blocks=true")
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Run").click()
    coming = page.locator(".picture .coming")
    expect(coming).to_contain_text("Computing: 0 of")
    expect(page.locator(".picture")).not_to_have_attribute("data-far", "")
    assert page.locator(".picture").screenshot() != before
    served.wait(lambda: page.wait_for_timeout(20) or len(held.routes) == 1)
    held.routes.pop().continue_()
    served.wait(lambda: page.wait_for_timeout(20) or len(held.routes) == 1)
    expect(page.locator(".picture")).to_have_attribute("data-far", "")
    done = int(coming.locator("progress").get_attribute("value") or 0)
    assert 0 < done <= 32 < int(coming.locator("progress").get_attribute("max") or 0)
    served.wait(lambda: page.wait_for_timeout(20) or len(held.routes) == 1)
    with page.expect_event("requestfailed", lambda one: "/picture?" in one.url):
        coming.get_by_role("button", name="Stop").click()  # while a piece is under way, which does not come any more
    expect(coming).to_contain_text(f"Stopped at {done} of")
    held.routes.clear()
    coming.get_by_role("button", name="Continue").click()
    served.wait(lambda: page.wait_for_timeout(20) or len(held.routes) == 1)
    held.go_on()
    expect(coming).to_have_count(0)
