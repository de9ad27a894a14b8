"""Every stage has its own picture, and opens on what tells most."""

import re

import pytest
import torch
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from page_browser import TEXT, link, settled
from serving import Running

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

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


def test_the_cache_is_drawn_as_what_the_last_token_reads(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="growth", pos=5, details=0))
    settled(page)
    cells = page.locator(".drawing g[data-share]")
    expect(cells).to_have_count(12)
    read = torch.tensor([float(one) for one in cells.evaluate_all("all => all.map((one) => one.dataset.share)")])
    patterns = [llama.trace(TEXT)[f"layers.{layer}.pattern"][:, -1].mean(0) for layer in range(2)]
    torch.testing.assert_close(read.reshape(2, 6), torch.stack(patterns))
    assert page.locator(".picture").count() == 0


def test_a_step_is_drawn_as_what_it_moved(page: Page, served: Running, llama: Llama) -> None:
    """Before the step the losses; after it also how far each layer's attention and MLP moved."""
    page.goto(link(served, stage="learning", pos=5, details=0))
    settled(page)
    losses = page.locator(".drawing .column title")
    expect(losses).to_have_count(5)
    page.get_by_role("button", name="Take one step").click()
    expect(losses.first).to_contain_text("after the step")
    lesson = llama.inspect.learn(TEXT, optimizer="SGD", learning_rate=1e-3)
    for part in lesson.parts:
        if part.name in ("attention", "MLP"):
            told = page.locator(f".drawing rect.{part.name.lower()} title").nth(part.layer or 0).text_content()
            assert told is not None and told.startswith(f"layer {part.layer}: the {part.name}'s weights moved by ")
            assert float(told.rpartition(" ")[2]) == pytest.approx(part.moved, rel=1e-3)


def test_layers_go_up_in_matrices_too(page: Page, served: Running) -> None:
    page.goto(link(served, stage="lens-grid", pos=5, layer=0))
    settled(page)
    matrix = page.get_by_role("application", name=re.compile("^What the stream would say, by layer and token"))
    box = matrix.bounding_box()
    assert box is not None
    readout = page.locator(".readout").first
    matrix.hover(position={"x": box["width"] - 20, "y": box["height"] - 6})
    expect(readout).to_contain_text("layer 0")
    page.mouse.move(0, 0)
    matrix.focus()
    page.keyboard.press("ArrowUp")  # from the chosen layer, 0
    expect(readout).to_contain_text("layer 1")
