"""`make docs`: the documents as a site whose links all lead somewhere, and which fetches nothing from other hosts."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\"\s>]+)")


def test_the_site_has_all_documents_and_no_dead_links(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr

    pages = {page.parent.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("index.html")}
    documents = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert documents | {".", "contributing", "kernels"} <= pages

    for page in tmp_path.rglob("index.html"):
        assert not FETCHED.findall(page.read_text()), page


def test_links_out_of_the_documents_are_names_and_code_stays() -> None:
    hooks = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))
    code = "`a[0](b)`.\n```python\na[0](b)\n```\n"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/serving.md"))
    relinked = hooks["on_page_markdown"](
        f"[the cards](../../src/x.md), [a page](../reference/server.md#errors), {code}", page=page
    )
    assert relinked == f"the cards (`src/x.md`), [a page](../reference/server.md#errors), {code}"
