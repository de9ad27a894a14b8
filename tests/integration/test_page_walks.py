"""The page from its picture: the eight tasks of the guide within three clicks, two screens a stage, keys, a phone."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from llamarium.api import Llama
from llamarium.cli.inspect import link_to
from llamarium.inspect.measures.streams import stream_errors
from llamarium.inspect.probes.quantized import streams_as
from page_browser import KEY, as_shown, check_two_screens, link, settled, shown
from serving import Running

TEXT = "The cat that the dog chased ran"
VIEWS = (
    "map", "tokens", "embedding", "norm", "qkv", "rope", "attention", "heads", "mlp", "residual", "lens", "context",
    "sampler", "growth", "bits", "learning", "encoder",
    "lens-grid", "heads-looking", "attribution", "patch",
)  # fmt: skip
FIELDS = {"patch": {"source": "The dog that the cat chased ran"}}
LONG = 60_000
MOST_CLICKS = 3
"""From the first screen, which the link of `llamarium inspect` opens."""

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def llama(smollm2: Llama) -> Llama:
    return smollm2


@pytest.fixture
def click(page: Page, served: Running) -> Callable[[Locator], None]:
    """Clicks, so many and no more, from the first screen."""
    page.goto(link_to(served.url, TEXT, key=KEY))
    settled(page)
    done = list[Locator]()

    def one(place: Locator) -> None:
        done.append(place)
        assert len(done) <= MOST_CLICKS
        place.click()
        settled(page)

    return one


def room(page: Page, title: str) -> Locator:
    return page.get_by_role("navigation", name="Rooms").get_by_role("link", name=title)


def stage(page: Page, title: str) -> Locator:
    return page.get_by_role("navigation", name="Follow: views").get_by_role("link", name=title)


def value(text: str) -> float:
    return float(text.replace("\u2212", "-"))


# --- eight tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("click")
def test_the_next_token_is_there_without_a_click(page: Page, llama: Llama) -> None:
    logits = llama.trace(TEXT, names=["logits"])["logits"][-1].softmax(-1)
    token_id = int(logits.argmax())
    first = page.locator(".bars li").first
    expect(first.locator(".name")).to_have_text(llama.tokenizer.token_text(token_id).replace(" ", "\u2423"))
    shown_share = first.locator(".share").inner_text().removesuffix(" %")
    assert float(shown_share) == pytest.approx(100 * logits[token_id].item(), abs=0.051)


def test_which_head_brings_cat_to_ran(page: Page, llama: Llama, click: Callable[[Locator], None]) -> None:
    click(room(page, "Follow"))
    click(stage(page, "Attention"))
    click(page.get_by_role("region", name="Where this token looks").get_by_role("button", name="cat"))
    trace = llama.trace(TEXT, names=["pattern"])
    shares = np.stack([trace.arrays["pattern", layer][:, -1, 1] for layer in range(llama.config.num_hidden_layers)])
    layer, head = map(int, np.unravel_index(shares.argmax(), shares.shape))
    first = page.locator(".takers li").first
    expect(first).to_contain_text(f"layer {layer}, head {head}")
    assert shown(page, f"takes-{layer}-{head}") == as_shown(float(shares[layer, head]), 3)
    expect(page.get_by_role("heading", name=f"Layer {layer}, head {head}")).to_be_visible()


def test_what_the_model_would_say_after_layer_20(page: Page, llama: Llama, click: Callable[[Locator], None]) -> None:
    click(room(page, "Follow"))
    click(stage(page, "What it would say now"))
    layer = page.get_by_role("slider", name="Layer")
    box = layer.bounding_box()
    assert box is not None
    thumb = 16
    layer.click(position={"x": thumb / 2 + (box["width"] - thumb) * 20 / 29, "y": box["height"] / 2})
    settled(page)
    expect(page.get_by_role("heading", name="After layer 20")).to_be_visible()
    last = len(llama.encode(TEXT)) - 1
    told = llama.inspect.lens(TEXT, 0, k=4, after="mlp", positions=[last]).layers[20].candidates[0]
    said = page.get_by_role("list", name="Most probable after layer 20").get_by_role("listitem")
    expect(said).to_have_count(4)
    for i, one in enumerate(told):
        assert said.nth(i).inner_text().startswith(one.text.replace(" ", "\u2423", 1))
        assert shown(page, f"here-{i}") == as_shown(one.probability, 3)


def test_how_large_the_cache_is_after_ten_tokens(page: Page, llama: Llama, click: Callable[[Locator], None]) -> None:
    click(room(page, "Follow"))
    click(stage(page, "The next token"))
    ten = page.locator('[data-cache="10"]')
    expect(ten).to_be_visible(timeout=LONG)
    config = llama.config
    itself = llama.inspect.token_cost(TEXT).cache_bytes_per_token
    assert itself % (2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim) == 0
    expect(ten).to_have_text(f"{10 * itself / 1e3:.3g} kB")


def test_why_a_token_was_chosen_at_temperature_08(page: Page, llama: Llama, click: Callable[[Locator], None]) -> None:
    click(room(page, "Follow"))
    click(stage(page, "From logits to a token"))
    expect(page.get_by_role("slider", name="temperature")).to_have_value("0.8")
    told = llama.inspect.sampler_steps(TEXT, k=10, temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=0)
    expect(page.locator("[data-chosen]")).to_have_attribute("data-chosen", str(told.token_id))
    totals = {
        one.get_attribute("data-number"): value(one.inner_text())
        for one in page.locator('[data-number^="total-"]').all()
    }
    assert max(totals, key=lambda name: totals[name]) == f"total-{told.token_id}"
    drawn = {f"total-{one.token_id}": as_shown(one.total, 3) for one in told.draw or ()}
    assert drawn.items() & totals.items() and drawn[f"total-{told.token_id}"] == totals[f"total-{told.token_id}"]


def test_what_four_bits_change(page: Page, llama: Llama, click: Callable[[Locator], None]) -> None:
    click(room(page, "Follow"))
    click(stage(page, "Four bits"))
    click(page.get_by_role("group", name="Run it with weights in").get_by_role("button", name="Q4_1"))
    found = page.locator("[data-error]")
    expect(found).to_be_visible(timeout=LONG)
    ids = llama.encode(TEXT)
    exact, last = streams_as(llama.runner, ids), llama.config.num_hidden_layers - 1
    rounds = found.get_attribute("data-error") == "weights and inputs"
    seen = streams_as(llama.runner, ids, quantize="Q4_1", rounds_inputs=rounds)
    assert value(found.inner_text()) == as_shown(list(stream_errors(seen, exact))[last].relative[-1], 3)


def test_which_head_is_an_induction_head(page: Page, llama: Llama, click: Callable[[Locator], None]) -> None:
    click(room(page, "Ask"))
    click(page.get_by_role("navigation", name="Ask: views").get_by_role("link", name="Attention of all heads"))
    click(page.get_by_role("button", name="repeats"))
    text = page.get_by_label("Text", exact=True).input_value()
    found = max(llama.inspect.head_kinds(text).heads, key=lambda one: one.induction or 0)
    best = page.get_by_role("radiogroup", name=re.compile("^Heads, by their share")).get_by_role("radio").first
    expect(best).to_have_accessible_name(re.compile(f"^layer {found.layer}, head {found.head}: "))


def test_the_story_starts_with_one_click(page: Page, click: Callable[[Locator], None]) -> None:
    click(page.get_by_role("link", name="See what happens inside"))
    expect(page.get_by_role("heading", level=3, name="Pieces")).to_be_visible()


# --- two screens, forty words -----------------------------------------------------------------------------------------


def test_every_view_is_two_screens_with_its_figure_above_the_fold(page: Page, served: Running) -> None:
    views = {name: link(served, TEXT, stage=name, layer=10, pos=6, details=0, **FIELDS.get(name, {})) for name in VIEWS}
    check_two_screens(page, views)


def test_details_stay_open_from_stage_to_stage_and_in_the_link(page: Page, served: Running) -> None:
    page.goto(link(served, TEXT, stage="norm", details=0))
    settled(page)
    expect(page.get_by_label("formula")).to_have_count(0)
    page.get_by_text("Details", exact=True).click()
    expect(page.get_by_label("formula").first).to_be_visible()
    assert "details=1" in page.url
    page.get_by_role("button", name="Next:").click()
    settled(page)
    expect(page.get_by_label("formula").first).to_be_visible()
    assert "details=1" in page.url


# --- what is wider than a phone says so -------------------------------------------------------------------------------

_CUT = """
() => {
  const found = [];
  const NOT = ".hidden, [popover], .skip, textarea, input, select";
  const isSeen = (one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(NOT);
  const wide = (one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0;
  const says = (one) => one.closest("[data-goes-on]:not([data-goes-on=''])");
  for (const one of document.querySelectorAll("main *, nav.views *")) {
    if (!isSeen(one)) continue;
    const { overflowX, clipPath } = getComputedStyle(one);
    if (clipPath !== "none") continue;
    const named = `${one.tagName} ${one.className} ${one.getAttribute("aria-label") ?? ""}`;
    if (overflowX !== "visible") {
      if (wide(one) && !says(one)) found.push(named);
    } else if (!one.closest("svg *, [data-goes-on]") && one.getBoundingClientRect().right > innerWidth + 1) {
      let outer = one.parentElement;
      while (outer && getComputedStyle(outer).overflowX === "visible") outer = outer.parentElement;
      if (!outer || outer === document.documentElement || outer === document.body) found.push(named);
    }
  }
  return [...new Set(found)];
}
"""
"""What is cut, or wider than the window, and does not show that it goes on."""


@pytest.mark.parametrize("room", ["Follow", "Learn", "Ask", "Compare", "Chat"])
def test_on_a_phone_nothing_is_cut_without_a_cue(page: Page, served: Running, room: str) -> None:
    """In all views of a room, their details open."""
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(link(served, TEXT, pos=6, layer=10))
    page.get_by_role("navigation", name="Rooms").get_by_role("link", name=room).click()
    settled(page)
    cut = dict[str, list[str]]()
    for title in page.locator("nav.views a .title").all_inner_texts():
        page.get_by_role("navigation", name=f"{room}: views").get_by_role("link", name=title, exact=False).first.click()
        settled(page)
        page.evaluate("document.querySelectorAll('details.part').forEach((one) => (one.open = true))")
        settled(page)
        if found := page.evaluate(_CUT):
            cut[title] = found
    assert cut == {}


# --- keys -------------------------------------------------------------------------------------------------------------


def tabs_until(page: Page, place: str, most: int = 30) -> int:
    """How many presses of Tab bring the focus into a place."""
    for count in range(1, most + 1):
        page.keyboard.press("Tab")
        if page.evaluate("(place) => document.activeElement?.closest(place) != null", place):
            return count
    raise AssertionError(f"no focus in {place}")


def test_a_view_is_six_tab_stops_away(page: Page, served: Running) -> None:
    for name in ("attention", "qkv", "lens-grid", "compare", "learning"):
        page.goto("about:blank")
        page.goto(link(served, TEXT, stage=name, details=0))
        settled(page)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="To the stage")).to_be_focused()
        page.keyboard.press("Enter")
        assert 2 + tabs_until(page, "#view article :is(button, input, select, [tabindex='0'])") <= 6
    page.goto("about:blank")
    page.goto(link(served, TEXT))
    settled(page)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the text")).to_be_focused()  # past the rooms, each of which is a stop
    page.keyboard.press("Enter")
    expect(page.get_by_label("Text", exact=True)).to_be_focused()


def test_a_text_has_lines(page: Page, served: Running, llama: Llama) -> None:
    """Pasted lines are kept; Enter runs, Shift with Enter begins one."""
    page.goto(link(served, "one\ntwo", stage="tokens"))
    settled(page)
    line = page.get_by_label("Text", exact=True)
    expect(line).to_have_value("one\ntwo")
    high = (line.bounding_box() or {"height": 0})["height"]
    line.focus()
    page.keyboard.press("End")
    page.keyboard.press("Control+End")
    page.keyboard.press("Shift+Enter")
    page.keyboard.insert_text("three\nfour")
    expect(line).to_have_value("one\ntwo\nthree\nfour")
    assert (line.bounding_box() or {"height": 0})["height"] > high
    page.keyboard.press("Enter")
    expect(line).to_have_value("one\ntwo\nthree\nfour")
    settled(page)
    assert shown(page, "tokens") == len(llama.encode("one\ntwo\nthree\nfour"))


def test_arrow_keys_walk_among_tokens_and_layers(page: Page, served: Running) -> None:
    """Without the strip's focus; and up is up, in the picture and in the lists of layers."""
    page.goto(link(served, TEXT, stage="lens", layer=3, pos=2))
    settled(page)
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", checked=True)).to_have_accessible_name(re.compile("^token 3:"))
    row = page.locator("tr.mine").last
    before = (row.bounding_box() or {"y": 0})["y"]
    page.keyboard.press("Shift+ArrowUp")
    expect(page.get_by_role("heading", name="After layer 4")).to_be_visible()
    settled(page)
    assert (row.bounding_box() or {"y": 0})["y"] < before
    page.get_by_label("Text", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", checked=True)).to_have_accessible_name(re.compile("^token 3:"))


def test_next_compares_one_word_in_two_contexts(page: Page, served: Running) -> None:
    page.goto(link(served, TEXT, stage="lens", layer=3, pos=6))
    settled(page)
    page.get_by_role("button", name="Next:").click()
    settled(page)
    expect(page.get_by_role("heading", level=2)).to_have_text("Static against contextual")
    chosen = page.get_by_role("group", name="Token of the other sentence").get_by_role("button", pressed=True)
    expect(chosen).to_have_text("\u2423ran")
    assert shown(page, "row-differ") == 0 and shown(page, "cosine-last") < 1


def test_the_final_norm_of_the_map_is_shown(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, TEXT, stage="map", pos=6))
    settled(page)
    page.get_by_role("row", name=re.compile("^norm ")).get_by_role("button").click()
    settled(page)
    expect(page.get_by_role("button", name="the final norm")).to_have_attribute("aria-pressed", "true")
    after = llama.trace(TEXT, names=["final_norm"]).arrays["final_norm", None][6]
    assert shown(page, "length-after") == as_shown(float(np.linalg.norm(after.astype(float))), 5)
    page.get_by_role("button", name="before the MLP").click()
    settled(page)
    expect(page.get_by_role("navigation", name="Place in the picture")).to_contain_text("norm of the MLP")


def test_names_on_the_map_of_rows_do_not_overprint(page: Page, served: Running) -> None:
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        page.goto(link(served, TEXT, stage="embedding", pos=6))
        settled(page)
        if width == 360:
            page.get_by_text("A map of them").click()
        expect(page.locator("svg[aria-label^='The rows'] text").first).to_be_visible()
        boxes = page.locator("svg[aria-label^='The rows'] text").evaluate_all(
            "all => all.map((one) => one.getBoundingClientRect())"
            ".map(({ left, right, top, bottom }) => [left, right, top + 3, bottom - 3])"
        )
        assert len(boxes) > 5
        for i, (left, right, top, bottom) in enumerate(boxes):
            for other_left, other_right, other_top, other_bottom in boxes[:i]:
                assert right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top
