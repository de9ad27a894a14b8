"""The first screen and the story: their numbers are the pass's, and all of it can be reached by keys and on a phone."""

import re

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from llamarium.cli.inspect import link_to
from page_browser import KEY, check_fits_and_is_open, check_is_open, link, settled
from serving import Running

TEXT = "The dog saw a cat and ran"
CARDS = 12

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


def probabilities(llama: Llama, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return the probabilities of the next token, the largest first."""
    logits = llama.trace(ids, names=["logits"])["logits"][-1].double().numpy() / temperature
    weights = np.exp(logits - logits.max())
    return np.sort(weights / weights.sum())[::-1]


def bars(page: Page) -> list[float]:
    settled(page)
    return [float(one.removesuffix(" %")) for one in page.locator(".bars .share").all_inner_texts()]


def as_bars(values: np.ndarray) -> list[float]:
    return [pytest.approx(100 * one, abs=0.051) for one in values[:5]]


def test_the_bars_are_the_pass_at_every_temperature_and_a_click_appends(
    page: Page, served: Running, llama: Llama
) -> None:
    ids = llama.encode(TEXT)
    page.goto(link(served, TEXT, stage="first"))
    assert bars(page) == as_bars(probabilities(llama, ids))
    slider = page.get_by_role("slider", name="Temperature")
    slider.fill("0.5")
    assert bars(page) == as_bars(probabilities(llama, ids, 0.5))
    slider.fill("1")
    logits = llama.trace(ids, names=["logits"])["logits"][-1]
    second = int(logits.argsort(descending=True)[1])
    page.locator(".bars button").nth(1).click()
    expect(page.get_by_label("Text", exact=True)).to_have_value(TEXT + llama.decode([second]))
    assert bars(page) == as_bars(probabilities(llama, [*ids, second]))
    page.wait_for_function("id => location.hash.includes(`-${id}&`)", arg=second)


def test_what_is_typed_is_guessed_and_written_on(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, TEXT, stage="first"))
    settled(page)
    text = page.get_by_label("Text", exact=True)
    text.fill("I love")
    assert bars(page) == as_bars(probabilities(llama, llama.encode("I love")))
    text.press("End")
    text.press("ArrowRight")  # takes the guess
    expect(text).not_to_have_value("I love")
    settled(page)
    before = text.input_value()
    page.get_by_role("button", name="Write on").click()
    expect(text).not_to_have_value(before)
    page.get_by_role("button", name="Stop").click()
    text.fill("")
    expect(page.get_by_text("Write a few words")).to_be_visible()
    expect(page.locator(".bars")).to_have_count(0)


def test_the_first_screen_is_one_link_from_everything_and_fits(page: Page, served: Running) -> None:
    page.goto(link_to(served.url, TEXT, key=KEY))
    settled(page)
    expect(page.get_by_role("heading", level=2)).to_contain_text("guesses the next")
    check_fits_and_is_open(page)
    page.get_by_role("link", name="Follow").click()
    expect(page.get_by_role("heading", name="The map")).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="See what happens inside").click()
    expect(page.get_by_role("heading", level=3, name="Pieces")).to_be_visible()


_OVERLAPS = """
() => {
  const open = document.querySelector(".page:not([inert])");
  const picture = open.querySelector(".picture")?.getBoundingClientRect();
  const texts = [...open.querySelectorAll("svg text")].filter((one) => one.textContent.trim());
  const boxes = texts.map((one) => [one.textContent, one.getBoundingClientRect()]);
  const isCut = (box) => box.left < picture.left - 1 || box.right > picture.right + 1;
  const shared = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from]);
  const isOver = (a, b) => shared(a, b, "left", "right") > 1 && shared(a, b, "top", "bottom") > 2;
  const wrong = boxes.filter(([, box]) => isCut(box)).map(([text]) => `cut: ${text}`);
  for (const [i, [text, box]] of boxes.entries()) {
    for (const [other, its] of boxes.slice(0, i)) if (isOver(box, its)) wrong.push(`${text} over ${other}`);
  }
  return wrong;
}
"""


@pytest.mark.parametrize(("width", "colors"), [(1280, "light"), (360, "dark")])
def test_every_card_is_told_with_few_words_and_nothing_over_another(
    page: Page, served: Running, width: int, colors: str
) -> None:
    page.emulate_media(color_scheme=colors, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(link(served, TEXT, stage="story"))
    titles = list[str]()
    for number in range(1, CARDS + 1):
        open_card = page.locator(".page:not([inert])")
        expect(open_card).to_have_attribute("data-card", str(number - 1))
        expect(open_card.locator(".picture :is(svg, li)").first).to_be_visible()
        settled(page)
        titles.append(open_card.get_by_role("heading", level=3).inner_text())
        words = open_card.locator(".words").inner_text()
        assert 10 < len(words.split()) <= 35, words
        assert page.evaluate(_OVERLAPS) == [], titles[-1]
        check_is_open(page)
        page.keyboard.press("ArrowRight")
    expect(page.get_by_role("heading", name="That was the whole model.")).to_be_visible()
    assert len(set(titles)) == CARDS


def test_the_story_tells_of_the_pass_and_leads_deeper(page: Page, served: Running, llama: Llama) -> None:
    ids = llama.encode(TEXT)
    trace = llama.trace(ids, names=["pattern", "scores"])
    page.goto(link(served, TEXT, stage="story", card=7))
    settled(page)
    card = page.locator(".page:not([inert])")
    deeper = card.get_by_role("link", name="Deeper")
    layer, head = (int(one) for one in re.findall(r"(?:layer|head)=(\d+)", deeper.get_attribute("href") or ""))
    shares = trace[f"layers.{layer}.pattern"][head, -1]
    text = llama.tokenizer.token_text(ids[int(shares.argmax())]).strip()
    expect(card.locator(".words")).to_contain_text(f"takes {100 * shares.max():.0f} % from “{text}”")
    page.keyboard.press("ArrowLeft")
    expect(card.get_by_role("heading", name="Scores")).to_be_visible()
    settled(page)
    scores = trace[f"layers.{layer}.scores"][head, -1]
    card.get_by_role("button").first.click()
    shown = card.locator(".picture .note.hot").first.text_content() or ""
    assert float(shown.replace("\u2212", "-")) == pytest.approx(scores.max().item(), rel=0.005)
    deeper.click()
    settled(page)
    assert f"stage=attention&layer={layer}&head={head}&pos={len(ids) - 1}" in page.url


def test_a_text_that_is_too_long_for_it_is_said(page: Page, served: Running) -> None:
    page.goto(link(served, "word " * 40, stage="story"))
    expect(page.get_by_text("The story is drawn for texts of")).to_be_visible()
    page.get_by_role("button", name="Tell it with the end of yours").click()
    expect(page.get_by_role("heading", level=3, name="Pieces")).to_be_visible()
