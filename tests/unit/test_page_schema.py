"""The page's schema is one: pydantic's and TypeScript's; and the page costs a server no torch."""

import subprocess
import sys
from pathlib import Path

from llamarium.page.schema.everything import as_json
from llamarium.page.sources import SOURCES, source_of

WEB = Path(__file__).parents[2] / "web"


def test_the_pages_schema_is_the_servers() -> None:
    """`web/tests/schema.test.ts` holds schema.ts to this file."""
    written = (WEB / "src/schema.json").read_text(encoding="utf-8")
    assert written == as_json(), (
        "run: python -m llamarium.page.schema > web/src/schema.json; npm --prefix web run schema"
    )


def test_every_name_of_lines_has_lines() -> None:
    for name in SOURCES:
        found = source_of(name)
        assert found.text.startswith(("def ", "class ", "@"))
        assert found.file.startswith("llamarium/") and found.line > 1


def test_serving_the_page_imports_no_torch() -> None:
    program = "import sys, llamarium.page.extension; llamarium.page.extension.page(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
