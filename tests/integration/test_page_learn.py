"""The course in the page: chapters, links to their stages and back, and words with the glossary's own sentences."""

import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from llamarium.api import Llama
from page_browser import check_fits_and_is_open, link, settled
from serving import Running

ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs/learn"
CHAPTERS = tuple(path.stem.partition("-")[2] for path in sorted(COURSE.glob("[0-9]-*.md")))
ENTRY = re.compile(r"^### (.+)\n\n((?:.+\n)+)", re.M)

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


def glossary() -> dict[str, str]:
    """The glossary's sentences by its words, read here for themselves."""
    text = (COURSE / "glossary.md").read_text(encoding="utf-8")
    return {name: " ".join(said.split()) for name, said in ENTRY.findall(text)}


@pytest.mark.parametrize("view", [*CHAPTERS, "glossary"])
def test_the_course_fits_and_is_open_to_everybody(page: Page, served: Running, view: str) -> None:
    check_fits_and_is_open(page, link(served, stage=view))


def test_a_word_says_what_the_glossary_says(page: Page, served: Running) -> None:
    """By mouse, by keyboard, by touch; Escape closes it; it is what the word is described by."""
    said = glossary()
    page.goto(link(served, stage="norm"))
    settled(page)
    word, tooltip = page.get_by_role("button", name="gamma", exact=True), page.locator("[role=tooltip]:popover-open")
    expect(word).to_have_accessible_description(said["gamma"])
    expect(tooltip).to_have_count(0)
    word.hover()
    expect(tooltip).to_have_text(said["gamma"])
    tooltip.hover()
    expect(tooltip).to_have_count(1)
    page.get_by_role("heading", level=2).hover()
    expect(tooltip).to_have_count(0)
    word.focus()
    expect(tooltip).to_have_text(said["gamma"])
    page.keyboard.press("Tab")
    expect(tooltip).to_have_text(said["RMSNorm"])
    page.keyboard.press("Escape")
    expect(tooltip).to_have_count(0)
    expect(page.get_by_role("heading", level=2)).to_have_text("RMSNorm")


def test_a_word_can_be_touched_where_the_page_is_narrow(browser: Browser, served: Running) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, has_touch=True)
    page = context.new_page()
    page.goto(link(served, stage="qkv"))
    settled(page)
    tooltip = page.locator("[role=tooltip]:popover-open")
    page.get_by_role("button", name="grouped-query attention").tap()
    expect(tooltip).to_have_text(glossary()["grouped-query attention"])
    box = tooltip.bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360
    page.get_by_role("heading", level=2).tap()
    expect(tooltip).to_have_count(0)
    context.close()


def test_the_page_and_the_glossary_are_equal(page: Page, served: Running) -> None:
    page.goto(link(served, stage="glossary"))
    settled(page)
    words, sentences = page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts()
    assert dict(zip(words, sentences, strict=True)) == glossary()


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_leads_to_stages_and_stages_to_it(page: Page, served: Running, chapter: str) -> None:
    """Each of its links opens the view that it names, and the view has a way back to the section."""
    (path,) = COURSE.glob(f"[0-9]-{chapter}.md")
    text = path.read_text(encoding="utf-8")
    written = re.findall(r"`(#stage=[^`]+)`", text)
    page.goto(link(served, stage=chapter))
    settled(page)
    expect(page.get_by_role("heading", level=2)).to_have_text(text.splitlines()[0].removeprefix("# "))
    assert [one.get_attribute("href") for one in page.locator("a.see").all()] == written
    page.locator("a.see").first.click()
    settled(page)
    assert page.url.partition("#")[2].startswith(re.sub("&.*", "", written[0])[1:])
    expect(page.get_by_role("heading", level=2)).not_to_have_text(text.splitlines()[0].removeprefix("# "))
    page.go_back()
    settled(page)
    assert f"stage={chapter}" in page.url


def test_a_section_is_read_beside_its_stage(page: Page, served: Running) -> None:
    page.goto(link(served, stage="rope", layer=1, pos=2))
    settled(page)
    lesson = page.locator("details.lesson").first
    summary = lesson.locator("summary").first
    summary.click()
    expect(lesson.locator("pre").first).to_be_visible()
    expect(lesson.get_by_role("button", name="Copy").first).to_be_visible()
    assert Axe().run(page).violations_count == 0
    title = summary.inner_text().removeprefix("In the course: ")
    lesson.get_by_role("link", name="The whole chapter").click()
    settled(page)
    heading = page.get_by_role("heading", level=3, name=title)
    expect(heading).to_be_focused()
    expect(heading).to_be_in_viewport()
    assert "stage=where-order-comes-from&layer=1" in page.url and "section=" in page.url


def test_commands_are_copied_without_what_they_print(browser: Browser, served: Running) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(link(served, stage=CHAPTERS[0]))
    settled(page)
    block = page.locator(".block", has_text="$ llamarium tokenize").first
    block.get_by_role("button", name="Copy").click()
    expect(block.get_by_role("status")).to_have_text("copied")
    shown = block.locator("pre").inner_text().splitlines()
    assert page.evaluate("navigator.clipboard.readText()").splitlines() == [
        row.removeprefix("$ ") for row in shown if row.startswith("$ ")
    ]
    context.close()


def test_a_chapter_shows_a_figure_that_is_live(page: Page, served: Running, llama: Llama) -> None:
    """What its table says is the model's own; its Python is folded, and it leads to its stage."""
    page.goto(link(served, stage="how-attention-works"))
    settled(page)
    section = page.locator("section", has=page.get_by_role("heading", name="One head in four lines"))
    expect(section.locator("pre").first).to_be_hidden()
    figure = section.locator("figure")
    figure.scroll_into_view_if_needed()
    figure.get_by_text("Numbers of the picture").click()
    pattern = llama.trace("The cat sat").arrays["pattern", 1][1, 2]  # head 2 is none of this small model's two
    for key, share in enumerate(pattern):
        written = figure.locator(f'[data-mark="b.attention.share{key}"] td').inner_text()
        assert float(written.split()[0]) == pytest.approx(float(share), rel=1e-5)
    expect(figure.locator("figcaption")).to_contain_text("layer 1, head 1, token 2")
    section.get_by_text("The code, and what it prints").click()
    expect(section.locator("pre").first).to_contain_text("scores.softmax")
    figure.get_by_role("link", name="Open it in Follow").click()
    expect(page).to_have_url(re.compile("stage=attention&layer=1&head=1&pos=2&text=The%20cat%20sat"))
    settled(page)
