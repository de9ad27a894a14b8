"""How much the page is, packed as the server sends it: all of it, and what a browser loads for the first view."""

import re
from pathlib import Path

from llamarium.page.assets import Asset, read_assets
from page_bundle import built_page

MOST = 450_000
FIRST = 104_000
"""The shell with the picture, the frame of the stages and the map, with room for a tenth more."""


def sent(asset: Asset) -> int:
    return len(asset.body if asset.zipped is None else asset.zipped)


def needed(folder: Path, name: str) -> set[str]:
    """The files of `assets/` that a script or the index needs at once: static imports, and styles of the index."""
    text = (folder / name).read_text()
    by_index = re.findall(r'(?:src|href)="[./]*(assets/[^"]+\.(?:js|css))"', text)
    by_script = [f"assets/{one}" for one in re.findall(r'(?:from|import)\s*"\./([^"]+\.js)"', text)]
    return set(by_index + by_script)


def closure(folder: Path, names: set[str]) -> set[str]:
    found, left = set[str](), set(names)
    while left:
        name = left.pop()
        found.add(name)
        if name.endswith((".js", ".html")):
            left |= needed(folder, name) - found
    return found


def test_the_page_is_small_and_its_first_view_loads_no_other() -> None:
    folder = built_page()
    assets = read_assets(folder)
    views = {path.name.partition("-")[0]: f"assets/{path.name}" for path in (folder / "assets").glob("[A-Z]*.js")}
    first = closure(folder, {"index.html", views["Map"]})
    styles = {f"assets/{path.name}" for path in (folder / "assets").glob("*.css")}
    scripts = {name for name in first if name.endswith(".js")}
    total = sum(map(sent, assets.values()))
    loaded = sum(sent(assets["/" if name == "index.html" else f"/{name}"]) for name in first)
    assert {views["Stage"], views["Term"], views["Map"]} <= scripts
    assert scripts.isdisjoint({views["Chat"], views["Rope"], views["Patching"], views["Chapter"], views["Plot"]})
    assert not any("katex" in name for name in first)
    assert styles and total <= MOST, total
    assert loaded <= FIRST, loaded
