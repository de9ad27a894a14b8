"""How much the page is, packed as the server sends it: all of it, and what a browser loads for the first screen."""

import re
from pathlib import Path

from llamarium.page.assets import Asset, read_assets
from page_bundle import built_page

MOST = 450_000
FIRST = 60_000
"""The first screen: the shell, the text and its bars, with room for a quarter more."""


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


def test_the_page_is_small_and_its_first_screen_loads_no_other_view() -> None:
    folder = built_page()
    assets = read_assets(folder)
    views = {path.stem[:-9]: f"assets/{path.name}" for path in (folder / "assets").glob("*.js")}
    styles = {f"assets/{path.name}" for path in (folder / "assets").glob("First-*.css")}
    first = closure(folder, {"index.html", views["First"]}) | styles
    total = sum(map(sent, assets.values()))
    loaded = sum(sent(assets["/" if name == "index.html" else f"/{name}"]) for name in first)
    print(f"first screen {loaded:,} bytes, whole page {total:,} bytes")
    assert first.isdisjoint({views[name] for name in ("Rooms", "Story", "Picture", "stages", "chat", "Chapter")})
    assert not any("katex" in name for name in first)
    assert styles and total <= MOST, total
    assert loaded <= FIRST, loaded
