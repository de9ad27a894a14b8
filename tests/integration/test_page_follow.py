"""Stages that ask for a second text, for fewer bits or for a step of training: their numbers are the library's."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from llamarium.inspect.interventions.experiments import Experiment
from llamarium.inspect.measures.streams import stream_errors
from llamarium.inspect.neighbors import neighbors, similarity
from llamarium.inspect.probes.four_bits import coded_weights, rounded_inputs
from llamarium.inspect.probes.quantized import streams_as
from llamarium.inspect.score import score
from llamarium.model.init import FreshEmbedding
from page_browser import HOSTILE, TEXT, as_shown, check_fits_and_is_open, check_text_is_text, link, settled, shown
from serving import Running

STAGES: dict[str, dict[str, Any]] = {
    "context": {"other": "A dog sat on the cat", "open": 1, "pos": 1},
    "bits": {"run": 1, "type": "Q4_1"},
    "learning": {"step": "SGD 0.01"},
}
"""Those of this file, with what opens all of them."""

LONG = 30_000
"""Milliseconds for what runs the model anew, or trains it, on a machine that does much else."""

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_fits_and_is_open_to_everybody(page: Page, served: Running, stage: str) -> None:
    check_fits_and_is_open(page, link(served, **{"stage": stage, "layer": 1, "pos": 2, **STAGES[stage]}))


@pytest.mark.parametrize("stage", STAGES)
def test_text_is_text(page: Page, served: Running, stage: str) -> None:
    check_text_is_text(page, link(served, HOSTILE, **{"stage": stage, "pos": 1, **STAGES[stage], "other": HOSTILE}))


# --- learning ---------------------------------------------------------------------------------------------------------


def test_a_step_of_training_is_the_librarys(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="learning", pos=2))
    expect(page.locator('[data-number="loss"]')).to_be_visible(timeout=LONG)
    scored = [-(one.logprob or 0) for one in score(llama.runner, llama.encode(TEXT)).tokens[1:]]
    for position, loss in enumerate(scored, 1):
        assert shown(page, f"surprise-{position}") == as_shown(loss, 4)
    assert shown(page, "loss") == as_shown(sum(scored) / len(scored), 5)
    expect(page.locator('[data-number="after"]')).to_have_count(0)
    for optimizer, rate in (("SGD", "0.01"), ("AdamW", "0.0001")):
        page.get_by_role("button", name=optimizer, exact=True).click()
        page.get_by_label("learning rate").select_option(rate)
        page.get_by_role("button", name="Take one step").click()
        expect(page.get_by_role("heading", name=f"What it changed: {optimizer}, rate {float(rate)}")).to_be_visible(
            timeout=LONG
        )
        settled(page)
        told = llama.inspect.learn(TEXT, optimizer=optimizer, learning_rate=float(rate), k=50)  # type: ignore[arg-type]
        assert shown(page, "before") == as_shown(told.loss, 5)
        assert shown(page, "after") == as_shown(sum(told.losses_after) / len(told.losses_after), 5)
        assert shown(page, "gradient") == as_shown(told.gradient_norm, 4)
        for position, (before, after) in enumerate(zip(told.losses, told.losses_after, strict=True), 1):
            assert shown(page, f"before-{position}") == as_shown(before, 4)
            assert shown(page, f"after-{position}") == as_shown(after, 4)
        for i, token_id in enumerate(told.row_ids):
            assert shown(page, f"gradient-{token_id}") == as_shown(told.row_gradients_RD[i].norm().item(), 4)
            assert shown(page, f"moved-{token_id}") == as_shown(told.row_moves[i], 4)
        for when, candidates in (("was", told.before), ("is", told.after)):
            for one in candidates[:8]:
                assert shown(page, f"{when}-{one.token_id}") == as_shown(one.probability, 3)
    after = shown(page, "after")
    page.goto(page.url)
    page.reload()
    expect(page.locator('[data-number="after"]')).to_be_visible(timeout=LONG)
    assert shown(page, "after") == after


def test_of_a_long_text_the_last_losses_are_told_and_another_text_learns_nothing_unasked(
    page: Page, served: Running, llama: Llama
) -> None:
    text = "one two three four five six seven " * 20
    lessons = list[str]()
    page.on("request", lambda asked: lessons.append(asked.url) if asked.url.endswith("/lesson") else None)
    page.goto(link(served, text, stage="learning"))
    expect(page.get_by_text("of the last 128 of")).to_be_visible(timeout=LONG)
    losses = [-(one.logprob or 0) for one in score(llama.runner, llama.encode(text)).tokens[-128:]]
    assert shown(page, "loss") == as_shown(sum(losses) / 128, 5)
    page.goto(link(served, "one two three", stage="learning", step="SGD 0.01"))
    expect(page.locator('[data-number="after"]')).to_be_visible(timeout=LONG)
    page.get_by_label("Text", exact=True).fill("three two one")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("radio", name="token 0: three")).to_be_visible()
    settled(page)
    expect(page.locator('[data-number="after"]')).to_have_count(0)
    assert len(lessons) == 1


def test_a_text_of_one_token_says_that_it_has_no_loss(page: Page, served: Running) -> None:
    page.goto(link(served, "cat", stage="learning", step="SGD 0.01"))
    expect(page.get_by_text("A text of one token has no loss")).to_be_visible(timeout=LONG)
    expect(page.get_by_role("button", name="Take one step")).to_be_disabled()


# --- four bits --------------------------------------------------------------------------------------------------------


def test_weights_and_inputs_in_few_bits_are_the_librarys(page: Page, served: Running, llama: Llama) -> None:
    linear = llama.model.get_submodule("model.layers.1.mlp.down_proj")
    original = linear.get_parameter("weight").detach()[3]
    inputs = rounded_inputs(llama.trace(TEXT).arrays["gated", 1][4:5])
    for type_name in ("NF4", "Q4_1"):
        page.goto(link(served, stage="bits", layer=1, pos=4, linear="down_proj", row=3, group=1, type=type_name))
        expect(page.get_by_role("heading", name=re.compile(f"levels of {type_name}"))).to_be_visible(timeout=LONG)
        settled(page)
        found = coded_weights(llama.runner, "model.layers.1.mlp.down_proj.weight", [3], quantize=type_name)
        for i in range(32):
            assert shown(page, f"code-{i}") == found.codes_RC[0, 32 + i]
            assert shown(page, f"scale-{i}") == as_shown(found.scales_RC[0, 32 + i].item(), 4)
            assert shown(page, f"means-{i}") == as_shown(found.values_RC[0, 32 + i].item(), 4)
            assert shown(page, f"was-{i}") == as_shown(original[32 + i].item(), 4)
            if found.minimums_RC is not None:
                assert shown(page, f"minimum-{i}") == as_shown(found.minimums_RC[0, 32 + i].item(), 4)
            assert shown(page, f"input-code-{i}") == inputs.codes_MC[0, 32 + i]
            assert shown(page, f"input-means-{i}") == pytest.approx(inputs.values_MC[0, 32 + i].item(), rel=6e-4)
        assert shown(page, "row-error") == as_shown(
            float(np.linalg.norm(found.errors_RC) / np.linalg.norm(original)), 3
        )
        assert shown(page, "wide") == (abs(inputs.codes_MC) > 127).sum()
        if not page.locator('[data-number="level-0"]').is_visible():
            page.locator("details", has_text="weights of the row").get_by_text("As a table").click()
        for code, level in enumerate(found.levels):
            assert shown(page, f"level-{code}") == as_shown(level, 4)
            assert shown(page, f"count-{code}") == (found.codes_RC == code).sum()


def test_where_the_error_grows(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="bits", layer=1, pos=3, type="Q4_1"))
    settled(page)
    page.get_by_role("group", name="Run it with weights in").get_by_role("button", name="Q4_1").click()
    ids = llama.encode(TEXT)
    exact = streams_as(llama.runner, ids)
    runs = {
        "pass": llama.trace(TEXT, names=["resid"]),
        "weights": streams_as(llama.runner, ids, quantize="Q4_1"),
        "weights-and-inputs": streams_as(llama.runner, ids, quantize="Q4_1", rounds_inputs=True),
    }
    expect(page.locator('[data-number="weights-1"]')).to_be_visible(timeout=LONG)
    for name, seen in runs.items():
        for layer, errors in enumerate(stream_errors(seen, exact)):
            assert shown(page, f"{name}-{layer}") == as_shown(errors.relative[3], 3)
    assert "run=1" in page.url and "type=Q4_1" in page.url


# --- static against contextual ----------------------------------------------------------------------------------------


def test_a_word_in_two_sentences(page: Page, served: Running, llama: Llama) -> None:
    here, there = "A cat sat on the mat", "The dog saw that cat again"
    page.goto(link(served, here, stage="context", layer=1, pos=1, other=there))
    expect(page.locator('[data-number="cosine-1"]')).to_be_visible(timeout=LONG)
    settled(page)
    at = llama.encode(there).index(llama.encode(here)[1])
    expect(
        page.get_by_role("group", name="Token of the other sentence").get_by_role("button", pressed=True)
    ).to_have_text("␣cat")
    assert shown(page, "row-differ") == 0 and shown(page, "cosine-row") == 1
    traces = llama.trace(here, names=["resid"]), llama.trace(there, names=["resid"])
    for layer in (0, 1):
        pair = traces[0][f"layers.{layer}.resid"][1].double(), traces[1][f"layers.{layer}.resid"][at].double()
        assert shown(page, f"cosine-{layer}") == as_shown(torch.cosine_similarity(*pair, dim=0).item(), 4)
    page.get_by_label("mask off, as in an encoder").check()
    expect(page.locator('[data-number="open-1"]')).to_be_visible(timeout=LONG)
    mask = Experiment(bidirectional=True)
    opened = [llama.inspect.trace_experiment(text, mask, names=["resid"]) for text in (here, there)]
    pair = opened[0]["layers.1.resid"][1].double(), opened[1]["layers.1.resid"][at].double()
    assert shown(page, "open-1") == as_shown(torch.cosine_similarity(*pair, dim=0).item(), 4)
    page.get_by_role("button", name="␣again").click()
    expect(page.get_by_text("They are different tokens")).to_be_visible(timeout=LONG)
    settled(page)
    assert shown(page, "row-differ") > 0


def test_later_words_change_nothing_but_in_an_encoder(page: Page, served: Running, llama: Llama) -> None:
    """Equal to the bit in all layers; without the mask all of them differ."""
    page.goto(link(served, stage="context", keep=4, end=" moon and stars"))
    expect(page.locator('[data-number="differ"]')).to_be_visible(timeout=LONG)
    assert shown(page, "differ") == 0
    expect(page.get_by_text("Of the 512 numbers")).to_be_visible(timeout=LONG)  # two layers, four tokens, 64 of each
    ids = [*llama.encode(TEXT)[:4], *llama.tokenizer.encode(" moon and stars", add_special_tokens=False)]
    for layer in (0, 1):
        pair = (llama.trace(x, names=["resid"])[f"layers.{layer}.resid"][:4] for x in (llama.encode(TEXT), ids))
        assert torch.equal(*pair)
    page.get_by_label("mask off, as in an encoder").check()
    expect(page.get_by_text("the end reaches back into every token")).to_be_visible(timeout=LONG)
    mask = Experiment(bidirectional=True)
    both = [llama.inspect.trace_experiment(x, mask, names=["resid"]) for x in (llama.encode(TEXT), ids)]
    differ = sum((both[0][key][:4] != both[1][key][:4]).sum().item() for key in both[0])
    assert shown(page, "differ") == differ > 400


# --- what was there already: its link, and what stands beside it ------------------------------------------------------


def test_an_answer_and_the_sampler_stand_in_the_link(page: Page, served: Running) -> None:
    """In another tab it is the same answer, token by token and how each came; for another text it is none."""
    page.goto(link(served, stage="growth", layer=1, head=1, pos=5))
    settled(page)
    page.get_by_role("button", name="Append the drawn token").click()
    expect(page.locator("mark.drawn")).to_have_count(1)
    page.get_by_label("Force").fill(" dog")
    page.get_by_role("button", name="Append what stands here").click()
    expect(page.locator("mark.forced")).to_have_count(1)
    page.get_by_role("button", name="Append the most probable").click()
    expect(page.locator("mark.greedy")).to_have_count(1)
    page.get_by_text("What is drawn from").click()
    page.get_by_role("slider", name="temperature").fill("1.5")
    settled(page)
    expect(page).to_have_url(re.compile("sampling=1.5"))  # what changes quickly is written there now and then
    said, where = page.locator(".answer").inner_text(), page.url
    context = page.context.browser.new_context()  # type: ignore[union-attr]
    other = context.new_page()
    other.goto(where.replace("#", "#key=the-key&"))
    expect(other.locator("mark")).to_have_count(3)
    settled(other)
    assert other.locator(".answer").inner_text() == said
    assert [mark.get_attribute("class") for mark in other.locator("mark").all()] == [
        mark.get_attribute("class") for mark in page.locator("mark").all()
    ]
    other.get_by_text("What is drawn from").click()
    expect(other.get_by_role("slider", name="temperature")).to_have_value("1.5")
    other.get_by_label("Text", exact=True).fill("Another text")
    other.get_by_role("button", name="Run").click()
    expect(other.get_by_role("radio", name="token 0: Another")).to_be_visible()
    expect(other.locator("mark")).to_have_count(0)
    context.close()
    page.get_by_role("navigation", name="Follow").get_by_role("link", name="The next token").click()
    expect(page).to_have_url(re.compile("sampling=1.5,|sampling=1.5%2C"))  # also where the view is opened again


@pytest.mark.parametrize(
    ("view", "pressed"),
    [
        ({"stage": "norm", "half": "mlp"}, ["before the MLP"]),
        ({"stage": "attention", "step": "scores"}, ["1 masked scores"]),
        ({"stage": "mlp", "step": "up"}, ["3 up"]),
        ({"stage": "rope", "side": "k", "reach": 64, "shape": "llama-3.1-8b"}, ["key", "64 tokens", "Llama 3.1 8B"]),
        ({"stage": "map", "shape": "llama-3.2-3b"}, ["Llama 3.2 3B"]),
        ({"stage": "qkv", "drawn": "llama-3.1-8b"}, ["Llama 3.1 8B"]),
        ({"stage": "bits", "linear": "k_proj", "type": "Q8_0"}, ["k_proj", "as Q8_0"]),
    ],
)
def test_what_a_stage_is_set_to_is_what_its_link_says(
    page: Page, served: Running, view: dict[str, Any], pressed: list[str]
) -> None:
    page.goto(link(served, **view))
    settled(page)
    for name in pressed:
        expect(page.get_by_role("main").get_by_role("button", name=name, exact=True)).to_have_attribute(
            "aria-pressed", "true"
        )


def test_rows_at_random_stand_beside_learned_ones(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="embedding", pos=1))
    page.get_by_role("button", name="Draw a table as it begins").click()
    page.get_by_role("button", name="Another seed").click()
    expect(page.locator('[data-number="random-cosine"]')).to_be_visible(timeout=LONG)
    settled(page)
    fresh, cat = FreshEmbedding(llama.config, 1), llama.encode(TEXT)[1]
    assert shown(page, "random-length") == as_shown(fresh(torch.tensor(cat)).double().norm().item(), 5)
    assert shown(page, "random-cosine") == as_shown(similarity(fresh.rows, llama.tokenizer, "cat", "dog").cosine, 4)
    for table, found in (
        ("random", neighbors(fresh.rows, llama.tokenizer, cat, k=12)),
        ("learned", llama.neighbors(cat, k=12)),
    ):
        for one in found.neighbors:
            assert shown(page, f"{table}-{one.token_id}") == as_shown(one.cosine, 4)
    assert "seed=1" in page.url


def test_tokens_by_their_ids_are_not_those_of_the_text(page: Page, served: Running, llama: Llama) -> None:
    """A link of a conversation names ids; the text in its line is another one."""
    page.goto(link(served, stage="tokens", ids="1-900-1000-1001", pos=1))
    settled(page)
    assert shown(page, "tokens") == 4
    pieces = page.locator(".pieces .token")
    assert [one.locator(".id").inner_text() for one in pieces.all()] == ["1", "900", "1000", "1001"]
    expect(page.get_by_role("heading", name="4 tokens by their ids")).to_be_visible()
    page.goto(link(served, "word " * 300, stage="tokens", pos=250))
    expect(page.get_by_text("around the chosen one")).to_be_visible()
    expect(pieces).to_have_count(200)


def test_characters_stand_beside_tokens(page: Page, served: Running) -> None:
    page.goto(link(served, "naïve 🙂", stage="tokens"))
    page.get_by_label("characters beside it").check()
    assert (shown(page, "character-tokens"), shown(page, "pairs")) == (7, 28)
    expect(page.get_by_text("U+1F642")).to_be_visible()


def test_the_map_leads_to_every_part(page: Page, served: Running) -> None:
    for part, title in (("down_proj", "SwiGLU"), ("o_proj", "Heads joined"), ("lm_head", "What it would say now")):
        page.goto(link(served, stage="map"))
        page.get_by_role("main").get_by_role("button", name=part).click()
        expect(page.get_by_role("heading", level=2)).to_have_text(title)
