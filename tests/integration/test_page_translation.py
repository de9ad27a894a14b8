"""Stage 16 in a browser and over HTTP: its numbers are the translator's; what it cannot read is said."""

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from llamarium.api import Llama
from llamarium.inspect.probes.translation import packaged_translator
from page_browser import KEY, as_shown, check_fits_and_is_open, link, settled, shown
from serving import Running, small_llama

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TEXT = "the black cat does not see the small house"


@pytest.fixture(scope="module")
def llama(smollm2_path: object) -> Llama:
    return small_llama(smollm2_path)  # pyright: ignore[reportArgumentType]


def test_the_route_says_the_translators_numbers(served: Running) -> None:
    with httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        told = client.post("/inspect/translations", json={"text": TEXT}).json()
        refused = client.post("/inspect/translations", json={"text": "I love zebras"})
    found = packaged_translator().translate(TEXT)
    assert told["written"] == list(found.written) and told["source"] == list(found.source)
    for name, expected in (
        ("encoder", found.encoder_LNSS), ("decoder", found.decoder_LNTT), ("cross", found.cross_LNTS)
    ):  # fmt: skip
        assert np.array_equal(np.array(told[name], np.float32), expected)
    assert told["candidates"][2][0]["text"] == "noir" and "cat" in told["known"] and told["right"] == told["asked"]
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "text")
    assert "'zebras' is none of its words" in error["message"]


def test_a_word_looks_across_at_another_place(page: Page, served: Running) -> None:
    page.goto(link(served, stage="encoder", sentence=TEXT, word=2))
    settled(page)
    found = packaged_translator().translate(TEXT)
    mean_TS, own_TT = found.cross_LNTS[1].mean(0), found.decoder_LNTT[1].mean(0)
    for i in range(len(found.source)):
        assert shown(page, f"cross-{i}") == as_shown(float(mean_TS[2, i]), 3)
    assert [shown(page, f"own-{i}") for i in range(3)] == [as_shown(float(own_TT[2, i]), 3) for i in range(3)]
    assert shown(page, "next") == as_shown(found.candidates[2][0].probability, 3)
    page.get_by_role("button", name="chat, after le").click()
    expect(page.get_by_role("heading", name="It writes chat")).to_be_visible()
    page.get_by_label("heads").select_option("2")
    assert shown(page, "cross-2") == as_shown(float(found.cross_LNTS[1, 2, 1, 2]), 3)
    matrix = page.get_by_role("application", name="Cross: from written to source")
    matrix.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="It writes noir")).to_be_visible()
    assert "word=2" in page.url and "heads=2" in page.url


def test_a_word_that_it_does_not_know_is_said_and_the_text_stays(page: Page, served: Running) -> None:
    page.goto(link(served, stage="encoder"))
    settled(page)
    page.get_by_label("English").fill("I love zebras")
    page.get_by_role("button", name="Translate").click()
    expect(page.get_by_role("alert")).to_contain_text("'zebras' is none of its words")
    expect(page.get_by_label("English")).to_have_value("I love zebras")


def test_the_view_fits_and_is_open_to_everybody(page: Page, served: Running) -> None:
    check_fits_and_is_open(page, link(served, stage="encoder", sentence=TEXT))
