"""Every stage has its own picture, and opens on what tells most."""

import pytest
import torch
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from page_browser import TEXT, link, settled
from serving import Running

pytest_plugins = ["page_browser"]
pytestmark = pytest.mark.timeout(600)

REPEATS = "one two three four five one two three four five"


def test_attention_opens_on_the_head_that_looks_back_most(page: Page, served: Running, llama: Llama) -> None:
    """Not at the first token, and past the neighbour where a head does so with 30 % or more."""
    patterns = torch.stack([llama.trace(TEXT)[f"layers.{layer}.pattern"] for layer in range(2)])[:, :, 5]
    words, others = patterns[:, :, [1, 2]], patterns[:, :, [3]]  # " on" has no three letters
    best = next((one for one in (words, others, patterns[:, :, [4]]) if one.max() >= 0.3), patterns[:, :, 1:5])
    layer, head = divmod(best.amax(-1).argmax().item(), patterns.shape[1])
    page.goto(link(served, stage="attention", pos=5, details=0))
    expect(page.get_by_role("heading", name=f"Layer {layer}, head {head}")).to_be_visible()
    page.goto(link(served, stage="attention", pos=5, layer=0, head=0))
    settled(page)
    expect(page.get_by_role("heading", name="Layer 0, head 0")).to_be_visible()  # a link that names one is followed


def test_a_head_is_found_by_its_kind(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, REPEATS, stage="attention", pos=6, layer=0, head=0))
    settled(page)
    kinds = page.get_by_role("group", name="Find a head:")
    for kind in ("induction", "previous"):
        best = llama.inspect.head_kinds(REPEATS).by(kind)[0]  # pyright: ignore[reportArgumentType]
        kinds.get_by_role("button", name=kind).click()
        expect(page.get_by_role("heading", name=f"Layer {best.layer}, head {best.head}")).to_be_visible()
    page.goto(link(served, stage="attention", pos=5, layer=0, head=0))
    settled(page)
    kinds.get_by_role("button", name="induction").click()
    expect(page.get_by_role("status").filter(has_text="No token of this text comes again")).to_be_visible()


@pytest.mark.parametrize(
    ("stage", "sliders"), [("map", []), ("sampler", []), ("norm", ["Layer"]), ("attention", ["Layer", "Head"])]
)
def test_sliders_stand_where_they_are_used(page: Page, served: Running, stage: str, sliders: list[str]) -> None:
    page.goto(link(served, stage=stage, details=0))
    settled(page)
    names = (
        page.locator(".selectors")
        .get_by_role("slider")
        .evaluate_all("all => all.map((one) => one.labels[0].innerText.trim())")
    )
    assert names == sliders
