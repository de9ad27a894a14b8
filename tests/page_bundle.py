"""The built page and a browser for the tests of it; each is asked for, and says why it is not there."""

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
WEB = ROOT / "web"
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def built_page() -> Path:
    """The folder of the page, built from these sources if it has not been yet."""
    return _page_hook().kept_bundle()


def built_scripts() -> Path:
    """The folder of what the page has besides where there is no server."""
    return _page_hook().kept_scripts()


def built_kernels() -> Path:
    """The kernels for browsers, compiled if they have not been yet."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("there is no ziglang here, which compiles the kernels for browsers")
    hook = _hook("hatch_build")
    hook.build_wasm()
    return hook.WASM


def _page_hook() -> ModuleType:
    hook = _hook("hatch_page")
    if hook.requirements():
        pytest.skip("there is no Node.js here that builds the page")
    return hook


def _hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def installed_web() -> Path:
    """web/ with its modules, installed if they have not been since they changed."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    lock, installed = WEB / "package-lock.json", WEB / "node_modules/.package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=WEB, check=True)
    return WEB


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; Debian's shell of it, which has no windows, takes a third of the time for a page."""
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium here")
    args = ["--no-sandbox", "--renderer-process-limit=1"]  # it is root's, in CI; pages of one site share a process
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=args)
        try:
            yield browser
        finally:
            browser.close()
