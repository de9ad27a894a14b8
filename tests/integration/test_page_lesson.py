"""A lesson in a browser: its questions, answers that are shown when asked for, large type; and the key among tabs."""

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from llamarium.api import Llama
from llamarium.page import assets
from llamarium.page.extension import page as page_extension
from llamarium.page.schema.lesson import ClassLesson, ClassLessonPart
from page_browser import HOSTILE, KEY, check_is_open, settled
from page_bundle import built_page
from serving import Running, serving

pytest_plugins = ["page_browser"]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

LESSON = ClassLesson(
    title=f"A title {HOSTILE}",
    large=True,
    parts=(
        ClassLessonPart(
            text="The cat sat on the mat",
            question=f"Which token comes next? {HOSTILE}",
            answer=f"The answer {HOSTILE}",
            cards=("pieces",),
            answer_cards=("guess",),
        ),
        ClassLessonPart(text="A dog", question="What is a row?", answer=None, cards=("rows",), answer_cards=()),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def bundled() -> Iterator[None]:
    """The page is the one of these sources."""
    bundle, before = built_page(), assets.read_assets.__defaults__
    assets.read_assets.__defaults__ = (bundle,)
    yield
    assets.read_assets.__defaults__ = before


@pytest.fixture(scope="module")
def served(llama: Llama, bundled: None) -> Iterator[Running]:
    with serving(llama, extensions=[page_extension(shown_lesson=LESSON)], api_keys=(KEY,)) as running:
        yield running


def test_an_answer_is_shown_when_it_is_asked_for_and_all_of_a_lesson_is_text(page: Page, served: Running) -> None:
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.goto(f"{served.url}/#stage=lesson&key={KEY}")
    settled(page)
    expect(page.locator(".question")).to_have_text(LESSON.parts[0].question)
    expect(page.get_by_role("heading", level=3)).to_have_text(["Pieces"])
    expect(page.locator(".answer")).to_have_text("")
    check_is_open(page)
    page.get_by_role("button", name="Show the answer").click()
    settled(page)
    expect(page.locator(".answer")).to_have_text(LESSON.parts[0].answer or "")
    expect(page.get_by_role("heading", level=3)).to_have_text(["Pieces", "The guess"])
    assert page.locator("main img, main script, main b:not(.words b)").count() == 0
    page.keyboard.press("ArrowRight")
    settled(page)
    expect(page.locator(".question")).to_have_text("What is a row?")
    expect(page.locator("blockquote")).to_have_text("A dog")
    expect(page.get_by_role("button", name="answer")).to_have_count(0)
    assert "part=2" in page.url and "text=A%20dog" in page.url
    page.keyboard.press("ArrowLeft")
    settled(page)
    expect(page.get_by_role("button", name="Show the answer")).to_be_visible()
    expect(page.locator(".answer")).to_have_text("")


def test_large_type_is_half_as_large_again_where_there_is_room(page: Page, served: Running) -> None:
    page.goto(f"{served.url}/#stage=lesson&key={KEY}")
    settled(page)
    high = "document.querySelector('.question').getBoundingClientRect().height"
    page.get_by_role("button", name="large").click()
    small = page.evaluate(high)
    page.get_by_role("button", name="large").click()
    assert page.evaluate(high) == pytest.approx(1.5 * small, rel=0.02)
    page.get_by_role("link", name="Start", exact=True).click()
    page.get_by_role("link", name="See what happens inside").click()
    settled(page)
    page.wait_for_timeout(300)
    seen = page.evaluate("[document.documentElement.scrollHeight, innerHeight]")
    assert seen[0] <= seen[1], "the story fills the window, not more"
    page.set_viewport_size({"width": 360, "height": 740})
    check_is_open(page)


def test_a_server_without_a_lesson_has_no_such_room(llama: Llama, window: BrowserContext) -> None:
    with serving(llama, extensions=[page_extension()], api_keys=(KEY,)) as running:
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{running.url}/inspect/model", headers=headers, timeout=60).json()["has_lesson"] is False
        answer = httpx.get(f"{running.url}/inspect/lesson", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_lesson")
        page = window.new_page()
        page.goto(f"{running.url}/#stage=map&key={KEY}")
        settled(page)
        expect(page.get_by_role("link", name="Lesson")).to_have_count(0)
        page.close()


def test_a_second_tab_needs_no_key_and_a_page_of_another_port_gets_none(
    page: Page, served: Running, llama: Llama, window: BrowserContext
) -> None:
    page.goto(f"{served.url}/#stage=lesson&key={KEY}")
    settled(page)
    second = window.new_page()
    second.goto(f"{served.url}/#stage=map")
    settled(second)
    expect(second.locator(".strip")).to_be_visible()
    assert KEY not in second.url
    assert window.cookies() == []
    with serving(llama, extensions=[page_extension()], api_keys=(KEY,)) as other:
        foreign = window.new_page()
        foreign.goto(f"{other.url}/#stage=map")
        expect(foreign.get_by_label("Key")).to_be_visible()
        foreign.wait_for_timeout(500)
        assert foreign.evaluate("sessionStorage.getItem('llamarium-key')") in (None, "")
        foreign.close()
    second.close()


def test_a_server_that_is_started_again_is_picked_up(llama: Llama, browser: Browser) -> None:
    """Under another key, too, once one tab has it."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        with serving(llama, extensions=[page_extension()], api_keys=("first",)) as running:
            port = int(running.url.rsplit(":", 1)[1])
            page.goto(f"{running.url}/#stage=norm&key=first")
            settled(page)
        page.get_by_role("link", name="SwiGLU").click()
        expect(page.get_by_role("alert").first).to_contain_text("does not answer")
        with serving(llama, extensions=[page_extension()], api_keys=("second",), port=port) as running:
            opened = context.new_page()
            opened.goto(f"{running.url}/#stage=map&key=second")
            settled(opened)
            expect(page.get_by_role("alert")).to_have_count(0)
            settled(page)
            assert page.evaluate("sessionStorage.getItem('llamarium-key')") == "second"


def test_requests_that_the_server_does_not_show_are_asked_for_once(page: Page, served: Running) -> None:
    asked = list[str]()
    page.on("request", lambda one: asked.append(one.url) if one.url.endswith("/inspect/requests") else None)
    page.goto(f"{served.url}/#stage=requests&key={KEY}")
    expect(page.get_by_text("does not show its clients' requests")).to_be_visible()
    before = len(asked)
    page.wait_for_timeout(2000)
    assert len(asked) == before <= 2
