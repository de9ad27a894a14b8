"""The room Ask in a browser: what it shows is what `llama.inspect` answers."""

import re
import threading
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from llamarium.inspect.interventions.edits import ablate, scale
from llamarium.inspect.interventions.patching import PatchGrid
from page_browser import (
    HOSTILE,
    TEXT,
    Held,
    as_shown,
    check_fits_and_is_open,
    check_text_is_text,
    check_two_screens,
    link,
    settled,
    shown,
)
from serving import CHAT, HELLO, Running

OTHER = "The dog sat on the mat"
VIEWS = ("lens-grid", "heads-looking", "attribution", "ablate", "patch", "steer", "probes")
FIELDS = {"ablate": {"edits": "head:0:1:0:;mlp:1::-1:2,3", "goes_on": 12}, "patch": {"source": OTHER}}

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_fits_and_is_open_to_everybody(page: Page, served: Running, view: str) -> None:
    check_fits_and_is_open(page, link(served, stage=view, layer=1, pos=2, **FIELDS.get(view, {})))


@pytest.mark.parametrize("view", VIEWS)
def test_text_is_text(page: Page, served: Running, view: str) -> None:
    fields = dict.fromkeys(("source", "toward", "away", "edits", "against", "word"), HOSTILE)
    check_text_is_text(page, link(served, HOSTILE, stage=view, pos=1, **fields))


def test_the_lens_of_every_layer_and_token(page: Page, served: Running, llama: Llama) -> None:
    """Also after attention, and after a click on another place."""
    page.goto(link(served, stage="lens-grid", layer=1, pos=4, token=900))
    expect(page.locator('[data-number="rank-1"]')).to_be_visible()
    places = llama.inspect.lens(TEXT, 900, k=1).layers
    for half, at in (("mlp", 4), ("attention", 4), ("attention", 2)):
        if at == 2:
            matrix = page.get_by_role("application", name=re.compile("^What the stream would say, by layer and token"))
            matrix.focus()
            for key in ("ArrowLeft", "ArrowLeft", "ArrowDown", "Enter"):  # from the chosen place to layer 0, token 2
                page.keyboard.press(key)
        elif half == "attention":
            page.get_by_role("button", name="after attention").click()
        settled(page)
        for place in (one for one in places if one.after == half):
            chosen, best = place.chosen[at], place.candidates[at][0]
            expect(page.locator(f'[data-number="rank-{place.layer}"]')).to_have_text(str(chosen.rank))
            assert shown(page, f"probability-{place.layer}") == as_shown(chosen.probability, 4)
            assert shown(page, f"best-{place.layer}") == as_shown(best.probability, 4)
    assert "layer=0&head=0&pos=2&token=900" in page.url and "after=attention" in page.url


def test_a_long_text_is_read_around_the_chosen_token(page: Page, served: Running, llama: Llama) -> None:
    text = "one two three four five six seven eight nine ten " * 8
    page.goto(link(served, text.strip(), stage="lens-grid", pos=70, token=900))
    expect(page.get_by_text("of 80 are shown, around the chosen one")).to_be_visible()
    place = next(one for one in llama.inspect.lens(text.strip(), 900, k=1, positions=[70]).layers if one.after == "mlp")
    assert shown(page, "probability-0") == as_shown(place.chosen[0].probability, 4)


def test_heads_look_in_both_directions(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="heads-looking", layer=1, head=1, pos=2))
    expect(page.locator('[data-number="from-0"]')).to_be_visible()
    pattern = llama.trace(TEXT)["layers.1.pattern"][1]
    for key in range(3):
        assert shown(page, f"from-{key}") == as_shown(pattern[2, key].item(), 4)
    for query in range(2, 6):
        assert shown(page, f"back-{query}") == as_shown(pattern[query, 2].item(), 4)
    page.get_by_role("button", name="what looks at it").click()
    assert "side=key" in page.url
    page.get_by_role("button", name="Take this head away").click()
    expect(page.get_by_text("head 1 of layer 1 taken away at all tokens")).to_have_count(
        2
    )  # in the list, and to be added
    settled(page)
    assert shown(page, "divergence") == as_shown(
        llama.inspect.effect(TEXT, ablate("head", layer=1, head=1), position=2).divergence, 4
    )


def test_of_a_long_text_the_queries_around_the_chosen_token_are_asked_for(
    page: Page, served: Running, llama: Llama
) -> None:
    text = "one two three four five six seven eight nine ten " * 30
    asked = list[str]()
    page.on("request", lambda one: asked.append(one.url) if "pattern?layer" in one.url else None)
    page.goto(link(served, text.strip(), stage="heads-looking", layer=1, head=1, pos=70, sink_hidden=1))
    expect(page.get_by_text("queries up to token 177")).to_be_visible()
    pattern = llama.trace(text.strip(), names=["pattern"], layers=[1])["layers.1.pattern"][1]
    assert [re.search("start=50&stop=178", one) is not None for one in asked] == [True]
    best = pattern[70].argmax().item()
    assert shown(page, f"from-{best}") == as_shown(pattern[70, best].item(), 4)
    best = 70 + int(pattern[70:178, 70].argmax())
    assert shown(page, f"back-{best}") == as_shown(pattern[best, 70].item(), 4)
    expect(page.get_by_label("hide the first token")).to_be_checked()


def test_a_late_word_does_not_take_the_place_of_a_newer_choice(page: Page, served: Running) -> None:
    held = Held(page, "**/inspect/word", of='"mat"')
    page.goto(link(served, stage="lens-grid", pos=4))
    settled(page)
    page.get_by_label("another word").fill("mat")
    page.get_by_role("button", name="Ask").click()
    served.wait(lambda: page.wait_for_timeout(20) or bool(held.routes))
    second = page.get_by_role("group", name="probable tokens").get_by_role("button").nth(1)
    second.click()
    expect(second).to_have_attribute("aria-pressed", "true")
    with page.expect_response(lambda answer: "mat" in (answer.request.post_data or "")):
        held.go_on()
    settled(page)
    expect(second).to_have_attribute("aria-pressed", "true")


def test_a_logit_is_divided_among_heads_and_mlps(page: Page, served: Running, llama: Llama) -> None:
    for against in (None, 901):
        fields = {} if against is None else {"against": against}
        page.goto(link(served, stage="attribution", layer=1, pos=4, token=900, **fields))
        expect(page.locator('[data-number="logit"]')).to_be_visible()
        settled(page)
        told = llama.inspect.attribution(TEXT, 900, against=against, position=4)
        assert shown(page, "logit") == as_shown(told.logit, 5)
        for one in (*told.heads, *(one for one in told.additions if one.part != "attention")):
            named = "-".join(str(part) for part in (one.part, one.layer, one.head) if part is not None)
            assert shown(page, f"logit-{named}") == as_shown(one.logit, 4)


def test_a_pass_that_rounds_its_stream_says_so(page: Page, served: Running) -> None:
    def in_bfloat16(route: Any) -> None:
        found = route.fetch()
        route.fulfill(response=found, json={**found.json(), "dtype": "bfloat16"})

    page.route(re.compile("/inspect/passes$"), in_bfloat16)
    page.goto(link(served, stage="attribution", layer=1, pos=4, token=900))
    expect(page.get_by_text("This pass keeps its stream in bfloat16")).to_be_visible()


def test_edits_are_added_compared_and_removed(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="ablate", layer=1, head=1, pos=4, token=900))
    expect(page.locator('[data-number="divergence"]')).to_have_text("0")
    page.get_by_role("button", name="Add: head 1 of layer 1 taken away at all tokens").click()
    page.get_by_role("button", name="the MLP", exact=True).click()
    page.get_by_role("slider", name="times").fill("-1.5")
    page.get_by_label("at token 4 alone").check()
    page.get_by_role("button", name="Add: the MLP of layer 1 times \u22121.5 at token 4").click()
    page.get_by_label("let both go on").check()
    expect(page.locator("[data-answer]")).to_have_count(2)
    edits = [ablate("head", layer=1, head=1), scale("mlp", -1.5, layer=1, positions=[4])]
    for left in (edits, edits[1:]):
        settled(page)
        told = llama.inspect.effect(TEXT, *left, word=900, position=4)
        assert shown(page, "divergence") == as_shown(told.divergence, 4)
        for one in told.tokens:
            for name, side in (("before", one.before), ("after", one.after)):
                assert shown(page, f"{name}-{one.token_id}") == as_shown(side.probability, 4)
                assert shown(page, f"rank-{name}-{one.token_id}") == side.rank
        with llama.inspect.edited(*left) as other:
            answer = other.generate(llama.encode(TEXT)[:5], max_tokens=12, temperature=0.0)
        expect(page.locator('[data-answer="with"]')).to_have_text(answer.text.strip(), use_inner_text=True)
        if left is edits:
            page.reload()  # the link holds the edits
            settled(page)
            page.get_by_role("button", name="Remove: head 1").click()


def test_a_prompt_is_steered(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="steer", layer=1, pos=5))
    page.get_by_label("toward").fill("It is good")
    page.get_by_label("away from").fill("It is bad")
    page.get_by_role("button", name="Steer", exact=True).click()
    with page.expect_response(lambda answer: "-3.5" in (answer.request.post_data or "")):  # when the slider rests
        page.get_by_role("slider", name="strength").fill("-3.5")
    expect(page).to_have_url(re.compile("toward=It%20is%20good.*strength=-3.5"))
    settled(page)
    edit = llama.inspect.steer("It is good", "It is bad", 1, scale=-3.5)
    told = llama.inspect.effect(TEXT, edit)
    assert shown(page, "divergence") == as_shown(told.divergence, 4)
    for one in told.tokens:
        assert shown(page, f"after-{one.token_id}") == as_shown(one.after.probability, 4)
    with llama.inspect.edited(edit) as other:
        answer = other.generate(TEXT, max_tokens=12, temperature=0.0)
    expect(page.locator('[data-answer="with"]')).to_have_text(answer.text.strip(), use_inner_text=True)


def test_a_grid_of_patches_is_filled_cell_by_cell(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="patch"))
    page.get_by_role("textbox", name="second prompt").fill(OTHER)
    page.get_by_role("button", name="Patch", exact=True).click()
    expect(page.get_by_text("all 12 cells")).to_be_visible()
    word, against = (llama.trace(text, names=["logits"])["logits"][5].argmax().item() for text in (OTHER, TEXT))
    for part, button in (("residual", None), ("mlp", "what the MLP adds")):
        if button is not None:
            page.get_by_role("button", name=button).click()
            expect(page.get_by_text("all 12 cells")).to_be_visible()
        settled(page)
        grid = llama.inspect.patch_grid(TEXT, OTHER, word, against=None if word == against else against, part=part)
        assert (shown(page, "base"), shown(page, "source")) == (
            as_shown(grid.base.logit, 5),
            as_shown(grid.source.logit, 5),
        )
        page.get_by_text("As a table").click()
        cells = page.locator("details[open] table td")
        expect(cells).to_have_count(12)
        recovered = [cell.recovered for cell in grid.cells()]
        expected = [*recovered[6:], *recovered[:6]]  # layers go up
        read = [float(cell.replace("\u2212", "-")) if cell else None for cell in cells.all_inner_texts()]
        assert read == [one if one is None else pytest.approx(one, rel=6e-3) for one in expected]
        page.get_by_text("As a table").click()


def test_a_grid_is_stopped_and_the_server_with_it(page: Page, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the button, and by leaving: what has come stays, and the server's place is free when the row has ended."""
    goes_on, ran = threading.Semaphore(0), list[int]()
    run = PatchGrid._run

    def slow(self: PatchGrid, layer: int, positions: Any) -> Any:
        ran.append(layer)
        goes_on.acquire(timeout=20)
        return run(self, layer, positions)

    monkeypatch.setattr(PatchGrid, "_run", slow)
    page.goto(link(served, stage="patch", source=OTHER))
    goes_on.release()
    expect(page.get_by_text("6 of 12 cells")).to_be_visible()
    served.wait(lambda: ran == [0, 1])
    assert served.service.in_flight == 1
    assert served.post(CHAT, **HELLO).status_code == 401  # others are let in, or not, as ever
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped after 6 of 12 cells")).to_be_visible()
    served.wait(lambda: not served.server.server_state.tasks)
    goes_on.release()  # the row that was under way ends, and none follows
    served.wait(lambda: served.service.in_flight == 0)
    assert ran == [0, 1]
    ran.clear()
    page.get_by_role("button", name="Patch", exact=True).click()
    served.wait(lambda: ran == [0])
    page.close()
    served.wait(lambda: not served.server.server_state.tasks)
    goes_on.release(8)
    served.wait(lambda: served.service.in_flight == 0)
    assert ran == [0]


def test_prompts_of_different_lengths_are_said(page: Page, served: Running) -> None:
    page.goto(link(served, stage="patch", source="The dog"))
    expect(page.get_by_role("alert")).to_contain_text("The second prompt has 2 tokens and the text 6")
    expect(page.get_by_role("textbox", name="second prompt")).to_have_value("The dog")


REPEATS = "one two three four five one two three four five"


def test_heads_are_sorted_by_kind(page: Page, served: Running, llama: Llama) -> None:
    """The first of a kind is opened, and the table has all of them, as `head_kinds` sorts them."""
    page.goto(link(served, REPEATS, stage="heads-looking", pos=6))
    settled(page)
    found = llama.inspect.head_kinds(REPEATS)
    for name, kind, share in (
        ("induction", "induction", "at what followed the same token before"),
        ("first token (sink)", "first", "at the first token"),
        ("previous token", "previous", "at the previous token"),
    ):
        page.get_by_role("button", name=name).click()
        heads = page.get_by_role("radiogroup", name=f"Heads, by their share {share}").get_by_role("radio")
        expected = [f"{one.layer}.{one.head}" for one in found.by(kind)]  # pyright: ignore[reportArgumentType]
        expect(heads).to_have_text([re.compile(rf"^\s*{re.escape(one)} ") for one in expected])
        expect(heads.first).to_have_attribute("aria-checked", "true")
        assert f"sort={kind}" in page.url
    page.get_by_text("All 4 heads as a table").click()
    for one in found.heads:
        for kind in ("previous", "first", "itself", "induction"):
            assert shown(page, f"{kind}-{one.layer}-{one.head}") == as_shown(getattr(one, kind), 3)
    heads.first.focus()
    page.keyboard.press("ArrowRight")
    second = found.by("previous")[1]
    expect(page.get_by_role("heading", name=f"Layer {second.layer}, head {second.head}")).to_be_visible()
    page.goto(link(served, stage="heads-looking", sort="induction"))
    expect(page.get_by_text("No token of this text comes again after another one")).to_be_visible()


def test_what_rounding_alone_may_do_is_grey(page: Page, served: Running, llama: Llama) -> None:
    """A cell before the difference of two prompts is below the floor; one at it is not."""
    page.goto(link(served, stage="patch", source=OTHER, word=900, against=901))
    expect(page.get_by_text("all 12 cells")).to_be_visible()
    grid = llama.inspect.patch_grid(TEXT, OTHER, 900, against=901)
    way = abs(grid.source.logit - grid.base.logit)
    expect(page.get_by_text(re.compile(r"grey: below .* which rounding alone may do"))).to_be_visible()
    matrix = page.get_by_role("application", name=re.compile("^How far the answer turns"))
    matrix.focus()
    cells = {(cell.layer, cell.position): cell for cell in grid.cells()}
    page.keyboard.press("ArrowRight")  # to where the cursor begins
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    for position in range(6):
        cell = cells[0, position]
        is_below = abs(cell.logit - grid.base.logit) / way < grid.floor / way
        told = page.locator(".readout").first
        expect(told).to_contain_text("layer 0")
        assert ("below the floor of rounding" in told.inner_text()) == is_below, position
        page.keyboard.press("ArrowRight")


def test_a_grid_that_is_stopped_before_its_first_cell_says_of_how_many(
    page: Page, served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, began = threading.Event(), threading.Event()
    make = PatchGrid.__init__

    def slow(self: PatchGrid, *args: Any, **options: Any) -> None:
        began.set()
        goes_on.wait(20)
        make(self, *args, **options)

    monkeypatch.setattr(PatchGrid, "__init__", slow)
    page.goto(link(served, stage="patch", source=OTHER))
    served.wait(lambda: began.is_set() or page.wait_for_timeout(20))
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("stopped after 0 of 12 cells")).to_be_visible()
    goes_on.set()
    served.wait(lambda: served.service.in_flight == 0)


def test_views_are_two_screens_with_their_figure_above_the_fold(page: Page, served: Running) -> None:
    """Those whose height depends on no layer; the others are held where the model has 30."""
    named = {view: link(served, stage=view, pos=5, details=0) for view in ("ablate", "steer", "probes")}
    check_two_screens(page, named)


@pytest.mark.parametrize("view", VIEWS)
def test_a_control_is_near_the_title_by_keyboard(page: Page, served: Running, view: str) -> None:
    page.goto(link(served, stage=view, layer=1, pos=5, **FIELDS.get(view, {})))
    settled(page)
    assert len(page.locator("article > p.lead").inner_text().split()) <= 25
    page.locator("#main").focus()  # where the link "To the stage" leads
    stops = list[bool]()
    while True not in stops and len(stops) < 7:
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.closest('article') !== null"))
    assert len(stops) <= 6, stops
