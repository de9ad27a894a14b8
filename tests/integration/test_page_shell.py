"""What stands around the views, in a browser: the line of text, the address, the way back, the focus."""

import pytest
from playwright.sync_api import Page, expect

from page_browser import TEXT, Held, Intercepted, link, settled
from serving import Running

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

_SEEN = """
() => {
  const link = document.querySelector("nav.views [aria-current]").getBoundingClientRect();
  return link.left >= 0 && link.right <= innerWidth;
}
"""


def test_the_line_the_address_and_what_is_shown_are_of_one_text(page: Page, served: Running) -> None:
    line, strip = page.get_by_label("Text", exact=True), page.locator(".strip")
    page.goto(link(served, stage="lens", pos=1))
    settled(page)
    tried = page.get_by_role("button", name="The capital of France is")
    tried.click()
    expect(strip).to_contain_text("capital")
    expect(line).to_have_value("The capital of France is")
    settled(page)
    where = page.url
    assert "pos=4" in where and "text=The%20capital%20of%20France%20is" in where
    line.fill("word " * 600)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_contain_text("maximum context length")
    expect(page.get_by_text("What stands below is still what was shown before")).to_contain_text(
        "The capital of France"
    )
    expect(strip).to_contain_text("capital")
    expect(line).to_have_value("word " * 600)
    settled(page)
    assert page.url == where
    tried.click()
    expect(line).to_have_value("The capital of France is")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_what_is_on_its_way_is_not_saved(page: Page, served: Running) -> None:
    held = Held(page, "**/inspect/passes", of='"slow"')
    page.goto(link(served, stage="norm"))
    settled(page)
    save = page.locator("details.export button", has_text="JSON")
    expect(save).to_be_enabled()
    page.get_by_label("Text", exact=True).fill("slow")
    page.get_by_role("button", name="Run").click()
    expect(save).to_be_disabled()
    expect(page.locator("article .body")).to_have_attribute("aria-busy", "true")
    expect(page.locator(".strip")).to_contain_text("cat")
    held.go_on()
    expect(save).to_be_enabled()


def test_a_view_that_is_opened_has_the_focus_and_can_be_left_by_the_way_back(page: Page, served: Running) -> None:
    title = page.get_by_role("heading", level=2)
    page.goto(link(served, stage="map"))
    settled(page)
    expect(title).not_to_be_focused()
    page.get_by_role("button", name="embed_tokens").click()
    expect(title).not_to_have_text("The map")
    expect(title).to_be_focused()
    page.get_by_role("link", name="RMSNorm").click()
    expect(title).to_have_text("RMSNorm")
    expect(title).to_be_focused()
    assert page.title() == "RMSNorm · Llamarium"
    page.go_back()
    page.go_back()
    expect(title).to_have_text("The map")
    expect(title).to_be_focused()
    assert page.title() == "The map · Llamarium"


def test_a_narrow_page_shows_where_it_is_among_the_views(page: Page, served: Running) -> None:
    """And tells of the keys that do something there."""
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(link(served, stage="growth"))
    settled(page)
    assert page.evaluate(_SEEN)
    expect(page.get_by_text("Keys:")).to_contain_text("Shift with ↑ a layer up, ↓ down; ← → among the tokens")
    page.get_by_role("link", name="Chat").click()
    settled(page)
    expect(page.get_by_text("Keys:")).to_have_text("Keys: Shift with ← → walks through the views.")


def test_an_answer_that_grows_stops_when_it_is_left(page: Page, served: Running) -> None:
    held, asked = Held(page, "**/sampler"), list[str]()
    page.goto(link(served, stage="growth", layer=1))
    settled(page)
    assert not held.routes
    page.on("request", lambda one: asked.append(one.url) if one.url.endswith("/sampler") else None)
    page.get_by_role("button", name="8 greedy tokens").click()
    expect(page.get_by_role("button", name="8 greedy tokens")).to_be_disabled()
    served.wait(lambda: page.wait_for_timeout(20) or bool(held.routes))
    page.get_by_role("link", name="SwiGLU").click()
    settled(page)
    with page.expect_response("**/sampler"):
        held.go_on()
    page.get_by_role("link", name="What it would say now").click()
    settled(page)
    assert len(asked) == 1
    assert "answer=" not in page.url


def test_rooms_without_a_text_need_no_pass(page: Page, served: Running) -> None:
    asked = list[str]()
    page.on("request", lambda one: asked.append(one.url) if one.url.endswith("/passes") else None)
    inspected = Intercepted(page, "**/inspect/**")
    page.goto(link(served, "word " * 600, stage="chat"))
    settled(page)
    expect(page.get_by_label("Your message").or_(page.get_by_label("A text to continue"))).to_be_visible()
    assert asked == []
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_role("link", name="Follow").click()
    expect(page.get_by_role("alert")).to_contain_text("maximum context length")
    page.get_by_label("Text", exact=True).fill(TEXT)
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".strip")).to_contain_text("cat")
    expect(page.locator('.picture[data-far][aria-busy="false"]')).to_be_visible()
    page.get_by_role("link", name="Learn", exact=True).click()
    expect(page.get_by_role("heading", level=2)).to_be_focused()
    settled(page)
    inspected.answer = lambda route: route.fulfill(status=503)
    page.get_by_role("link", name="From text to vectors").click()  # its figures have no numbers then, its words stand
    expect(page.get_by_role("heading", level=3).first).to_be_visible()
    page.get_by_role("link", name="Glossary", exact=True).click()
    expect(page.get_by_role("term").first.or_(page.locator("dt").first)).to_be_visible()
