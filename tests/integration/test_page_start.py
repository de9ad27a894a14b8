"""The path for who begins: eight questions, each answered before it is shown; the page's answers are the model's."""

import re

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

from llamarium.api import Llama
from page_browser import check_fits_and_is_open, link, settled
from serving import Running

TEXT = "The capital of France is"
EIGHT_BITS = 1 / 200  # the far view has its shares in steps of 1/255

pytest_plugins = ["page_browser"]
pytestmark = pytest.mark.timeout(600)


def answer(page: Page, key: str) -> str:
    """Answer the open question, and return what the page says the model's answer is."""
    settled(page)
    expect(page.locator(".answers button b")).to_have_count(0)
    page.keyboard.press(key)
    right = page.locator(".answers button.right bdi")
    expect(right).to_have_count(1)
    return right.inner_text()


def step(page: Page) -> None:
    page.keyboard.press("ArrowRight")
    expect(page.locator("#question")).to_be_focused()


def test_start_here_is_walked_by_keys_and_says_what_the_model_computed(
    page: Page, served: Running, llama: Llama
) -> None:
    """From its first question to its end; a reload in between finds what was answered."""
    ids = llama.encode(TEXT)
    trace, last = llama.trace(TEXT), len(ids) - 1
    layers, heads = llama.config.num_hidden_layers, llama.config.num_attention_heads
    patterns = torch.stack([torch.as_tensor(trace[f"layers.{i}.pattern"])[:, last] for i in range(layers)])
    shares = patterns.mean(dim=1)[:, 1:last]  # by layer and key
    assert patterns.shape == (layers, heads, last + 1)
    page.goto(link(served, stage="start"))
    says = page.locator("[data-says]")

    assert answer(page, "1") == str(len(ids))
    expect(says).to_contain_text(f"{len(ids)} tokens")
    step(page)
    assert answer(page, "2") == str(llama.config.hidden_size)
    first, end = (torch.as_tensor(trace[name])[last].norm().item() for name in ("embed", f"layers.{layers - 1}.resid"))
    expect(says).to_contain_text(re.compile(rf"of length {first:#.3g}(\D|$)"))
    step(page)
    ranges = ((1, "shorter"), (2, "longer, at most twice"), (10, "2 to 10 times as long"))
    assert answer(page, "1") == next(
        (said for most, said in ranges if end / first < most), "more than 10 times as long"
    )
    expect(says).to_contain_text(f"From length {first:#.3g} to {end:#.3g}".replace(".:", ":"))
    step(page)
    layer = int(re.findall(r"Layer (\d+)", page.locator(".asks").inner_text())[0])
    key = int(answer(page, "1").rpartition(" ")[2])
    assert shares[layer, key - 1] > shares.max() - EIGHT_BITS
    looking = patterns[layer, :, key]
    expect(says).to_contain_text(f"head {looking.argmax()} takes {100 * looking.max():.0f} %")

    page.reload()
    settled(page)
    expect(page.locator(".answers button.right")).to_have_count(1)
    step(page)
    assert answer(page, "1") == f"{last} times as far"
    expect(says).to_contain_text(f"the token's position, {last}")
    step(page)
    added = [torch.as_tensor(trace[f"layers.{layer}.{name}"])[last].norm().item() for name in ("attn_out", "mlp_out")]
    assert answer(page, "1") == ("the MLP" if added[1] > added[0] else "attention")
    expect(says).to_contain_text(f"Attention adds length {added[0]:#.3g}, the MLP {added[1]:#.3g}.")
    step(page)
    probabilities = torch.as_tensor(trace["logits"])[last].softmax(dim=-1)
    best = llama.tokenizer.token_text(int(probabilities.argmax()))
    asserted = answer(page, "2").strip("“”").replace("␣", " ")
    assert asserted == best
    step(page)
    sure = probabilities.max().item()
    bins = ((0.1, "less than 10 %"), (0.3, "10 to 30 %"), (0.6, "30 to 60 %"))
    assert answer(page, "4") == next((said for below, said in bins if sure < below), "60 % or more")
    expect(says).to_contain_text(f"{100 * sure:.1f} % for")
    step(page)

    expect(page.get_by_role("heading", level=3)).to_have_text("What you have seen")
    for _ in range(5):
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
    expect(page.locator(".five details[open]")).to_have_count(5)
    expect(page.locator(".path li a")).to_have_count(3)
    page.locator(".path li a").last.press("Enter")
    settled(page)
    assert "stage=from-text-to-vectors" in page.url


def test_what_is_asked_is_not_seen_before(page: Page, served: Running) -> None:
    page.goto(link(served, stage="start"))
    settled(page)
    expect(page.locator(".cover")).to_contain_text(TEXT)
    for _ in range(6):
        answer(page, "1")
        step(page)
    settled(page)
    page.get_by_role("button", name="whole").press("Enter")
    page.get_by_text("Numbers of the picture").click()
    table = page.locator(".numbers")
    expect(table).to_contain_text("“ is”")
    expect(table).not_to_contain_text("next token")


def test_start_here_fits_and_is_open_to_everybody(page: Page, served: Running) -> None:
    check_fits_and_is_open(page, link(served, stage="start"))
    answer(page, "1")
    check_fits_and_is_open(page)


def test_with_reduced_motion_the_picture_is_there_at_once(browser: Browser, served: Running) -> None:
    with browser.new_context(reduced_motion="reduce", viewport={"width": 360, "height": 740}) as context:
        page = context.new_page()
        page.goto(link(served, stage="start"))
        answer(page, "1")
        expect(page.locator(".seen nav [aria-current]")).to_have_text("text")
        box = page.locator(".seen").bounding_box()
        assert box is not None and box["y"] + box["height"] <= 740
