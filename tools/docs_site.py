"""Hooks of mkdocs: pages from outside `docs/`, the list of decisions, and links that lead out of the documents."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "native/README.md": "kernels.md"}
CODE = r"^```.*?^```|`[^`\n]+`"  # where brackets are no links
LINK = re.compile(rf"{CODE}|(?P<is_image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the decisions to the navigation."""
    decisions = sorted(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/decisions/*.md"))
    assert config.nav is not None
    config.nav.append({"Decisions": decisions})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere in the repository."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Make links relative to the site; what lies outside the documents is named, not linked."""
    uri = page.file.src_uri
    source = next((path for path, own in PAGES.items() if own == uri), f"docs/{uri}")

    def relinked(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        target, _, anchor = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]

        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = PAGES.get(path) or path.removeprefix("docs/")
        is_document = path in PAGES or (path.startswith("docs/") and (ROOT / path).is_file())
        if not is_document:
            return match["text"] if match["text"] == f"`{path}`" else f"{match['text']} (`{path}`)"

        relative = posixpath.relpath(on_site, posixpath.dirname(uri) or ".")
        return f"{match['is_image']}[{match['text']}]({relative}{'#' if anchor else ''}{anchor})"

    return LINK.sub(relinked, markdown)
