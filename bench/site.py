"""The page without a server in headless Chromium: how soon it is there, and tokens per second on one thread.

    python bench/site.py screens [--model FILE]
    python bench/site.py speed --model FILE [--peer FOLDER]

`screens` writes a site with `shakespeare-char` (with --model, that file too, which opens first), serves it from this
machine, and opens it in a browser that keeps nothing: seconds from the link to the first bars and to the map, by the
page's own clock, whole downloads included.

`speed` runs the engine in a worker of a page, and with --peer @wllama/wllama in turn with it in the same page, on the
same file: FOLDER is what `npm pack @wllama/wllama` unpacks to. A round reads a prompt of so many times " the" and
answers behind it with temperature 0.8 and top-p 0.9; wllama's times are those that it reports itself.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

import common
from llamarium.page.site.folder import KERNELS, write_site

WEB = common.ROOT / "web"
SCREENS = {"bars": ("", ".bars:not(.old) .share"), "map": ("#stage=map", ".picture[data-far]")}
"""Where a link leads, and what is there then."""

WATCH = """
(selector) => {
  new MutationObserver((_, observer) => {
    if (!document.querySelector(selector)) return;
    observer.disconnect();
    const note = () => (document.documentElement.dataset.shownAt = performance.now());
    requestAnimationFrame(() => requestAnimationFrame(note));
  }).observe(document, { childList: true, subtree: true, attributes: true });
}
"""
"""Note when a frame with a selector was painted. Playwright looks for one at intervals of up to half a second."""

OPEN_ENGINE = """
async ([context]) => {
  const worker = new Worker("./engine.mjs", { type: "module" });
  window.engine = (question) => new Promise((take, fail) => {
    worker.onmessage = ({ data }) => ("error" in data ? fail(new Error(data.error)) : take(data));
    worker.postMessage(question);
  });
  const at = (name) => new URL(name, location.href).href;
  return (await window.engine({ file: at("model.gguf"), kernels: at("kernels.wasm"), context })).seconds;
}
"""

ENGINE_ROUND = "([prompt, answer]) => window.engine({ prompt, answer })"

OPEN_PEER = """
async ([context]) => {
  const { Wllama, LoggerWithoutDebug } = await import("./wllama/index.js");
  const begin = performance.now();
  window.wllama = new Wllama(
    { default: new URL("./wllama/wasm/wllama.wasm", location.href).href },
    { logger: LoggerWithoutDebug, suppressNativeLog: true },
  );
  const file = await (await fetch("./model.gguf")).blob();
  await window.wllama.loadModel([file], { n_ctx: context, n_threads: 1, n_gpu_layers: 0, n_parallel: 1 });
  if (window.wllama.getNumThreads() !== 1) throw new Error("wllama has several threads");
  return (performance.now() - begin) / 1000;
}
"""

PEER_ROUND = """
async ([prompt, answer]) => {
  const { timings } = await window.wllama.createCompletion({
    prompt, max_tokens: answer, temperature: 0.8, top_p: 0.9, seed: 7, cache_prompt: false, ignore_eos: true,
  });
  return { prompt: timings.prompt_per_second, answer: timings.predicted_per_second };
}
"""


class _Quiet(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Generator[str]:
    """Serve a folder's files; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def seconds_until(browser: Browser, address: str, selector: str) -> float:
    """Return the seconds from a link to the frame that shows a selector, in a browser that has kept nothing."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.add_init_script(f"({WATCH})({json.dumps(selector)})")
        page.goto(address, wait_until="commit")
        shown_at = page.locator("html[data-shown-at]").get_attribute("data-shown-at")
        assert shown_at is not None
        return float(shown_at) / 1000


def screens(browser: Browser, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure how soon each screen is there."""
    site = write_site(folder / "site", options.model)
    seconds_of: dict[str, list[float]] = {name: [] for name in SCREENS}
    with served(folder) as address:
        for _ in range(options.rounds + 1):
            for name, (fragment, selector) in SCREENS.items():
                seconds_of[name].append(seconds_until(browser, f"{address}site/{fragment}", selector))
    medians = {f"{name} s": statistics.median(times[1:]) for name, times in seconds_of.items()}
    return {"seconds": medians, "model": site.models[0].name, "site bytes": site.num_bytes}


def speed(browser: Browser, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens per second."""
    source, bundled = WEB / "tests/engine/browser.ts", folder / "engine.mjs"
    bundle = ["node_modules/.bin/rolldown", source, "--file", bundled, "--format", "esm", "--platform", "browser"]
    subprocess.run(list(map(str, bundle)), cwd=WEB, check=True, stdout=subprocess.DEVNULL)
    shutil.copyfile(KERNELS, folder / "kernels.wasm")
    (folder / "model.gguf").symlink_to(Path(options.model).resolve())
    (folder / "index.html").write_text("<!doctype html><title>speed</title>")
    open_arguments, round_arguments = [options.prompt + options.answer + 1], [" the" * options.prompt, options.answer]
    with served(folder) as address:
        page = browser.new_page()
        page.goto(address)
        page.set_default_timeout(0)
        results: dict[str, Any] = {"opening s": {"llamarium": page.evaluate(OPEN_ENGINE, open_arguments)}}
        sides = {"llamarium": lambda: page.evaluate(ENGINE_ROUND, round_arguments)}
        if options.peer:
            (folder / "wllama").symlink_to((options.peer / "esm").resolve())
            results["opening s"]["wllama"] = page.evaluate(OPEN_PEER, open_arguments)
            results["wllama"] = json.loads((options.peer / "package.json").read_text())["version"]
            sides["wllama"] = lambda: page.evaluate(PEER_ROUND, round_arguments)
        results["tokens/s"] = common.alternate(options.rounds, sides)
    return results


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("screens", "speed"))
    parser.add_argument("--model", help="a .gguf file")
    parser.add_argument("--peer", type=Path, help="the unpacked package of @wllama/wllama")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default 128)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of the answer (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--chromium", default=shutil.which("chromium-headless-shell") or shutil.which("chromium"))
    parser.add_argument("--save", action="store_true", help="write the JSON line to bench/results/ too")
    options = parser.parse_args()
    if options.part == "speed" and options.model is None:
        parser.error("speed needs --model")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        measure = screens if options.part == "screens" else speed
        results = measure(browser, Path(folder), options) | {"chromium": browser.version}
        browser.close()
    tables: dict[str, dict[str, Any]] = results.get("tokens/s") or {results["model"]: results["seconds"]}
    model = f"-{Path(options.model).stem}" if options.model else ""
    common.report(f"site-{options.part}{model}", options, [{"": name, **row} for name, row in tables.items()], results)


if __name__ == "__main__":
    main()
