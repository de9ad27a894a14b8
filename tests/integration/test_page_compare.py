"""The room Compare in a browser: its numbers are the library's, of two models and of a run's checkpoints."""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import llamarium
from llamarium.api import Llama
from llamarium.page import assets
from llamarium.page.compare.references import References
from llamarium.page.compare.runs import Runs
from llamarium.page.extension import page as page_extension
from llamarium.train.history import read_history
from llamarium.train.row_paths import row_paths
from page_browser import (
    KEY,
    Held,
    as_shown,
    check_fits_and_is_open,
    check_two_screens,
    link,
    saved,
    settled,
    shown,
    shown_decimal,
)
from page_bundle import built_page
from serving import Running, serving
from tiny_run import tiny_run

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TEXT = "the cat sat on a mat"
VIEWS = ("bits-cost", "compare", "runs", "checkpoints")
STEPS = (5, 10, 15, 20, 24)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("runs") / "a <b>story", intermediate_size=64)  # whole blocks of 32


@pytest.fixture(scope="module")
def llama(run: Path) -> Llama:
    return at_step(run, 24)


@pytest.fixture(scope="module")
def served(llama: Llama, run: Path) -> Iterator[Running]:
    """A server that was started with a run."""
    bundle, before = built_page(), assets.read_assets.__defaults__
    assets.read_assets.__defaults__ = (bundle,)
    try:
        with serving(
            llama, extensions=[page_extension(compared=(Runs([run]), References()))], api_keys=(KEY,)
        ) as found:
            yield found
    finally:
        assets.read_assets.__defaults__ = before


def at_step(run: Path, step: int) -> Llama:
    return llamarium.load(run / f"step-{step:08d}", device="cpu")


def view(served: Running, **named: Any) -> str:
    return link(served, TEXT, **named)


@pytest.mark.parametrize("stage", VIEWS)
def test_a_view_fits_and_is_open_to_everybody(page: Page, served: Running, stage: str) -> None:
    check_fits_and_is_open(page, view(served, stage=stage, layer=1, pos=3))


def test_every_view_is_two_screens_with_its_figure_above_the_fold(page: Page, served: Running) -> None:
    check_two_screens(page, {stage: view(served, stage=stage, details=0) for stage in VIEWS})


@pytest.mark.parametrize("stage", VIEWS)
def test_a_control_is_near_the_title_by_keyboard(page: Page, served: Running, stage: str) -> None:
    page.goto(view(served, stage=stage))
    settled(page)
    page.locator("#stage-title").focus()
    for _ in range(6):
        page.keyboard.press("Tab")
        if page.evaluate("!!document.activeElement.closest('article .body')"):
            return
    pytest.fail("no control of the view within six tab stops of its title")


def check_comparison(page: Page, side: Llama, against: Llama) -> None:
    """Hold the numbers of the view at layer 1 and token 3 to the library's."""
    found = side.inspect.compare(TEXT, against, k=3)
    assert shown(page, "kl") == as_shown(found.kl, 4)
    assert shown(page, "relative") == as_shown(found.layers[1].relative[3], 4)
    assert shown(page, "cosine") == as_shown(found.layers[1].cosine[3], 6)
    expect(page.locator('[data-number="same"]')).to_have_text(f"{100 * found.same_top:.1f} %")
    for one in found.tokens:
        assert shown(page, f"kl-{one.position}") == as_shown(one.kl, 4)
        if one.surprise is not None and one.surprise_against is not None:
            assert shown(page, f"surprise-{one.position}") == as_shown(one.surprise, 4)
            assert shown(page, f"surprise-against-{one.position}") == as_shown(one.surprise_against, 4)


def test_two_models_are_those_that_are_chosen(page: Page, served: Running, run: Path, llama: Llama) -> None:
    page.goto(view(served, stage="compare", layer=1, pos=3))
    settled(page)
    check_comparison(page, llama.inspect.variant("NF4"), llama)
    page.get_by_role("button", name="Q4_1 (int4) against float32").click()
    expect(page.get_by_label("Measured against")).to_have_value("float32")
    settled(page)
    assert "side=Q4_1&against=float32" in page.url
    check_comparison(page, llama.inspect.variant("Q4_1"), llama.inspect.variant("float32"))
    page.get_by_role("button", name="Swap the two").click()
    expect(page.get_by_label("Looked at", exact=True)).to_have_value("float32")
    settled(page)
    check_comparison(page, llama.inspect.variant("float32"), llama.inspect.variant("Q4_1"))
    page.get_by_label("Looked at", exact=True).select_option(f"checkpoint:{run.name}:5")
    page.get_by_label("Measured against").select_option("model")
    settled(page)
    check_comparison(page, at_step(run, 5), llama)
    page.reload()
    settled(page)
    check_comparison(page, at_step(run, 5), llama)


def test_a_matrix_of_layers_by_tokens_chooses_both(page: Page, served: Running, llama: Llama) -> None:
    page.goto(view(served, stage="compare", layer=0, pos=0))
    settled(page)
    found = llama.inspect.variant("NF4").inspect.compare(TEXT, llama)
    matrix = page.get_by_role("application", name=re.compile("^Relative error of the stream: layers by tokens"))
    matrix.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    said = page.locator(".readout").first.inner_text()
    assert said.startswith("after layer 1, h: ")
    assert float(said.partition(": ")[2]) == as_shown(found.layers[1].relative[1], 4)
    page.keyboard.press("Enter")
    assert shown(page, "relative") == as_shown(found.layers[1].relative[1], 4)
    page.get_by_role("button", name="1 \u2212 cosine").click()
    expect(page.get_by_role("application", name=re.compile("^1 minus the cosine of the stream"))).to_be_visible()
    assert "measure=cosine" in page.url


def test_a_run_is_shown_as_its_journal_has_it(page: Page, served: Running, run: Path) -> None:
    page.goto(view(served, stage="runs"))
    settled(page)
    history = read_history(run)
    assert history.best_loss is not None and history.tokens_per_s is not None
    assert shown(page, "best") == as_shown(history.best_loss, 4)
    assert shown(page, "loss") == as_shown(history.values("step", "loss")[-1], 4)
    expect(page.locator("article .row [role=status]").first).to_have_text("24 of 24 steps on cpu; finished")
    curves = page.locator("[data-curve]").evaluate_all("all => all.map((one) => one.dataset.curve)")
    assert curves == ["loss", "learning_rate", "grad_norm", "tokens_per_s"]
    expect(page.locator("[data-curve=loss] circle")).to_have_count(len(history.values("validation", "loss")))
    expect(page.locator(".passage").first).to_contain_text(history.samples[-1].text.strip()[-1])
    name, data = saved(page, "CSV")
    assert name == "llamarium-training-runs.csv" and f"best_loss,,,{history.best_loss}\r\n" in data.decode()
    page.get_by_role("link", name="5 checkpoints").click()
    expect(page.get_by_role("heading", name="A model that is learning")).to_be_visible()


def check_moment(page: Page, run: Path, step: int) -> None:
    one, logprobs = at_step(run, step), list[float | None]()
    logprobs = list(one.score(TEXT).logprobs)
    told = [-x for x in logprobs if x is not None]
    assert shown(page, "loss") == pytest.approx(sum(told) / len(told), rel=1e-3)
    for i, x in enumerate(told, start=1):
        assert shown(page, f"surprise-{i}") == pytest.approx(x, rel=1e-3, abs=1e-5)
    best = one.next_tokens(TEXT, k=1)[0].chosen
    assert shown(page, "best") == as_shown(best.probability, 3)


def test_the_slider_shows_each_checkpoint(page: Page, served: Running, run: Path, llama: Llama) -> None:
    page.goto(view(served, stage="checkpoints", layer=1, head=2, pos=3))
    settled(page)
    check_moment(page, run, 24)
    paths = row_paths(run, list(dict.fromkeys(llama.encode(TEXT))))
    page.get_by_role("slider", name="Checkpoint").fill("1")
    expect(page.locator(".pick output", has_text="step 10")).to_be_visible()
    settled(page)
    assert "step=10" in page.url
    check_moment(page, run, 10)
    page.get_by_text("As a table").first.click()
    for row, token_id in enumerate(paths.ids):
        for axis, name in enumerate(("first", "second")):
            assert shown(page, f"{name}-{token_id}") == as_shown(paths.places_SR2[1, row, axis].item(), 4)
    matrix = page.get_by_role("application", name=re.compile("^Pattern of layer 1, head 2 at step 10"))
    matrix.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    pattern = at_step(run, 10).trace(TEXT, names=["pattern"])["layers.1.pattern"][2]
    assert float(page.locator(".readout").last.inner_text().partition(": ")[2]) == as_shown(pattern[4, 0].item(), 4)


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_play_walks_to_the_last_checkpoint_and_the_loss_falls(page: Page, served: Running, motion: Any) -> None:
    page.emulate_media(reduced_motion=motion)
    last = Held(page, "**/moment**", of="step=24")
    page.goto(view(served, stage="checkpoints", step=5))
    settled(page)
    first = shown(page, "loss")
    page.get_by_role("button", name="Play").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    last.go_on()
    expect(page.locator(".pick output", has_text="step 24")).to_be_visible(timeout=20_000)
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    settled(page)
    assert shown(page, "loss") < first
    expect(page.get_by_role("img", name=re.compile("^Loss of the text over 5 checkpoints"))).to_be_visible()
    moves = page.evaluate("getComputedStyle(document.querySelector('article svg g')).transitionDuration")
    assert moves == ("0.5s" if motion == "no-preference" else "0s")
    page.evaluate("window.setTimeout = () => 0")  # between two checkpoints time stands still
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_a_checkpoint_that_has_gone_is_said(page: Page, served: Running) -> None:
    page.goto(view(served, stage="checkpoints", step=7))
    expect(page.get_by_text("The run has no checkpoint of step 7")).to_be_visible()
    expect(page.get_by_role("alert").first).to_contain_text("has no checkpoint of step 7")
    page.get_by_role("button", name="Checkpoint: one on").click()
    expect(page.locator(".pick output", has_text="step 10")).to_be_visible()
    expect(page.locator('[data-number="loss"]')).to_be_visible()


def test_a_text_that_is_too_long_is_said(page: Page, served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamarium.page.compare.probes.MAX_TOKENS", 19)
    page.goto(view(served, stage="compare"))
    settled(page)
    expect(page.get_by_text("The text has 20 tokens; 19 are compared at most")).to_be_visible()
    expect(page.locator('[data-number="kl"]')).to_have_count(0)


def check_program(page: Page, monkeypatch: pytest.MonkeyPatch, run: Path, *names: str) -> None:
    """Run "Open as Python" beside the run's folder, and hold what it makes to what is displayed."""
    monkeypatch.chdir(run.parent)
    for kind in ("more", "python"):
        page.locator(f"details.{kind}").evaluate("one => (one.open = true)")
    found: dict[str, Any] = {}
    exec(compile(page.get_by_role("region", name="This view as Python").inner_text(), "view.py", "exec"), found)
    for name in names:
        number = shown_decimal(page, name)
        assert Decimal(found["numbers"][name]).quantize(number) == number, name  # to the last digit that is displayed


def test_the_views_open_as_programs_that_make_their_numbers(
    page: Page, served: Running, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = ("kl", "last", "relative", "cosine", "kl-3", "surprise-3", "surprise-against-3")
    for side, against in (("NF4", "model"), ("Q8_0", "float32"), (f"checkpoint:{run.name}:5", "model")):
        page.goto(view(served, stage="compare", layer=1, pos=3, side=side, against=against))
        settled(page)
        check_program(page, monkeypatch, run, *compared)
    page.goto(view(served, stage="bits-cost"))
    settled(page)
    check_program(page, monkeypatch, run, *(f"{name}-{kind}" for name in ("kl", "last") for kind in ("Q8_0", "Q4_1")))
    page.goto(view(served, stage="runs"))
    settled(page)
    check_program(page, monkeypatch, run, "loss", "best")
    page.goto(view(served, stage="checkpoints", step=10))
    settled(page)
    page.get_by_text("As a table").first.click()
    check_program(page, monkeypatch, run, "loss", "best", "surprise-3", "first-14", "second-14")
