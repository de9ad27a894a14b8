"""The address of the page that shows a learner's folder, so that a check can link to the course's chapter on it.

`llamarium inspect --build` writes its address to the folder while it runs. As a folder may come from elsewhere, only
local addresses are accepted, and only while the process that wrote them runs.
"""

import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamarium.io import read_small, write_json

PAGE = "page.json"

_LOCAL = re.compile(r"http://(127\.0\.0\.1|localhost|\[::1\]):\d{1,5}")


@contextmanager
def shown_at(folder: Path, url: str) -> Generator[None]:
    """Store the page's address in a folder while the body runs; if the folder cannot be written, nothing is stored."""
    path = folder / PAGE
    try:
        with suppress(OSError):
            write_json(path, {"url": url, "pid": os.getpid()})
        yield
    finally:
        if _read(path).get("pid") == os.getpid():
            path.unlink(missing_ok=True)


def link_to_section(folder: Path, section: str) -> str | None:
    """Return the link to a section of the course on the page that shows a folder, or None if no page does."""
    noted = _read(folder / PAGE)
    url, pid = noted.get("url"), noted.get("pid")
    if not isinstance(url, str) or not _LOCAL.fullmatch(url) or not isinstance(pid, int) or not _is_running(pid):
        return None
    chapter, _, heading = section.partition("#")
    return f"{url}/#stage={chapter.partition('-')[2]}&section={anchor(heading)}"


def anchor(heading: str) -> str:
    """Return the anchor of a heading, the same as on GitHub and on the page (`web/plugins/markdown.ts`)."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def _read(path: Path) -> dict[str, object]:
    try:
        noted = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return noted if isinstance(noted, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0
