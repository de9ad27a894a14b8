"""What is drawn: it can be read in a narrow window, by keys and as text, and what is saved says what it shows."""

import re
import xml.etree.ElementTree as ET

import pytest
from playwright.sync_api import Locator, Page, expect

from llamarium.api import Llama
from page_browser import TEXT, as_shown, link, saved, settled, shown
from serving import Running

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

SVG = "{http://www.w3.org/2000/svg}"


def read_table(page: Page, name: str) -> list[list[str]]:
    """The cells of a table in the region of this name, as soon as it has rows; its heads left out."""
    rows = page.get_by_role("region", name=re.compile(name)).locator("tbody tr")
    expect(rows.first).to_be_visible()
    cells = "(rows) => rows.map((row) => [...row.querySelectorAll('th, td')].map((cell) => cell.innerText))"
    return [[cell.replace("\u2212", "-") for cell in row] for row in rows.evaluate_all(cells)]


def test_a_matrix_wider_than_its_place_scrolls_and_names_the_cell_under_the_pointer(
    page: Page, served: Running, llama: Llama
) -> None:
    """Of a long text the last tokens are drawn, two pixels each."""
    ids = range(1000, 1300)
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(link(served, stage="growth", ids="-".join(map(str, ids))))
    settled(page)
    expect(page.get_by_text("The last 256 of 300 are drawn")).to_be_visible()
    matrix = page.get_by_role("application", name=re.compile("^Keys in the cache"))
    matrix.scroll_into_view_if_needed()
    box = matrix.bounding_box()
    assert box is not None and box["width"] == 512
    matrix.hover(position={"x": 2 * 100 + 1, "y": 5})
    readout = page.locator(".readout").first
    named = llama.tokenizer.decode([ids[44 + 100]]).replace(" ", "\u2423", 1)
    expect(readout).to_contain_text(f"token {named}:")
    page.mouse.move(0, 0)
    matrix.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")  # from the last, which is chosen
    box = matrix.bounding_box()
    assert box is not None and box["x"] + 2 * 253 < 360  # the keys scroll to where they have come
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_letters_keep_their_size_in_a_narrow_window(page: Page, served: Running) -> None:
    page.set_viewport_size({"width": 320, "height": 800})
    figures = (
        ("embedding", "A map of them", "^The rows of the text's tokens"),
        ("bits", "levels of NF4", "^The levels of NF4"),
    )
    for stage, title, label in figures:
        page.goto(link(served, stage=stage, layer=1))
        page.locator("summary", has_text=title).click()
        letters = page.get_by_role("img", name=re.compile(label)).locator("text")
        expect(letters.first).to_be_visible()
        settled(page)
        assert min(one.bounding_box()["height"] for one in letters.all()) > 11  # type: ignore[index]
    page.goto(link(served, stage="residual", layer=1))
    step = page.get_by_text("3 of 4: attention of layer 1")
    expect(step).to_be_visible()
    assert step.evaluate("one => one.getBoundingClientRect().right") <= 320


def test_curves_and_patterns_can_be_read_as_tables(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="rope", layer=1, head=1, pos=4))
    settled(page)
    page.locator(".plot").get_by_text("As a table").click()
    rows = read_table(page, "Score of the query against the key.*as a table")
    assert [row[0] for row in rows[:3]] == ["0", "1", "2"] and len(rows) > 100
    assert as_shown(float(rows[4][1]), 4) == shown(page, "score")
    page.goto(link(served, stage="residual", layer=0, pos=4))
    settled(page)
    page.locator(".plot").get_by_text("As a table").click()
    page.get_by_role("region", name=re.compile("Length of the stream.*as a table")).get_by_role(
        "button", name="3"
    ).click()  # what a click on the curve does
    expect(page.get_by_text("3 of 4: attention of layer 1")).to_be_visible()
    page.goto(link(served, stage="heads-looking", layer=0, head=0, pos=4))
    settled(page)
    page.get_by_text("As a table").click()
    patterns = [llama.trace(TEXT)[f"layers.{layer}.pattern"] for layer in (0, 1)]
    rows = read_table(page, "Where each head looks on the whole")
    for row in rows:
        seen = patterns[int(row[0])][int(row[1])][1:]
        means = [seen[:, 0], seen.diagonal(1), seen.diagonal(0)]
        assert [float(cell) for cell in row[2:]] == [pytest.approx(one.mean().item(), abs=0.008) for one in means]
    page.get_by_role("button", name="Open layer 1, head 1").click()
    expect(page.get_by_role("heading", name="Layer 1, head 1")).to_be_visible()
    grid = page.get_by_role("application", name=re.compile("^Patterns of all heads"))
    grid.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("heading", name="Layer 1, head 0")).to_be_visible()


def test_what_is_saved_says_what_it_shows(page: Page, served: Running) -> None:
    """A picture has its colours' scale, a curve its axes and names."""
    page.goto(link(served, stage="residual", layer=1, pos=4))
    settled(page)
    drawn = ET.fromstring(saved(page, "SVG")[1])
    texts = {(one.text or "").strip() for one in drawn.iter(f"{SVG}text")}
    assert {"\u2191 length", "step", "the stream", "what is added"} <= {one.lstrip("\u2500\u2504 ") for one in texts}
    matrix = page.get_by_role("application", name=re.compile("^What .* adds"))
    foot = page.locator(".matrix").filter(has=matrix)
    assert set(foot.locator(".scale .number").all_inner_texts()) <= texts
    legend = foot.locator(".ramp").evaluate("one => getComputedStyle(one).backgroundImage")
    check_a_cell_has_its_legends_color(page, matrix, legend)


_CELL = """
(canvas, [row, col, rows, cols]) => {
  const [x, y] = [((col + 0.5) * canvas.width) / cols, ((row + 0.5) * canvas.height) / rows];
  const one = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  one.drawImage(canvas, -Math.floor(x), -Math.floor(y));
  return [...one.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}
"""


def check_a_cell_has_its_legends_color(page: Page, matrix: Locator, legend: str) -> None:
    """Hold two cells of other signs, as they are read out and drawn, to the place of their number on the legend."""
    stops = [list(map(int, rgb)) for rgb in re.findall(r"rgb\((\d+), (\d+), (\d+)\)", legend)]
    rows, cols = map(int, re.findall(r": (\d+) by (\d+)", matrix.get_attribute("aria-label") or "")[0])
    foot = page.locator(".matrix").filter(has=matrix).locator(".foot")
    end = as_number(foot.locator(".scale .number").last.inner_text())
    matrix.focus()
    signs = set[bool]()
    for col in range(1, 12):
        page.keyboard.press("ArrowRight")
        value = as_number(foot.locator(".readout").inner_text().rsplit(": ", 1)[1])
        signs.add(value > 0)
        at = min(1, max(0, 0.5 + value / end / 2)) * (len(stops) - 1)
        left = min(len(stops) - 2, int(at))
        wanted = [a + (b - a) * (at - left) for a, b in zip(stops[left], stops[left + 1], strict=True)]
        drawn = matrix.evaluate(_CELL, [0, col, rows, cols])
        assert max(abs(a - b) for a, b in zip(drawn, wanted, strict=True)) < 4, (col, value)
    assert signs == {True, False}


def as_number(text: str) -> float:
    return float(text.replace("\u2212", "-").replace("\u202f", "").split()[0])


def test_what_is_typed_stays_until_it_is_asked(page: Page, served: Running) -> None:
    """While something else is chosen; and a link that names other words brings those."""
    page.goto(link(served, stage="steer", layer=1))
    page.get_by_label("toward").fill("not asked yet")
    page.get_by_role("slider", name="strength").fill("3")
    expect(page).to_have_url(re.compile("strength=3"))
    settled(page)
    expect(page.get_by_label("toward")).to_have_value("not asked yet")
    page.goto(link(served, stage="context", layer=1))
    page.get_by_role("textbox", name="The other sentence").fill("not asked either")
    page.get_by_label("mask off, as in an encoder").check()
    settled(page)
    expect(page.get_by_role("textbox", name="The other sentence")).to_have_value("not asked either")
    page.goto(link(served, stage="embedding"))
    expect(page.get_by_label("one", exact=True)).to_have_value("cat")
    page.goto(link(served, stage="embedding", one="sun", minus=" "))
    expect(page.get_by_label("one", exact=True)).to_have_value("sun")
    expect(page.get_by_label("minus")).to_have_value("")
