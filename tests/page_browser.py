"""The page in a browser, for the tests of each of its rooms: `pytest_plugins = ["page_browser"]` gives the fixtures.

A module that wants another model behind the page has a fixture `llama` of its own.
"""

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from axe_playwright_python.base import AxeResults
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from llamarium.api import Llama
from llamarium.cli.inspect import link_to
from llamarium.page import assets
from llamarium.page.extension import page as page_extension
from page_bundle import built_page, chromium
from serving import Running, serving

expect.set_options(timeout=30_000)  # as long as Playwright waits for all else

KEY = "the-key"
TEXT = "The cat sat on the mat"
HOSTILE = "<img src=x onerror=alert(1)> </script> &lt;b&gt; \u202eabc\u200b 👩‍👩‍👧 \ufdd0 $x^2$"


@pytest.fixture(scope="module")
def inspects_requests() -> bool:
    """Whether the page shows what the server's clients ask."""
    return False


@pytest.fixture(scope="module")
def build_folder() -> Path | None:
    """A learner's folder that the page checks."""
    return None


@pytest.fixture(scope="module")
def served(llama: Llama, inspects_requests: bool, build_folder: Path | None) -> Iterator[Running]:
    """A server with the page."""
    bundle, before = built_page(), assets.read_assets.__defaults__
    assets.read_assets.__defaults__ = (bundle,)
    try:
        extension = page_extension(inspects_requests=inspects_requests, build_folder=build_folder)
        with serving(llama, extensions=[extension], api_keys=(KEY,)) as found:
            yield found
    finally:
        assets.read_assets.__defaults__ = before


@pytest.fixture(scope="module")
def browser(served: Running) -> Iterator[Browser]:
    """Chromium; for one module, as its event loop would be in the way of others."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def window(browser: Browser, served: Running) -> Iterator[BrowserContext]:
    """Where a module's pages are opened: the page's files are loaded and compiled once, not for each of them.

    A page that stays open keeps the process that shows them all.
    """
    with browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce") as found:
        found.new_page().goto(f"{served.url}/health")
        yield found


@pytest.fixture
def page(window: BrowserContext, served: Running) -> Iterator[Page]:
    """A page, which finds nothing of those before it, and must neither fail nor ask another host."""
    found, faults = window.new_page(), list[str]()
    stored = {"origin": served.url, "storageTypes": "local_storage"}
    window.new_cdp_session(found).send("Storage.clearDataForOrigin", stored)
    found.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
    found.on("pageerror", lambda error: faults.append(str(error)))
    found.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith(served.url) else None)
    yield found
    found.close()
    expected = re.compile(r"Failed to load resource: the server responded with a status of (4|503)")
    assert [fault for fault in faults if not expected.match(fault)] == []


def link(served: Running, text: str = TEXT, **view: Any) -> str:
    """The link to a view, with the key: the map where no stage is named, the first token, its details open."""
    chosen = {"stage": "map", "pos": 0, "details": 1, **view}
    named = "".join(f"&{name}={quote(str(value))}" for name, value in chosen.items())
    return link_to(served.url, text, key=KEY) + named


def shown(page: Page, name: str) -> float:
    """A number of the page, as it is displayed."""
    return float(shown_decimal(page, name))


def shown_decimal(page: Page, name: str) -> Decimal:
    """A number of the page, with the digits that are displayed."""
    text = page.locator(f'[data-number="{name}"]').inner_text()
    return Decimal(text.replace("\u2212", "-").replace("\u202f", ""))


def as_shown(value: float, digits: int) -> float:
    """A number as the page writes it with so many digits."""
    return float(f"{value:.{digits}g}")


class Intercepted:
    """The requests of a page that match a pattern: each goes on, unless `answer` is set, which is given them then.

    Made before the page is opened: one that is there already sends some past a new route.
    """

    def __init__(self, page: Page, pattern: str) -> None:
        self.answer: Callable[[Route], object] | None = None
        page.route(pattern, lambda route: self.answer(route) if self.answer else route.continue_())


class Held(Intercepted):
    """Those of them that have a text in their address or body are held, until they may all go on, later ones too."""

    def __init__(self, page: Page, pattern: str, of: str = "") -> None:
        super().__init__(page, pattern)
        self.routes = list[Route]()
        self._of = of
        self.answer = self._take

    def _take(self, route: Route) -> None:
        if self._of in route.request.url + (route.request.post_data or ""):
            self.routes.append(route)
        else:
            route.continue_()

    def go_on(self) -> None:
        self.answer = None
        for route in self.routes:
            route.continue_()


_QUIET = """
() => new Promise((done, fail) => {
  const end = performance.now() + 30_000;
  let frames = 0;
  const look = () => {
    const isThere = document.querySelector('article .body[aria-busy="false"], main[data-ready]');
    const isBusy = document.querySelector(".waiting, form.text button[disabled]");
    frames = isThere && !isBusy ? frames + 1 : 0;
    if (frames > 5) done();
    else if (performance.now() > end) fail(new Error("the view is not there after 30 s"));
    else requestAnimationFrame(look);
  };
  look();
})
"""
"""Some frames in a row in which nothing is waited for: an answer may lead to another question."""


def settled(page: Page) -> None:
    """Wait until the view that is open has all that it asked for."""
    page.evaluate(_QUIET)


def check_fits_and_is_open(page: Page, url: str | None = None) -> None:
    """Hold a view, or what is open, to its width and to axe's rules (contrast, names, order).

    Wide and light, then narrow and dark.
    """
    if url is not None:
        page.goto(url)
    for width, colors in ((1280, "light"), (360, "dark")):
        page.emulate_media(color_scheme=colors)
        page.set_viewport_size({"width": width, "height": 800})
        settled(page)
        check_is_open(page)


def check_is_open(page: Page) -> None:
    """Hold what is open to its width and to axe's rules."""
    wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0, f"{page.url} is wider than its window"
    axe = Axe()
    if not page.evaluate("'axe' in window"):  # half a megabyte that is compiled once for a page, not for each view
        page.evaluate(axe.axe_script)
    found = AxeResults(page.evaluate("axe.run({resultTypes: ['violations']})"))
    assert found.violations_count == 0, found.generate_report()


_MEASURED = """
() => {
  const place = (one) => one && (({ top, bottom }) => [top, bottom])(one.getBoundingClientRect());
  const words = document.querySelector(".entered .words") ?? document.querySelector("article > .lead");
  return {
    high: document.documentElement.scrollHeight,
    figure: place(document.querySelector(".picture canvas, .drawing svg, article .body :is(canvas, svg, table)")),
    picture: document.querySelector(".picture, .drawing") !== null,
    sentence: place(words.querySelector("p") ?? words),
    words: words.innerText.split(/\\s+/).length,
  };
}
"""


def check_two_screens(page: Page, views: dict[str, str]) -> None:
    """Hold views, named with their links, to two screens, wide and on a phone, before their details are opened.

    The picture is above the fold, of another figure its begin; a sentence stands over it, or beside a wide picture.
    """
    wrong = list[tuple[object, ...]]()
    for name, url in views.items():
        page.goto(url)
        for width, height in ((1280, 800), (360, 740)):
            page.set_viewport_size({"width": width, "height": height})
            settled(page)
            seen = page.evaluate(_MEASURED)
            (top, bottom), sentence = seen["figure"] or (height, height), seen["sentence"]
            is_seen = (bottom if seen["picture"] else top + min(bottom - top, 120)) <= height
            is_led = sentence[1] <= top or (seen["picture"] and width == 1280 and sentence[0] < bottom)
            if not (seen["high"] <= 2 * height and is_seen and is_led and 5 < seen["words"] <= 40):
                wrong.append((name, width, seen))
    assert not wrong, "\n".join(map(str, wrong))


def check_text_is_text(page: Page, url: str) -> None:
    """Hold a view of `HOSTILE` to showing it as it is: no markup of it, nothing run, nothing asked elsewhere."""
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.goto(url)
    settled(page)
    assert page.locator("main img, main script, .strip img").count() == 0
    expect(page.get_by_label("Text", exact=True)).to_have_value(HOSTILE)


def saved(page: Page, kind: str) -> tuple[str, bytes]:
    """Save the open view; return the file's name and what is in it."""
    menu = page.locator("details.export")
    menu.locator("summary").click()
    with page.expect_download() as coming:
        menu.get_by_role("button", name=kind).click()
    return coming.value.suggested_filename, coming.value.path().read_bytes()
