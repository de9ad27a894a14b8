"""docs/learn/coverage.md: every place that it names is there, and every command is one."""

import importlib
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from llamarium.cli.main import _joined, command_parser  # pyright: ignore[reportPrivateUsage]
from llamarium.inspect.inspector import Inspector

ROOT = Path(__file__).parents[2]
COVERAGE = ROOT / "docs/learn/coverage.md"


class Row(NamedTuple):
    number: int
    subject: str
    where: str
    view: str
    shown_by: str
    state: str


TEXT = COVERAGE.read_text(encoding="utf-8")
ROWS = [
    Row(int(cells[0]), *cells[1:])
    for line in TEXT.splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")]) and cells[0].isdigit()
]


def slugs(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", one.lower()).strip()) for one in headings}


def views() -> set[str]:
    listed = (path.read_text(encoding="utf-8") for path in ROOT.glob("web/src/*/index.ts"))
    return set(re.findall(r'\bid: "([a-z-]+)"', "".join(listed)))


def test_the_count_is_the_rows() -> None:
    partly = [row for row in ROWS if row.state.startswith("partly: ")]
    assert [row.number for row in ROWS] == list(range(1, 70))
    assert len({row.subject for row in ROWS}) == 69 and {row.state for row in ROWS} - {"full"} == {
        row.state for row in partly
    }
    assert len(partly) <= 5 and f"69 rows: {69 - len(partly)} in full, {len(partly)} partly, none missing." in TEXT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}")
def test_a_subject_is_where_it_is_said_to_be(row: Row) -> None:
    ((_, link),) = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", row.where)
    file, _, anchor = link.partition("#")
    path = COVERAGE.parent / file
    assert path.is_file() and (not anchor or anchor in slugs(path)), link
    assert not row.view or row.view.removeprefix("`#stage=").removesuffix("`") in views(), row.view


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}")
def test_what_shows_it_can_be_called(row: Row) -> None:
    command = row.shown_by.strip("`")
    program, *words = shlex.split(command) if command.startswith(("llamarium ", "python ")) else [command]
    if program == "llamarium":
        name, *rest = _joined(words)
        assert command_parser(name).parse_known_args(rest)[1] == []
    elif program == "python":
        assert (ROOT / words[0]).is_file()
    elif command.startswith("llama.inspect."):
        assert callable(getattr(Inspector, command.removeprefix("llama.inspect.").partition("(")[0]))
    else:
        module, _, name = command.partition("(")[0].rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
