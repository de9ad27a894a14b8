"""What a view saves, and its numbers again: "Open as Python" is run, and makes what stands on the page."""

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import llamarium
from llamarium.api import Llama
from page_browser import HOSTILE, TEXT, link, saved, settled
from serving import Running

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

OTHER = "The dog sat on the mat"
VIEWS: dict[str, dict[str, Any]] = {
    "map": {}, "tokens": {}, "embedding": {}, "norm": {}, "qkv": {}, "rope": {}, "attention": {}, "heads": {},
    "mlp": {}, "context": {"other": OTHER}, "bits": {}, "learning": {"step": "SGD 0.001"},
    "residual": {"token": 900}, "lens": {"token": 900}, "sampler": {}, "growth": {}, "lens-grid": {"token": 900},
    "heads-looking": {}, "probes": {}, "attribution": {"token": 900, "against": 901},
    "ablate": {"edits": "head:0:1:0:;mlp:1::-1.5:2,3;embed:::2:", "goes_on": 12}, "patch": {"source": OTHER},
    "steer": {"toward": "It is \"good\"", "away": "It's\\bad"},
}  # fmt: skip


NOT_MADE = {"rounding", "changed", "bits", "token-MHA", "token-GQA", "token-MQA"}
"""Numbers of a view that its program leaves out: what rounding left, and what follows from the shapes."""


def numbers_of(program: str, llama: Llama, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Run a view's program; the model that it loads is the one behind the page."""
    loaded = list[Any]()

    def load(name: str, **options: Any) -> Llama:
        loaded.append((name, options))
        return llama

    monkeypatch.setattr(llamarium, "load", load)
    found: dict[str, Any] = {}
    exec(compile(program, "view.py", "exec"), found)
    assert loaded == [("small", {})]
    return found["numbers"]


def program_of(page: Page) -> str:
    if page.locator("details.python[open]").count() == 0:
        page.get_by_text("Open as Python").click()
    return page.get_by_role("region", name="This view as Python").inner_text()


def check_same(page: Page, numbers: dict[str, float]) -> None:
    """Hold all that is displayed against numbers, to the digits that it is displayed with."""
    places = {one.get_attribute("data-number"): one.text_content() or "" for one in page.locator("[data-number]").all()}
    told = {name for name, text in places.items() if re.search(r"\d", text)} - NOT_MADE
    assert told and told <= numbers.keys(), sorted(map(str, told - numbers.keys()))
    for name in told:
        text = re.sub(r"[\u202f\s]", "", places[name]).replace("\u2212", "-")
        unit = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:], 1.0)
        text = text.rstrip("kMG")
        written = text if "." in text else text.rstrip("0")  # of 149000 nobody knows how many digits are meant
        digits = len(re.sub(r"e.*|[^0-9]", "", written).lstrip("0")) or 1
        assert float(text) * unit == pytest.approx(numbers[name], rel=5.01 * 10**-digits), name


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_opens_as_a_program_that_makes_its_numbers(
    page: Page, served: Running, llama: Llama, monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    page.goto(link(served, stage=view, layer=1, head=1, pos=4, **VIEWS[view]))
    settled(page)
    if view == "patch":
        expect(page.get_by_text("all 12 cells")).to_be_visible()
    check_same(page, numbers_of(program_of(page), llama, monkeypatch))


def test_a_program_follows_what_is_looked_at(
    page: Page, served: Running, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another step of a stage, an experiment, an answer that has grown, the first layer, the embedding."""
    for view, pos, button, fields in (
        ("attention", 3, None, {"mask_off": 1, "rotation_off": 1}),
        ("context", 1, None, {"other": "A dog saw the cat", "open": 1}),
        ("embedding", 3, None, {"seed": 3}),
        ("rope", 3, "Llama 3.2 1B", {}),
        ("norm", 3, "before the MLP", {}),
        ("norm", 0, None, {"layer": 0}),
        ("mlp", 3, "5 down", {}),
        ("sampler", 3, "hot, but min-p 0.1", {}),
        ("growth", 3, "Append the drawn token", {}),
        ("lens-grid", 3, "after attention", {"token": 900}),
        ("patch", 3, "what the MLP adds", {"source": OTHER}),
    ):
        page.goto(link(served, stage=view, head=1, pos=pos, **{"layer": 1, **fields}))
        settled(page)
        if button is not None:
            page.get_by_role("button", name=button).click()
            settled(page)
        if view == "patch":
            expect(page.get_by_text("all 12 cells")).to_be_visible()
        if view == "growth":  # while a token is chosen the view is that of the text before it
            cost = f"What the last of {len(llama.encode(TEXT)) + 1} tokens costs"
            expect(page.get_by_role("heading", name=cost)).to_be_visible()
        check_same(page, numbers_of(program_of(page), llama, monkeypatch))


def test_texts_stand_in_a_program_as_they_are(
    page: Page, served: Running, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotes, backslashes, line ends, controls and directions are no way out of a string, and none is lost."""
    text = HOSTILE + "\"; import os\n\\\" ''' {ids}\t\u2028\u2066 end \\"
    page.goto(link(served, text, stage="tokens"))
    settled(page)
    program = program_of(page)
    assert not re.search(r"[^\n -~\u00a1-\u1fff\u3000-\uffff\U0001f000-\U0001ffff]", program)
    found: dict[str, Any] = {}
    monkeypatch.setattr(llamarium, "load", lambda name: llama)
    exec(compile(program, "view.py", "exec"), found)
    assert found["text"] == text
    assert found["ids"] == llama.encode(text)


def test_numbers_are_saved(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="lens-grid", layer=1, pos=4, token=900))
    settled(page)
    name, data = saved(page, "JSON")
    assert re.fullmatch(r"llamarium-[a-z0-9-]+\.json", name)
    told = json.loads(data)
    place = next(one for one in llama.inspect.lens(TEXT, 900, k=1, after="mlp").layers if one.layer == 1)
    assert told["ids"] == llama.encode(TEXT) and told["view"] == "lens-grid" and told["text"] == TEXT
    assert told["numbers"]["layers"][1]["chosen"][4]["probability"] == place.chosen[4].probability


def test_numbers_in_bulk_are_saved_as_they_are(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="norm", layer=1, pos=4))
    settled(page)
    told = json.loads(saved(page, "JSON")[1])["numbers"]
    assert told["after"] == pytest.approx(llama.trace(TEXT)["layers.1.attn_norm"][4].tolist(), rel=1e-7)
    assert len(told["before"]) == 64
