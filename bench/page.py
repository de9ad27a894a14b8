"""The page of `llamarium inspect` in Chromium: how long each view takes from its click, and what the tab holds.

    python bench/page.py [--model MODEL] [--chromium PATH]

The picture is there when the numbers of the pass are drawn. Its frames are those of a flight into a layer, on into a
block and back, and of a pass that rises, with 32 tokens: the time from one to the next, of all of them.

A view is there when everything that it asks for has come and is drawn: the time is the browser's own, from the click to
the first such frame. "first" is the first visit to each view of a text, by a reader who has looked at the map for five
seconds, "later" the median of --rounds further ones at other tokens and layers, which the server has to compute or
fetch. Long tasks are those of more than 50 ms on the page's main thread, while a text of 256 tokens is scrolled, its
matrices are hovered over and its layers are stepped through. Milliseconds, unless a row says otherwise; the page has to
be built (`make page`).
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

import common
from llamarium.page.assets import read_assets

SENTENCE = "The quick brown fox jumps over the lazy dog near the river"
LOOK_MS = 5000
"""How long the first view is looked at; what the first questions need is prepared meanwhile."""

WORDS = "the cat that the dog chased ran over a hill and saw "

SETTLED = """
(act) => new Promise((done) => {
  const isBusy = () =>
    !document.querySelector('article .body[aria-busy="false"]') || document.querySelector(".waiting") !== null;
  const begin = performance.now();
  let end = begin, quiet = 0;
  if (act) act();
  const look = () => {
    if (isBusy()) quiet = 0;
    else if (quiet++ === 0) end = performance.now();
    if (quiet > 6) done(end - begin);
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})
"""
"""JavaScript: does something, and gives the milliseconds until the view is there; an answer may lead to a question."""


def until_settled(page: Page, act: str = "null") -> float:
    """Return the milliseconds from an action of the page's to the view being there."""
    return page.evaluate(f"({SETTLED})({act})")


def visit(page: Page, view: str) -> float:
    """Click a view's link; return the milliseconds until it is there."""
    return until_settled(page, f"""() => document.querySelector('nav.views a[href*="stage={view}&"]').click()""")


def views_of(page: Page) -> list[str]:
    """Return what links call the views of the room that is open."""
    links = page.eval_on_selector_all("nav.views a", "(links) => links.map((one) => one.getAttribute('href'))")
    return [re.findall(r"stage=([^&]+)", link)[0] for link in links]


@contextmanager
def inspecting(model: list[str]) -> Generator[str]:
    """Start `llamarium inspect`; yield its link once the model is there."""
    command = [sys.executable, "-m", "llamarium", "inspect", "--no-browser", SENTENCE, *model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            link = process.stdout.readline().strip()
            if not link:
                raise SystemExit("`llamarium inspect` ends before it listens; run it to see why")
            while True:
                try:
                    urllib.request.urlopen(link.partition("#")[0] + "health").close()
                    break
                except OSError:  # 503: the model is loading
                    time.sleep(0.005)
            yield f"{link}&stage=map"
        finally:
            process.terminate()


def opening(browser: Browser, link: str, selector: str = 'article .body[aria-busy="false"]') -> float:
    """Return the milliseconds from a new tab to the first view with its numbers, or to what a selector names."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    begin = time.perf_counter()
    page.goto(link)
    page.wait_for_selector(selector)
    seconds = time.perf_counter() - begin
    context.close()
    return 1000 * seconds


FRAMES = """
(act) => new Promise((done) => {
  const times = [], tasks = [], begin = performance.now();
  const seen = new PerformanceObserver((list) => tasks.push(...list.getEntries().map((one) => one.duration)));
  seen.observe({ type: "longtask" });
  const look = (now) => {
    times.push(now);
    if (now - begin < 1800) requestAnimationFrame(look);
    else { seen.disconnect(); done({ frames: times.slice(1).map((one, i) => one - times[i]), tasks }); }
  };
  if (act) document.querySelector(act).click();
  requestAnimationFrame(look);
})
"""
"""JavaScript: clicks at a place, and gives the milliseconds of each frame since and of each long task."""

NEXT_CARD = 'button[aria-label="Next card"]'


def frames(browser: Browser, link: str, rounds: int) -> dict[str, dict[str, float]]:
    """Fly through the picture; return its frames' median, 95th percentile and longest task in milliseconds."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    rising: list[dict[str, list[float]]] = []
    flying: list[dict[str, list[float]]] = []
    for _ in range(rounds):
        page.goto("about:blank")
        page.goto(link)
        page.wait_for_selector(".picture[data-far]")
        rising.append(page.evaluate(f"({FRAMES})(null)"))
        page.wait_for_selector('.picture[aria-busy="false"]')
        for view in ("residual", "attention", "map"):
            place = f"nav.views a[href*='stage={view}&']"
            flying.append(page.evaluate(f"({FRAMES})({json.dumps(place)})"))
    page.close()
    return {"rising": _of_frames(rising), "flying": _of_frames(flying)}


def story_frames(browser: Browser, link: str) -> dict[str, float]:
    """Go through the cards of the story one after the other; return what `frames` returns."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(link.replace("stage=map", "stage=story"))
    page.wait_for_selector("main[data-ready] .scroller")
    cards = page.locator("section.page").count() - 1
    measured = [page.evaluate(f"({FRAMES})({json.dumps(NEXT_CARD)})") for _ in range(cards)]
    page.close()
    return _of_frames(measured)


def long_text(page: Page, link: str) -> dict[str, float]:
    """Ask for the picture of 2,000 tokens; return the milliseconds to its first piece, and those that stopping takes.

    It has stopped when another text of a few tokens is answered, as passes are computed one at a time.
    """
    page.goto("about:blank")
    page.goto(link)
    until_settled(page)
    page.get_by_label("Text", exact=True).fill(WORDS * 170)
    begin = time.perf_counter()
    page.get_by_role("button", name="Run").click()
    page.wait_for_function("() => (document.querySelector('.coming progress')?.value ?? 0) > 0", timeout=60_000)
    first = time.perf_counter() - begin
    page.wait_for_timeout(500)  # the second piece is under way
    begin = time.perf_counter()
    page.locator(".coming").get_by_role("button", name="Stop").click()
    page.wait_for_selector(".coming >> text=Stopped at")
    stopped = time.perf_counter() - begin
    page.get_by_label("Text", exact=True).fill(SENTENCE + " and")
    begin = time.perf_counter()
    page.get_by_role("button", name="Run").click()
    page.wait_for_selector(".picture[data-far]:not(:has(.coming))")
    free = time.perf_counter() - begin
    return {"first piece": 1000 * first, "stopped": 1000 * stopped, "another text then": 1000 * free}


def _of_frames(measured: list[dict[str, list[float]]]) -> dict[str, float]:
    times = sorted(ms for part in measured for ms in part["frames"])
    tasks = [ms for part in measured for ms in part["tasks"]]
    return {"median": statistics.median(times), "p95": times[int(0.95 * len(times))], "task": max(tasks, default=0.0)}


def bundle_kb() -> float:
    """Return the size of the page as the server sends it."""
    assets = read_assets().values()
    return sum(len(asset.body if asset.zipped is None else asset.zipped) for asset in assets) / 1000


def walk(page: Page, rounds: int) -> dict[str, dict[str, float]]:
    """Visit every view of the course, then again at other tokens and layers."""
    views = views_of(page)
    page.wait_for_timeout(LOOK_MS)
    first = {view: visit(page, view) for view in views}
    later: dict[str, list[float]] = {view: [] for view in views}
    for at in range(1, rounds + 1):
        page.evaluate(f"document.querySelectorAll('.strip [role=radio]')[{at}].click()")
        page.keyboard.press("Shift+ArrowUp")
        for view in views:
            later[view].append(visit(page, view))
    return {view: {"first": first[view], "later": statistics.median(later[view])} for view in views}


APPENDED = """
() => new Promise((done) => {
  const said = () => document.querySelectorAll(".answer mark").length;
  const begin = performance.now(), before = said();
  window.appending.click();
  const look = () => (said() > before ? done(performance.now() - begin) : requestAnimationFrame(look));
  requestAnimationFrame(look);
})
"""
"""JavaScript: appends a token, and gives the milliseconds until it stands in the answer."""


def growing(page: Page, rounds: int) -> dict[str, float]:
    """Append greedy tokens; return the milliseconds of one."""
    visit(page, "growth")
    page.evaluate(
        "window.appending = [...document.querySelectorAll('button')].find("
        "(one) => one.textContent === 'Append the most probable')"
    )
    times: list[float] = []
    for _ in range(rounds + 1):
        times.append(page.evaluate(APPENDED))
        until_settled(page)
    return {"a token more": statistics.median(times[1:])}


def long_tasks(page: Page, link: str) -> dict[str, float]:
    """Use a text of 256 tokens as a reader does; return what blocked the page's thread."""
    page.goto("about:blank")
    page.goto(f"{link}&stage=attention")
    until_settled(page)
    page.evaluate(
        "() => { window.tasks = []; new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map("
        "(one) => one.duration))).observe({ type: 'longtask' }); }"
    )
    for canvas in page.locator("article canvas").all()[:3]:  # a wheel over the picture leaves the stage
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        for step in range(30):
            page.mouse.move(box["x"] + box["width"] * step / 30, box["y"] + box["height"] * step / 30)
        page.mouse.wheel(0, 400)
    for _ in range(6):
        page.keyboard.press("Shift+ArrowUp")
        until_settled(page)
    tasks: list[float] = page.evaluate("window.tasks")
    return {"long tasks": float(len(tasks)), "longest": max(tasks, default=0.0)}


def heap(session: CDPSession) -> float:
    """Return MB of the tab's JavaScript heap, after a collection."""
    session.send("HeapProfiler.collectGarbage")
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return metrics["JSHeapUsedSize"] / 1e6


def with_text(link: str, text: str) -> str:
    """Return the link with another text, and without a stage."""
    return link.partition("&text=")[0] + f"&text={quote(text)}"


def measure(browser: Browser, link: str, rounds: int) -> dict[str, Any]:
    """Do everything that the module says."""
    picture_ms = [opening(browser, link, ".picture[data-far]") for _ in range(rounds)]
    opening_ms = [opening(browser, link) for _ in range(rounds)]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    page.goto(link)
    until_settled(page)
    results: dict[str, Any] = {"opening": {"first": opening_ms[0], "later": statistics.median(opening_ms)}}
    results["picture"] = {"first": picture_ms[0], "later": statistics.median(picture_ms)}
    results["frames"] = frames(browser, with_text(link, " ".join((WORDS * 3).split()[:32])) + "&stage=map", rounds)
    results["frames"]["story"] = story_frames(browser, link)
    results["2,000 tokens, picture"] = long_text(page, link)
    results["bundle kB"] = bundle_kb()
    results["views"] = walk(page, rounds)
    results["growing"] = growing(page, rounds)
    results["256 tokens"] = long_tasks(page, with_text(link, WORDS * 20))
    begin = time.perf_counter()
    page.goto("about:blank")
    page.goto(f"{with_text(link, WORDS * 170)}&stage=attention")
    page.wait_for_selector('article .body[aria-busy="false"] canvas', timeout=120_000)
    results["2,000 tokens, attention"] = 1000 * (time.perf_counter() - begin)
    results["heap MB"] = heap(session)
    return results


def main() -> None:
    """Measure and report."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", help="as for llamarium inspect (default: the built-in one)")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser (default: chromium)")
    options = parser.parse_args()
    model = ["--threads", str(options.threads), *(["-m", options.model] if options.model else [])]
    with inspecting(model) as link, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        results = measure(browser, link, options.rounds) | {"chromium": browser.version}
        browser.close()
    views = results["views"] | {"opening": results["opening"], "the picture": results["picture"]}
    rows: list[dict[str, Any]] = [{"view": name, **times} for name, times in views.items()]
    rows += [{"view": name, "later": value} for name, value in (results["growing"] | results["256 tokens"]).items()]
    for name, times in results["frames"].items():
        rows += [{"view": f"frames, {name}: {kind}", "later": value} for kind, value in times.items()]
    for name, value in results["2,000 tokens, picture"].items():
        rows.append({"view": f"2,000 tokens, picture: {name}", "later": value})
    rows += [{"view": name, "later": results[name]} for name in ("2,000 tokens, attention", "heap MB", "bundle kB")]
    name = "page" if options.model is None else f"page-{Path(options.model).stem}"
    common.report(name, options, rows, results)


if __name__ == "__main__":
    main()
