"""The stages in a browser: narrow and wide, light and dark; their numbers are the trace's; text stays text."""

import re
from urllib.parse import quote

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

from llamarium.api import Llama
from llamarium.inspect.interventions.experiments import Experiment, trace_experiment
from llamarium.inspect.probes.rope import rope_pairs
from llamarium.inspect.score import score
from llamarium.page import assets
from llamarium.page.extension import page as page_extension
from llamarium.presets import PRESETS
from page_browser import (
    HOSTILE,
    KEY,
    TEXT,
    Held,
    as_shown,
    check_fits_and_is_open,
    check_text_is_text,
    link,
    settled,
    shown,
)
from page_bundle import built_page
from serving import Running, serving

STAGES = (
    "map", "tokens", "embedding", "norm", "qkv", "rope", "attention", "heads", "mlp", "residual", "lens",
    "sampler", "growth",
)  # fmt: skip

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_fits_and_is_open_to_everybody(page: Page, served: Running, stage: str) -> None:
    check_fits_and_is_open(page, link(served, stage=stage, layer=1, pos=2))


def test_the_key_leaves_the_address_and_the_link_names_the_view(page: Page, served: Running) -> None:
    page.goto(link(served, stage="norm", layer=1, pos=3))
    settled(page)
    assert KEY not in page.url
    assert f"#stage=norm&layer=1&head=0&pos=3&text={quote(TEXT)}" in page.url
    page.reload()
    settled(page)
    expect(page.get_by_role("heading", level=2)).to_have_text("RMSNorm")
    expect(page.get_by_role("radio", checked=True)).to_contain_text("on")


def test_a_token_a_layer_and_a_head_hold_through_the_stages_by_keyboard(page: Page, served: Running) -> None:
    page.goto(link(served))
    settled(page)
    page.get_by_role("radio", name="token 0").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", checked=True)).to_contain_text("sat")
    for title in ("Text to ids", "Rows of a table", "RMSNorm", "Queries, keys, values", "RoPE"):
        page.keyboard.press("Shift+ArrowRight")
        expect(page.get_by_role("heading", level=2)).to_have_text(title)
        expect(page.get_by_role("heading", level=2)).to_be_focused()
    page.keyboard.press("Shift+ArrowUp")
    page.keyboard.press("Shift+ArrowLeft")
    settled(page)
    assert "stage=qkv&layer=1&head=0&pos=2" in page.url


def test_numbers_are_those_of_the_trace(page: Page, served: Running, llama: Llama) -> None:
    """As displayed: each is what the library has, rounded to so many digits."""
    trace = llama.trace(TEXT)
    page.goto(link(served, stage="embedding", layer=1, head=1, pos=4))
    settled(page)
    assert shown(page, "length") == as_shown(trace["embed"][4].norm().item(), 5)
    page.goto(link(served, stage="norm", layer=1, head=1, pos=4))
    before, after = trace["layers.0.resid"][4], trace["layers.1.attn_norm"][4]
    expect(page.locator('[data-number="length-before"]')).to_be_visible()
    assert shown(page, "length-before") == as_shown(before.norm().item(), 5)
    assert shown(page, "length-after") == as_shown(after.norm().item(), 5)
    rms = (before.double().pow(2).mean() + llama.config.rms_norm_eps).sqrt().item()
    assert shown(page, "rms") == as_shown(rms, 5)
    page.goto(link(served, stage="qkv", layer=1, head=1, pos=4))
    expect(page.locator('[data-number="length-v"]')).to_be_visible()
    for name, head in (("q", 1), ("k", 0), ("v", 0)):
        assert shown(page, f"length-{name}") == as_shown(trace[f"layers.1.{name}"][4, head].norm().item(), 5)
    page.goto(link(served, stage="attention", layer=1, head=1, pos=4))
    expect(page.locator('[data-number="share-4"]')).to_be_visible()
    for position, share in enumerate(trace["layers.1.pattern"][1, 4, :5].tolist()):
        assert shown(page, f"share-{position}") == as_shown(share, 4)
    page.goto(link(served, stage="map"))
    settled(page)
    assert shown(page, "parameters") == sum(p.numel() for p in llama.model.parameters())


def test_positions_turn_queries_as_the_pass_has_it(page: Page, served: Running, llama: Llama) -> None:
    trace = llama.trace(TEXT)
    page.goto(link(served, stage="rope", layer=1, head=1, pos=4))
    expect(page.locator('[data-number="score"]')).to_be_visible()
    expect(page.locator('[data-number="angle"]')).to_be_visible()
    plain, turned = trace["layers.1.q"][4, 1], trace["layers.1.q_rot"][4, 1]
    assert shown(page, "length-before") == as_shown(plain.double().norm().item(), 5)
    assert shown(page, "length-after") == as_shown(turned.double().norm().item(), 5)
    assert shown(page, "length-v") == as_shown(trace["layers.1.v"][4, 0].double().norm().item(), 5)
    assert shown(page, "score") == pytest.approx(trace["layers.1.scores"][1, 4, 0].item(), rel=1e-3)
    page.get_by_role("slider", name="Pair").fill("3")
    assert shown(page, "angle") == as_shown(rope_pairs(llama.config, 4)[3].angle, 5)
    half = llama.config.head_dim // 2
    for name, feature in (("first", 3), ("second", 3 + half)):
        assert shown(page, f"turned-{name}") == pytest.approx(turned[feature].item(), rel=1e-3, abs=1e-6)
    page.get_by_role("button", name="0: nothing turns").click()
    assert shown(page, "angle") == 0
    assert shown(page, "turned-first") == as_shown(plain[3].item(), 4)
    page.get_by_role("button", name="Llama 3.2 1B").click()
    page.locator("details", has_text="without scaling").get_by_text("As a table").click()
    for pair in (0, 20):
        wavelength = rope_pairs(PRESETS["llama-3.2-1b"])[pair].wavelength
        expect(page.locator(f'[data-number="wavelength-{pair}"]')).to_be_visible()
        assert shown(page, f"wavelength-{pair}") == as_shown(wavelength, 5)


def test_neurons_are_the_librarys(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="mlp", layer=1, pos=4))
    expect(page.locator('[data-number="gate-0"]')).to_be_visible()
    for i, one in enumerate(llama.inspect.neurons(TEXT, 1, position=4, k=12).neurons):
        for name in ("gate", "act", "up", "gated"):
            assert shown(page, f"{name}-{i}") == as_shown(getattr(one, name), 4)
    trace = llama.trace(TEXT)
    for button, name in (("4 product", "gated"), ("5 down", "mlp_out"), ("1 gate", "gate")):
        page.get_by_role("button", name=button).click()
        expected = as_shown(trace[f"layers.1.{name}"][4].double().norm().item(), 5)
        expect(page.get_by_role("application", name=re.compile(f"^{name} of layer 1"))).to_be_visible()
        assert shown(page, "length") == expected


def test_what_heads_add_is_the_librarys(page: Page, served: Running, llama: Llama) -> None:
    found = llama.inspect.heads(TEXT, 1, positions=[4])
    whole = llama.trace(TEXT)["layers.1.attn_out"][4]
    page.goto(link(served, stage="heads", layer=1, head=1, pos=4))
    expect(page.locator('[data-number="norm-1"]')).to_be_visible()
    for head, added in enumerate(map(torch.from_numpy, found.added_TND[0])):
        assert shown(page, f"norm-{head}") == as_shown(found.norms_TN[0, head].item(), 5)
        assert shown(page, f"share-{head}") == as_shown(found.shares_TN[0, head].item(), 4)
        cosine = torch.cosine_similarity(added.double(), whole.double(), dim=0).item()
        assert shown(page, f"cosine-{head}") == pytest.approx(cosine, rel=6e-3)
    assert shown(page, "length-out") == as_shown(whole.double().norm().item(), 5)


def test_the_stream_and_who_wrote_a_logit(page: Page, served: Running, llama: Llama) -> None:
    trace = llama.trace(TEXT)
    page.goto(link(served, stage="residual", layer=1, pos=4, token=900))
    expect(page.locator('[data-number="logit"]')).to_be_visible()
    lengths = {"added": "layers.1.attn_out", "before": "layers.0.resid", "after": "layers.1.resid_mid"}
    for name, key in lengths.items():
        assert shown(page, f"length-{name}") == as_shown(trace[key][4].double().norm().item(), 5)
    told = llama.inspect.attribution(TEXT, 900, position=4)
    assert shown(page, "logit") == as_shown(told.logit, 5)
    for one in (*told.additions, *told.heads):
        named = "-".join(str(part) for part in (one.part, one.layer, one.head) if part is not None)
        assert shown(page, f"logit-{named}") == as_shown(one.logit, 4)
    page.get_by_role("button", name="layer 0, MLP").click()
    expect(page.get_by_text("2 of 4: the MLP of layer 0")).to_be_visible()
    assert "layer=0" in page.url and "token=900" in page.url


def test_the_lens_over_the_layers(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="lens", layer=1, pos=4))
    best = llama.trace(TEXT)["logits"][4].argmax().item()
    expect(page.locator('[data-number="rank-1-mlp"]')).to_have_text("1")
    page.get_by_label("another word").fill("mat")
    page.get_by_role("button", name="Ask").click()
    word = llama.tokenizer.encode(" mat", add_special_tokens=False)[0]
    expect(page.get_by_text(f"id {word}")).to_be_visible()
    settled(page)
    for target, url in ((word, page.url), (best, link(served, stage="lens", layer=1, pos=4))):
        page.goto(url)
        expect(page.get_by_text(f"id {target}")).to_be_visible()
        expect(page.locator('[data-number="rank-1-mlp"]')).to_be_visible()
        for place in llama.inspect.lens(TEXT, target, positions=[4]).layers:
            name = f"{place.layer}-{place.after}"
            expect(page.locator(f'[data-number="rank-{name}"]')).to_have_text(str(place.chosen[0].rank))
            assert shown(page, f"probability-{name}") == as_shown(place.chosen[0].probability, 4)
    page.get_by_label("another word").fill("antidisestablishment")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("alert")).to_contain_text("no single token")


def test_the_sampler_shows_its_steps_the_draw_and_the_token_of_the_answer(
    page: Page, served: Running, llama: Llama
) -> None:
    """Also after a button has changed the parameters, and a slider."""
    ids = llama.encode(TEXT)[:5]
    page.goto(link(served, stage="sampler", pos=4))
    for clicked, options in (
        (None, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0}),
        ("hot, but min-p 0.1", {"temperature": 2.0, "min_p": 0.1, "seed": 0}),
        ("another seed", {"temperature": 2.0, "min_p": 0.1, "seed": 1}),
        ("the largest logit", {"temperature": 0.0, "seed": 1}),
    ):
        if clicked is not None:
            page.get_by_role("button", name=clicked).click()
        steps = llama.inspect.sampler_steps(ids, k=5, **options)
        expect(page.locator(".chosen .soft")).to_contain_text(
            f"seed {options['seed']}" if steps.draw else "largest logit"
        )
        told = [step for step in steps.steps if step.name not in ("logit_bias", "grammar")]
        expect(page.locator("th.idle")).to_have_count(sum(not step.is_on for step in told))
        expect(page.locator("[data-chosen]")).to_have_attribute("data-chosen", str(steps.token_id))
        for step in told:
            assert shown(page, f"left-{step.name}") == step.num_left
            for one in step.candidates[:5]:
                assert shown(page, f"p-{step.name}-{one.token_id}") == as_shown(one.probability, 3)
        for one in steps.draw or ():
            assert shown(page, f"noise-{one.token_id}") == as_shown(one.noise, 3)
            assert shown(page, f"total-{one.token_id}") == as_shown(one.total, 3)
    page.get_by_role("slider", name="top-k").fill("3")
    page.get_by_role("slider", name="temperature").fill("1.5")
    expect(page.locator('[data-number="left-top_k"]')).to_have_text("3")


def test_an_answer_grows_by_the_drawn_the_greedy_and_a_forced_token(page: Page, served: Running, llama: Llama) -> None:
    """Its tokens are those of `generate`, their probabilities the library's, and the cache keeps what it had."""
    ids = llama.encode(TEXT)
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0}
    grown = [*ids, *llama.generate(ids, max_tokens=2, **drawn).completions[0].token_ids]
    page.goto(link(served, stage="growth", layer=1, head=1))
    for number in (1, 2):
        page.get_by_role("button", name="Append the drawn token").click()
        expect(page.locator("mark.drawn")).to_have_count(number)
    page.get_by_label("Force").fill(" dog")
    page.get_by_role("button", name="Append what stands here").click()
    expect(page.locator("mark.forced")).to_have_text("␣dog")
    grown += llama.tokenizer.encode(" dog", add_special_tokens=False)
    page.get_by_role("button", name="8 greedy tokens").click()
    expect(page.locator("mark.greedy")).to_have_count(8)
    grown += llama.generate(grown, max_tokens=8, temperature=0).completions[0].token_ids
    expect(page.locator(f'[data-number="rank-{len(grown) - 1}"]')).to_be_visible()
    for position, one in list(enumerate(score(llama.runner, grown).tokens))[len(ids) :]:
        expect(page.locator(f'[data-number="rank-{position}"]')).to_have_text(str(one.rank))
        assert shown(page, f"surprise-{position}") == pytest.approx(-(one.logprob or 0), rel=6e-4)
    expect(page.get_by_role("heading", name=f"What the last of {len(grown)} tokens costs")).to_be_visible()
    settled(page)
    cost = llama.inspect.token_cost(grown)
    expect(page.locator('[data-number="flops"]')).to_have_text(f"{cost.flops / 1e6:#.3g} M")
    expect(page.locator('[data-number="flops-without"]')).to_have_text(f"{cost.flops_without / 1e6:#.3g} M")
    assert shown(page, "apart") == shown(page, "changed") == 0
    page.get_by_role("button", name="Take one back").click()
    expect(page.locator("mark")).to_have_count(10)
    page.get_by_role("button", name="Start over").click()
    expect(page.locator("mark")).to_have_count(0)


def test_a_matrix_can_be_read_as_a_table_and_by_keys(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="attention", layer=0, head=1, pos=2))
    settled(page)
    pattern = llama.trace(TEXT)["layers.0.pattern"][1]
    matrix = page.get_by_role("application", name=re.compile("softmax of layer 0, head 1"))
    matrix.focus()
    page.keyboard.press("ArrowDown")
    said = page.locator(".readout").first.inner_text()
    assert said.startswith("␣on → The: ")
    assert float(said.partition(": ")[2]) == as_shown(pattern[3, 0].item(), 4)
    page.get_by_text("As a table").first.click()
    cells = page.locator("table td").all_inner_texts()[:36]
    read = torch.tensor([float(cell.replace("\u2212", "-") or 0) for cell in cells]).reshape(6, 6)
    assert torch.allclose(read, pattern, rtol=6e-4, atol=1e-30)


@pytest.mark.parametrize("stage", STAGES)
def test_text_is_text(page: Page, served: Running, stage: str) -> None:
    check_text_is_text(page, link(served, HOSTILE, stage=stage, pos=1))


def test_what_is_of_an_earlier_question_is_marked(page: Page, served: Running) -> None:
    """Numbers of layer 0 below the heading of layer 1 would be a lie, for as long as they stand there."""
    held = Held(page, "**/activations/**", of="layer=1")
    page.goto(link(served, stage="attention", layer=0))
    settled(page)
    body = page.locator("article .body")
    expect(body).to_have_attribute("aria-busy", "false")
    page.keyboard.press("Shift+ArrowUp")
    expect(page.get_by_role("heading", name="Layer 1, head 0")).to_be_visible()
    expect(body).to_have_attribute("aria-busy", "true")
    held.go_on()
    expect(body).to_have_attribute("aria-busy", "false")


_SLID = """
async (slider) => {
  for (const value of [1, 1.5]) {
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  }
  for (let i = 0; i < 20; i++) await null; // in the same task
  return document.querySelector("article .body").ariaBusy;
}
"""


@pytest.mark.parametrize(("stage", "name"), [("sampler", "temperature"), ("steer", "strength")])
def test_what_is_of_an_earlier_place_of_a_slider_is_marked(page: Page, served: Running, stage: str, name: str) -> None:
    page.goto(link(served, stage=stage, pos=4))
    settled(page)
    assert page.get_by_role("slider", name=name).evaluate(_SLID) == "true"
    settled(page)


def test_an_experiment_is_said_and_shown(page: Page, served: Running, llama: Llama) -> None:
    page.goto(link(served, stage="attention", layer=1, head=1, pos=2))
    settled(page)
    page.get_by_label("mask off").check()
    expect(page.get_by_text("An experiment in all layers, run by PyTorch")).to_be_visible()
    expect(page.locator('[data-number="share-5"]')).to_be_visible()
    mask = Experiment(bidirectional=True)
    with llama.inspect.edited(experiment=mask) as other:
        shares = trace_experiment(other.model, llama.encode(TEXT), mask)["layers.1.pattern"][1, 2]
    assert [shown(page, f"share-{i}") for i in range(6)] == [as_shown(share, 4) for share in shares.tolist()]
    page.get_by_label("mask off").uncheck()
    expect(page.locator('[data-number="share-5"]')).to_have_count(0)


def test_a_server_that_is_gone_is_said_and_the_text_kept(
    browser: Browser, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets.read_assets, "__defaults__", (built_page(),))
    with serving(llama, extensions=[page_extension()], api_keys=(KEY,)) as served:
        page = browser.new_page()
        page.goto(link(served))
        settled(page)
    page.get_by_label("Text", exact=True).fill("still here")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_contain_text("the server does not answer")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    expect(page.get_by_label("Text", exact=True)).to_have_value("still here")
    page.close()


def test_without_the_key_it_is_asked_for_and_nothing_is_lost(page: Page, served: Running) -> None:
    page.goto(f"{served.url}/#stage=map&text={quote('I love to drink')}")
    expect(page.get_by_text("This server needs its key")).to_be_visible()
    expect(page.get_by_label("Text", exact=True)).to_have_value("I love to drink")
    page.get_by_label("Key").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_text("The server does not take this key")).to_be_visible()
    page.get_by_label("Key").fill(KEY)
    page.get_by_role("button", name="Open").click()
    settled(page)
    expect(page.get_by_role("radio", name=re.compile("love"))).to_be_visible()
    expect(page.get_by_role("radio", checked=True)).to_have_accessible_name(re.compile("drink"))  # what comes next


def test_what_is_refused_is_said_and_the_text_kept(page: Page, served: Running) -> None:
    page.goto(link(served))
    settled(page)
    page.get_by_label("Text", exact=True).fill("word " * 600)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_contain_text("maximum context length")
    expect(page.get_by_label("Text", exact=True)).to_have_value("word " * 600)
    page.get_by_label("Text", exact=True).fill("short")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_pass_that_the_server_forgot_is_named_again(page: Page, served: Running) -> None:
    page.goto(link(served, stage="norm"))
    settled(page)
    for number in range(70):  # more than are kept
        page.request.post(
            f"{served.url}/inspect/passes", data={"ids": [number]}, headers={"authorization": f"Bearer {KEY}"}
        )
    page.get_by_role("radio", name="token 3").click()
    expect(page.get_by_role("heading", name=re.compile("Before: the stream at ␣on"))).to_be_visible()
    settled(page)
    expect(page.get_by_role("alert")).to_have_count(0)
