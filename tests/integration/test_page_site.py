"""The page without a server: plain files, whose numbers are those of the portable kernels; no other host is asked."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from playwright.sync_api import Browser, Page, Route, expect

import page_bundle
from llamarium.page import bundle
from llamarium.page.site import folder as site_folder
from llamarium.runtime.taps import ACTIVATIONS
from wasm_engine import byte_level_vocabulary, write_model

ROOT = Path(__file__).parents[2]
TEXT = "To be, or n"
PLACE = "class/llama"
MOST_BYTES = 9_000_000
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LESSON = """title = "What comes next?"
[[parts]]
text = "This License applies"
question = "What does it expect?"
answer = "Nothing yet."
"""

pytestmark = [pytest.mark.torch("it compiles for browsers, with the dev extra"), pytest.mark.timeout(300)]

TAPPED = [name for name in ACTIVATIONS if name not in ("scores", "pattern", "logits")]
EXACT = [
    ("POST", "/inspect/passes", {"text": TEXT}),
    ("GET", "/inspect/passes/{id}/activations/logits?position=10", None),
    *(("GET", f"/inspect/passes/{{id}}/activations/{name}", None) for name in TAPPED),
    ("GET", "/inspect/rows?ids=53,1", None),
    ("GET", "/inspect/weights?key=model.layers.2.input_layernorm.weight", None),
    ("GET", "/inspect/passes/{id}/matrix?layer=3&linear=down_proj&start=7&count=3", None),
    ("POST", "/inspect/word", {"word": "o"}),
    ("POST", "/inspect/tokens", {"text": "To be\n", "add_special_tokens": False, "tokenizer": "model"}),
]
NEXT = ("GET", "/inspect/passes/{id}/next?position=10&k=65", None)
ASK = """async (questions) => {
    const answers = [];
    let id = "";
    for (const [method, path, body] of questions) {
        const init = { method, ...(body && { body: JSON.stringify(body) }) };
        const answer = await llamariumBackend(path.replace("{id}", id), init);
        const axes = answer.headers.get("x-axes");
        if (!answer.ok) throw new Error(path + ": " + (await answer.text()));
        if (axes) {
            const shape = answer.headers.get("x-shape").split(",").map(Number);
            answers.push({ axes, shape, values: Array.from(new Float32Array(await answer.arrayBuffer())) });
        } else {
            answers.push(await answer.json());
            if (path === "/inspect/passes") id = answers.at(-1).id;
        }
    }
    return answers;
}"""


class Quiet(SimpleHTTPRequestHandler):
    """`python -m http.server` without its log; with the headers of `own` for every file."""

    own: ClassVar[dict[str, str]] = {}

    def end_headers(self) -> None:
        """Send the further headers, too."""
        for name, value in self.own.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def built() -> Iterator[None]:
    """The page, the scripts and the kernels of these sources."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bundle, "DIST", page_bundle.built_page())
        patched.setattr(bundle.is_built, "__defaults__", (bundle.DIST,))
        patched.setattr(site_folder, "SCRIPTS", page_bundle.built_scripts())
        patched.setattr(site_folder, "KERNELS", page_bundle.built_kernels())
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, built: None) -> Path:
    """A site in a folder below the root of the server."""
    folder = tmp_path_factory.mktemp("host")
    site_folder.write_site(folder / PLACE)
    return folder / PLACE


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, built: None) -> Path:
    """A site with a lesson, and a model that has a form for dialogs."""
    folder = tmp_path_factory.mktemp("taught")
    vocabulary = byte_level_vocabulary((ROOT / "LICENSE").read_text(), 400)
    write_model(folder / "talker.gguf", ("Q8_0",), {**vocabulary, "tokenizer.chat_template": TEMPLATE}, 405)
    (folder / "lesson.toml").write_text(LESSON)
    site_folder.write_site(folder / PLACE, str(folder / "talker.gguf"), lesson=folder / "lesson.toml")
    return folder / PLACE


@contextmanager
def served(site: Path, handler: type[Quiet]) -> Iterator[str]:
    """Serve a site; the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=site.parents[1])) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{PLACE}/"
        server.shutdown()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, by Python's own server."""
    with served(site, Quiet) as address:
        yield address


class Isolating(Quiet):
    """With the headers by which workers may share memory."""

    own: ClassVar[dict[str, str]] = {
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Embedder-Policy": "require-corp",
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium."""
    with page_bundle.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def opened(address: str, browser: Browser) -> Iterator[Page]:
    """The site in a browser, which must not fail, and asks this server alone."""
    faults = list[str]()
    with browser.new_page() as page:
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith(address) else None)
        page.goto(address)
        page.wait_for_selector("main[data-ready]")
        yield page
    assert faults == []


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a local server answers by the portable kernels."""
    asked = tmp_path_factory.mktemp("asked") / "questions.json"
    asked.write_text(json.dumps([*EXACT, NEXT]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/portable_answers.py"), "shakespeare-char", str(asked)],
        env={**os.environ, "LLAMARIUM_KERNELS": "portable"}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_the_first_screen_speaks_of_characters_and_has_the_bars_of_the_model(opened: Page, portable: list[Any]) -> None:
    expect(opened.get_by_role("heading", level=2)).to_contain_text("next character")
    assert opened.get_by_label("Text", exact=True).input_value() == TEXT
    best = portable[-1]["candidates"]
    shares = [float(one.removesuffix(" %")) for one in opened.locator(".bars .share").all_inner_texts()]
    assert shares == [pytest.approx(100 * one["probability"], abs=0.051) for one in best[:5]]


def test_activations_and_weights_have_the_bits_of_the_portable_kernels(opened: Page, portable: list[Any]) -> None:
    for (_, path, _), answer, expected in zip(EXACT, opened.evaluate(ASK, EXACT), portable, strict=False):
        if path == "/inspect/passes":
            assert answer["tokens"] == expected["tokens"]
        else:
            assert answer == expected, path


def test_an_isolated_page_computes_with_several_threads_and_the_same_bits(
    site: Path, browser: Browser, portable: list[Any]
) -> None:
    with served(site, Isolating) as address, browser.new_page() as page:
        page.goto(f"{address}?threads=3")
        page.wait_for_selector("main[data-ready]")
        answers = page.evaluate(ASK, EXACT)
        (told,) = page.evaluate(ASK, [("GET", "/inspect/model", None)])
    assert "3 threads" in told["runner"]
    assert answers[0]["runner"] == told["runner"]
    assert answers[1:] == portable[1:-1]


def test_the_second_visit_has_threads_on_a_host_that_sends_no_headers(address: str, browser: Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{address}?threads=2")
        page.wait_for_selector("main[data-ready]")
        runner = [page.evaluate(ASK, [("GET", "/inspect/model", None)])[0]["runner"]]
        page.get_by_role("button", name="Reload to compute with 2 threads").click()
        page.wait_for_function("crossOriginIsolated")
        page.wait_for_selector("main[data-ready]")
        runner.append(page.evaluate(ASK, [("GET", "/inspect/model", None)])[0]["runner"])
        context.set_offline(True)
        page.reload()
        page.wait_for_selector("main[data-ready]")
        runner.append(page.evaluate(ASK, [("GET", "/inspect/model", None)])[0]["runner"])
    assert ["one thread" in one for one in runner] == [True, False, False]
    assert runner[1] == runner[2]


def test_a_site_with_a_lesson_opens_with_it_and_its_model_answers_in_a_dialog(taught: Path, browser: Browser) -> None:
    with served(taught, Quiet) as address, browser.new_page() as page:
        page.goto(address)
        expect(page.get_by_text("What does it expect?")).to_be_visible()
        page.get_by_role("link", name="Chat", exact=True).click()
        page.get_by_label("Your message").fill("Hello <|im_end|>")
        page.get_by_role("button", name="Send").click()
        answer = page.locator("li.assistant")
        expect(answer.locator(".told .soft")).to_contain_text("tokens ·", timeout=60_000)
        expect(answer.get_by_role("button", name="Answer anew")).to_be_visible()
        assert answer.get_by_role("alert").count() == 0
        told = page.evaluate(
            """async () => {
                const body = JSON.stringify({ messages: [{ role: "user", content: "a" }], max_tokens: 3, seed: 1 });
                const answer = await llamariumBackend("/v1/chat/completions", { method: "POST", body });
                const refused = await llamariumBackend("/v1/chat/completions", { method: "POST", body: "{}" });
                return [answer.status, await answer.text(), refused.status];
            }"""
        )
    assert (told[0], told[2]) == (200, 400)
    *chunks, last = told[1].split("\n\n")[:-1]
    assert last == "data: [DONE]"
    assert len(chunks) == 4
    assert json.loads(chunks[0].removeprefix("data: "))["prompt_token_ids"]


def test_a_text_is_continued_where_there_is_no_form_for_dialogs(opened: Page) -> None:
    opened.goto(f"{opened.url.partition('#')[0]}#stage=chat")
    opened.get_by_label("A text to continue").fill("To be")
    opened.get_by_role("button", name="Continue").click()
    answer = opened.locator("li.assistant")
    expect(answer.get_by_role("button", name="Answer anew")).to_be_visible(timeout=60_000)
    expect(answer.locator(".told .soft")).to_contain_text("251 tokens")  # the context is 256


def test_the_folder_is_small_and_its_index_says_what_may_run(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    listed = json.loads((site / "files.json").read_text())
    names = {path.relative_to(site).as_posix() for path in files} - {"files.json"}
    assert {*listed["files"], *listed["others"]} - {"./"} == names
    assert "script-src 'self' 'wasm-unsafe-eval'" in (site / "index.html").read_text().replace("&#x27;", "'")


def test_it_opens_without_a_network_after_the_first_visit(address: str, browser: Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(address)
        page.evaluate("navigator.serviceWorker.ready")
        page.wait_for_selector("main[data-ready]")
        context.set_offline(True)
        page.goto(f"{address}?model=letters")
        page.wait_for_selector("main[data-ready]")
        expect(page.locator(".site")).to_contain_text("letters, computed in this browser")


DROP = """async ([name, bytes]) => {
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(bytes)], name));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


BARS_OF_THE_DROPPED = """() => {
    window.shown = [];
    const note = () => {
        if (document.querySelector(".site [role=status]").textContent.startsWith("mine, computed"))
            window.shown.push([...document.querySelectorAll(".bars .share")].map((one) => one.textContent).join());
    };
    const everything = { childList: true, subtree: true, characterData: true, attributes: true };
    new MutationObserver(note).observe(document.body, everything);
}"""


def test_a_dropped_file_is_opened_and_a_damaged_one_leaves_the_model_that_is_open(
    address: str, site: Path, browser: Browser
) -> None:
    model = (site / "models/letters.gguf").read_bytes()
    with browser.new_page() as page:
        page.goto(address)
        page.wait_for_selector("main[data-ready]")
        told, bars = page.locator(".site [role=status]"), page.locator(".bars .share")
        page.get_by_label("Temperature", exact=True).fill("1.5")
        page.wait_for_selector("main[data-ready]")
        before = bars.all_inner_texts()
        page.evaluate(DROP, ["cut.gguf", list(model[:90_000])])
        expect(told).to_contain_text("the file is damaged or was cut short. shakespeare-char stays open.")
        assert bars.all_inner_texts() == before
        page.evaluate(BARS_OF_THE_DROPPED)
        page.evaluate(DROP, ["mine.gguf", list(model)])
        expect(told).to_have_text("mine, computed in this browser. Nothing is sent.")
        page.wait_for_selector("main[data-ready]")
        expect(bars).to_have_count(len(before))
        shown = page.evaluate("shown")
        assert ",".join(before) not in shown[shown.index("") :], "bars of the model before"
        assert shown[-1] == ",".join(bars.all_inner_texts())
        told_of = page.evaluate("async () => (await llamariumBackend('/inspect/model', {})).json()")
        assert told_of["shape"]["L"] == 2
        assert page.get_by_label("Text", exact=True).input_value() == TEXT


BUSY = "self.addEventListener('message', () => { for (;;); });"
CANCEL = """async () => {
    const begin = performance.now();
    document.querySelector(".site button").click();
    const told = document.querySelector(".site [role=status]").textContent;
    const { shape } = await (await llamariumBackend("/inspect/model", {})).json();
    return [told, shape.L, performance.now() - begin];
}"""


def test_an_opening_is_cancelled_at_once_whatever_is_computed(address: str, site: Path, browser: Browser) -> None:
    def computes_forever(route: Route) -> None:
        script = route.fetch()
        route.fulfill(response=script, body=script.text() + BUSY)

    with browser.new_context(service_workers="block") as context:
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("main[data-ready]")
        page.route("**/worker.js", computes_forever)
        page.set_input_files(".site input", site / "models/letters.gguf")
        expect(page.locator(".site [role=status]")).to_have_text("Opening letters: 0 %.")
        told, layers, ms = page.evaluate(CANCEL)
        assert told == "letters: opening was cancelled. shakespeare-char stays open."
        assert layers == 6
        assert ms < 200
        page.unroute("**/worker.js")
        page.set_input_files(".site input", site / "models/letters.gguf")
        expect(page.locator(".site")).to_contain_text("letters, computed in this browser")


def test_what_is_computed_is_told_above_the_footer_of_a_narrow_page(address: str, browser: Browser) -> None:
    with browser.new_page(viewport={"width": 360, "height": 740}) as page:
        page.goto(f"{address}?threads=2")
        page.wait_for_selector("main[data-ready]")
        expect(page.get_by_role("button", name="Reload to compute")).to_be_visible()
        page.evaluate("() => { globalThis.llamariumBackend = () => new Promise(() => {}); }")
        page.get_by_label("Text", exact=True).fill("To be")
        told = page.get_by_text("Computing:")
        expect(told).to_be_visible()
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        bottom = "(one) => one.closest('p').getBoundingClientRect().bottom"
        top = page.locator(".site").evaluate("(one) => one.getBoundingClientRect().top")
        assert told.evaluate(bottom) <= top


SLOW_TIMERS = "{ const s = setTimeout; self.setTimeout = (f, ms = 0, ...all) => s(f, Math.max(1000, ms), ...all); }"
HIDE = """() => {
    for (const [name, value] of [["hidden", true], ["visibilityState", "hidden"]])
        Object.defineProperty(document, name, { configurable: true, get: () => value });
    const { setTimeout: later, setInterval: again } = window;
    window.setTimeout = (work, ms = 0, ...all) => later(work, Math.max(1000, ms), ...all);
    window.setInterval = (work, ms = 0, ...all) => again(work, Math.max(1000, ms), ...all);
    window.requestAnimationFrame = () => 0;
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_a_tab_that_is_not_seen_goes_on_computing_and_opening(address: str, site: Path, browser: Browser) -> None:
    """With timers of a second at least and no frames, as browsers have them there."""

    def throttled(route: Route) -> None:
        script = route.fetch()
        route.fulfill(response=script, body=SLOW_TIMERS + script.text())

    with browser.new_context(service_workers="block") as context:
        page = context.new_page()
        page.route("**/worker.js", throttled)
        page.goto(address)
        page.wait_for_selector("main[data-ready]")
        page.get_by_label("Text", exact=True).fill("To be, or not to be, that is the question. " * 5)
        page.evaluate(HIDE)
        expect(page.locator("main[data-ready]")).to_have_count(1)
        page.get_by_label("Text", exact=True).fill("To be, or n")
        page.set_input_files(".site input", site / "models/letters.gguf")
        expect(page.locator(".site [role=status]")).to_contain_text("letters, computed in this browser")
        expect(page.locator("main[data-ready]")).to_have_count(1)
        expect(page.get_by_role("alert")).to_have_count(0)
        asked = page.evaluate(
            """async () => {
                const begin = performance.now();
                for (let i = 0; i < 5; i++) await (await llamariumBackend("/inspect/model", {})).json();
                return performance.now() - begin;
            }"""
        )
        assert asked < 1000


def test_a_site_whose_model_is_missing_says_so_and_opens_it_later_or_another(
    address: str, site: Path, browser: Browser
) -> None:
    with browser.new_page() as page:
        page.route("**/models/shakespeare-char.gguf", lambda route: route.fulfill(status=404))
        page.goto(address)
        expect(page.get_by_role("alert")).to_contain_text("the server answers 404")
        page.unroute("**/models/shakespeare-char.gguf")
        page.get_by_role("button", name="Try again").click()
        page.wait_for_selector("main[data-ready]")
        expect(page.locator(".site [role=status]")).to_contain_text("shakespeare-char, computed in this browser")
    with browser.new_page() as page:
        page.route("**/models/shakespeare-char.gguf", lambda route: route.fulfill(status=404))
        page.goto(address)
        expect(page.get_by_role("alert")).to_contain_text("the server answers 404")
        page.set_input_files(".site input", site / "models/letters.gguf")
        page.wait_for_selector("main[data-ready]")
        expect(page.get_by_role("alert")).to_have_count(0)


def test_a_browser_without_simd_or_storage_is_told_or_goes_on(address: str, browser: Browser) -> None:
    def without_simd(route: Route) -> None:
        script = route.fetch()
        body = f"WebAssembly.validate = () => false;{script.text()}"
        route.fulfill(response=script, body=body)

    with browser.new_page() as page:
        page.route("**/worker.js", without_simd)
        page.goto(address)
        expect(page.get_by_role("alert")).to_contain_text("no WebAssembly with SIMD")
    with browser.new_page() as page:
        page.add_init_script(
            "for (const name of ['sessionStorage', 'localStorage'])"
            " Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError'); } });"
            "navigator.serviceWorker.register = async () => { throw new Error('denied'); };"
        )
        page.goto(address)
        page.wait_for_selector("main[data-ready]")


class Elsewhere(Quiet):
    """Another host, which lets other sites' pages read its files, in ranges whose size it does not tell them."""

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        asked = self.headers["Range"]
        first, last = map(int, (asked or f"bytes=0-{len(data)}").removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


def test_a_file_of_another_host_is_opened_where_the_site_allows_it(address: str, site: Path, browser: Browser) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Elsewhere, directory=site / "models")) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        other = f"http://127.0.0.1:{host.server_port}"
        site_folder.write_site(site.with_name("open"), origins=[other])
        with browser.new_page() as page:
            asked = list[str]()
            page.on("request", lambda request: asked.append(request.url))
            for place, name in ((address, "shakespeare-char"), (address.replace(PLACE, "class/open"), "letters")):
                page.goto(f"{place}?model={other}/letters.gguf")
                page.wait_for_selector("main[data-ready]")
                expect(page.locator(".site")).to_contain_text(f"{name}, computed in this browser")
                assert any(url.startswith(other) for url in asked) == (name == "letters")
        host.shutdown()


def test_a_view_that_needs_more_names_the_command(opened: Page) -> None:
    opened.goto(f"{opened.url.partition('#')[0]}#stage=moment")
    told = opened.evaluate("async () => (await (await llamariumBackend('/inspect/build', {})).json()).error")
    assert told["code"] == "not_offered"
    assert "llamarium inspect -m shakespeare-char" in told["message"]
