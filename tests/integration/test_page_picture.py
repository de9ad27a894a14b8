"""The picture: what it says are the numbers of the pass, every stage is a place in it, and a link names the place."""

import re

import pytest
from playwright.sync_api import Page, Route, expect

from llamarium.api import Llama
from page_browser import TEXT, Intercepted, check_fits_and_is_open, link, settled
from serving import Running

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def calm(page: Page) -> None:
    """Without flights: what is asked for is there at once."""
    page.emulate_media(reduced_motion="reduce")


def drawn(page: Page) -> None:
    """Wait until the pass and its lens are drawn."""
    settled(page)
    expect(page.locator('.picture[data-far][aria-busy="false"]')).to_be_visible()


def frames(page: Page, count: int) -> None:
    """Wait until the page has drawn so often, however long that takes."""
    page.evaluate(
        "count => new Promise(done => { const next = () => count-- ? requestAnimationFrame(next) : done(); next(); })",
        count,
    )


def said(page: Page, mark: str) -> float:
    """The number of a mark, as its row in the table has it."""
    text = page.locator(f'[data-mark="{mark}"] td').inner_text()
    return float(text.split()[0].replace("\u2212", "-"))


def where(page: Page) -> str:
    return page.get_by_role("navigation", name="Place in the picture").locator("[aria-current]").inner_text()


def test_every_number_of_the_whole_is_of_the_pass(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="map", pos=4))
    drawn(page)
    page.get_by_text("Numbers of the picture").click()
    trace = llama.trace(TEXT)
    for layer in range(2):
        at = f"layers.{layer}."
        length = {name: trace[at + name].double().norm(dim=-1) for name in ("resid", "mlp_out", "k", "v")}
        assert said(page, f"c4.l{layer}.stream") == pytest.approx(length["resid"][4].item(), rel=1e-5)
        assert said(page, f"c4.l{layer}.mlp") == pytest.approx(
            (length["mlp_out"] / length["resid"])[4].item(), rel=1e-5
        )
        assert said(page, f"c4.l{layer}.key") == pytest.approx(length["k"][4].mean().item(), rel=1e-5)
        assert said(page, f"c4.l{layer}.value") == pytest.approx(length["v"][4].mean().item(), rel=1e-5)
        shares = trace[at + "pattern"].mean(0)
        assert said(page, f"l{layer}.q4.k2") == pytest.approx(shares[4, 2].item(), rel=1e-5)
    lens = llama.inspect.lens(TEXT, k=1, positions=[4], after="mlp")
    words = {f"c4.l{one.layer}.word": one.candidates[0][0].probability for one in lens.layers}
    shown = page.locator('[data-mark$=".word"]').evaluate_all("(rows) => rows.map((row) => row.dataset.mark)")
    assert set(shown) <= {mark for mark, probability in words.items() if probability >= 0.1}
    assert all(said(page, mark) == pytest.approx(words[mark], rel=1e-5) for mark in shown)
    assert_colors_are_the_legends(page)
    logits = trace["logits"][-1]
    assert said(page, "next0") == pytest.approx(logits.softmax(-1).max().item(), rel=1e-5)


_COLORS = """
([x, y]) => {
  const canvas = document.querySelector(".picture canvas");
  const sharp = canvas.width / canvas.clientWidth;
  const one = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  one.drawImage(canvas, -Math.round(x * sharp), -Math.round(y * sharp));
  const drawn = one.getImageData(0, 0, 1, 1).data;
  return [[...drawn.slice(0, 3)], getComputedStyle(document.querySelector(".legend .mlp"), "::before").backgroundColor];
}
"""


def assert_colors_are_the_legends(page: Page) -> None:
    """What an MLP has added is drawn in the colour that the legend gives it, light and dark."""
    seen = list[list[int]]()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        frames(page, 6)
        box = page.locator(".picture canvas").first.bounding_box()
        x, y = _over(page, 0.79)
        assert box is not None
        drawn, legend = page.evaluate(_COLORS, [x - box["x"], y - box["y"]])
        assert drawn == [int(part) for part in re.findall(r"\d+", legend)], scheme
        seen.append(drawn)
    assert seen[0] != seen[1]


def test_a_place_is_entered_left_and_named_by_its_link(page: Page, served: Running) -> None:
    page.goto(link(served, stage="map", pos=2))
    drawn(page)
    assert where(page) == "whole"
    page.locator(".picture canvas").first.focus()
    page.keyboard.press("ArrowUp")  # layer 1
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="The residual stream")).to_be_visible()
    assert where(page) == "layer 1"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Attention", exact=True)).to_be_visible()
    assert where(page) == "attention"
    page.wait_for_function("location.hash.includes('stage=attention')")
    page.reload()
    drawn(page)
    assert where(page) == "attention" and "layer=1" in page.url and "pos=2" in page.url
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="The residual stream")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="The map")).to_be_visible()
    assert where(page) == "whole"


def test_a_click_enters_the_layer_under_it_and_a_hover_says_the_number(
    page: Page, served: Running, llama: Llama
) -> None:
    page.goto(link(served, stage="map", pos=5))
    drawn(page)
    page.mouse.move(*_over(page))
    expect(page.get_by_role("tooltip")).to_contain_text("layer 0")
    page.mouse.down()
    page.mouse.up()
    expect(page.get_by_role("heading", name="The residual stream")).to_be_visible()
    assert where(page) == "layer 0"
    expect(page.locator('.strip [aria-checked="true"]')).to_contain_text("on")


def _over(page: Page, up: float = 0.62) -> tuple[float, float]:
    """A point of the stream of token 3 in layer 0, so far up in it, by where the whole stands: 6 tokens, 2 layers."""
    box = page.locator(".picture canvas").first.bounding_box()
    assert box is not None
    x0, x1, y0, y1 = -0.9, 6.9, -2.4, 2 + 3
    return box["x"] + box["width"] * (3 - x0) / (x1 - x0), box["y"] + box["height"] * (1 - (up - y0) / (y1 - y0))


def test_wheel_drag_and_fingers_move_the_picture(page: Page, served: Running) -> None:
    page.goto(link(served, stage="map", pos=3))
    drawn(page)
    x, y = _over(page)
    page.mouse.move(x, y)
    for _ in range(3):
        page.mouse.wheel(0, -70)
        frames(page, 6)  # turns of one frame come as one
    expect(page.get_by_role("heading", name="The residual stream")).to_be_visible()
    page.mouse.wheel(0, 70)
    expect(page.get_by_role("heading", name="The map")).to_be_visible()
    touch = page.context.new_cdp_session(page)

    def fingers(kind: str, *apart: float) -> None:
        points = [{"x": x + side * part / 2, "y": y, "id": side} for part in apart for side in (0, 1)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def pinch(*apart: float) -> None:
        fingers("touchStart", apart[0])
        for part in apart[1:]:
            fingers("touchMove", part)
            frames(page, 6)
        fingers("touchEnd")

    pinch(40, 60, 90, 140)
    expect(page.get_by_role("heading", name="The residual stream")).to_be_visible()
    pinch(140, 90)
    expect(page.get_by_role("heading", name="The map")).to_be_visible()
    page.goto(link(served, stage="attention", layer=1, pos=3))
    drawn(page)
    before = page.locator(".picture canvas").first.screenshot()
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y + 20)
    page.mouse.move(x + 90, y + 40)
    page.mouse.up()
    assert page.locator(".picture canvas").first.screenshot() != before
    assert where(page) == "attention"  # no click


def test_a_token_more_is_a_column_more(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="map"))
    drawn(page)
    page.get_by_role("button", name="Next token").click()
    expect(page.locator(".strip [role=radio]")).to_have_count(7)
    drawn(page)
    ids = [int(one) for one in page.locator(".strip .id").all_inner_texts()]
    assert ids[:6] == llama.tokenizer.encode(TEXT)
    expect(page.get_by_text("tokens by their ids")).to_have_count(0)  # they are the text that stands in the line
    page.get_by_text("Numbers of the picture").click()
    length = llama.trace(ids)["layers.1.resid"].double().norm(dim=-1)[6].item()
    assert said(page, "c6.l1.stream") == pytest.approx(length, rel=1e-5)
    assert re.search(r"ids=[\d-]+", page.url)


def test_a_long_text_is_drawn_in_blocks(page: Page, served: Running, llama: Llama) -> None:
    ids = [1000 + i for i in range(150)]
    page.goto(link(served, stage="map", pos=149, ids="-".join(map(str, ids))))
    drawn(page)
    expect(page.get_by_text(re.compile("Blocks of 3 tokens: means"))).to_be_visible()
    page.get_by_text("Numbers of the picture").click()
    seen = llama.trace(ids, names=["pattern", "resid"], positions=[147, 148, 149])
    pattern_TS = seen["layers.0.pattern"].mean(0)
    shares = {key: pattern_TS[:, 3 * key : 3 * key + 3].sum(-1).max().item() for key in range(1, 49)}
    for key in sorted(shares, key=lambda key: -shares[key])[:3]:  # of the last of 50 columns; others are not drawn
        assert shares[key] < 0.01 or said(page, f"l0.q49.k{key}") == pytest.approx(shares[key], rel=1e-5)
    mean = seen["layers.1.resid"].double().norm(dim=-1).mean().item()
    assert said(page, "c49.l1.stream") == pytest.approx(mean, rel=1e-5)
    box = page.locator(".picture canvas").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.get_by_text(re.compile(r"tokens \d+ to \d+: all 150"))).to_be_visible()
    drawn(page)
    page.keyboard.press("Escape")
    expect(page.get_by_text(re.compile("Blocks of 3 tokens: means"))).to_be_visible()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.get_by_text(re.compile(r"tokens \d+ to \d+: all 150"))).to_be_visible()
    page.get_by_label("Text", exact=True).fill("The cat")
    page.get_by_label("Text", exact=True).press("Enter")
    expect(page.locator(".strip [role=radio]")).to_have_count(2)
    expect(page.get_by_text(re.compile(r"tokens \d+ to \d+: all"))).to_have_count(0)  # which this text has not


def test_a_row_that_the_matrix_has_not_is_its_last(page: Page, served: Running) -> None:
    page.goto(link(served, stage="mlp", pos=2, depth=4, product="down_proj", row=9999))
    drawn(page)
    assert where(page) == "row 63"


def test_what_is_drawn_without_an_adapter_is_marked_where_the_adapters_numbers_do_not_come(
    page: Page, served: Running
) -> None:
    passes = Intercepted(page, "**/inspect/passes")
    page.goto(link(served, stage="map", pos=2))
    drawn(page)
    expect(page.locator(".picture .stale")).to_have_count(0)

    def adapted(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "id": "another", "adapter": "another"})

    passes.answer = adapted
    page.get_by_label("Text", exact=True).press("Enter")
    expect(page.locator(".picture .trouble")).to_be_visible()
    expect(page.locator(".picture .stale")).to_be_visible()


def test_the_picture_fits_and_is_open(page: Page, served: Running) -> None:
    check_fits_and_is_open(page, link(served, stage="map", pos=2))
