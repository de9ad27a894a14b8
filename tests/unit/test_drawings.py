"""The drawings of docs/architecture.md are held to the layers, the imports and the names of the source."""

import importlib
import importlib.util
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "drawings"


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", FOLDER / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_script_draws(draw: ModuleType) -> None:
    kept = {file.name: file.read_text() for file in FOLDER.glob("*.svg")}
    stale = sorted(name for name in kept.keys() | draw.pictures().keys() if kept.get(name) != draw.pictures().get(name))
    assert stale == [], "python docs/drawings/draw.py"


def test_every_package_is_drawn_once(draw: ModuleType) -> None:
    drawn = [room for rooms in draw.COLUMNS.values() for room in rooms]
    in_layers = [room for row in draw.layers() for room in row]
    source = ROOT / "src" / "llamarium"
    folders = {path.name for path in source.iterdir() if (path / "__init__.py").exists() and path.name != "models"}
    assert sorted(drawn) == sorted(in_layers)
    assert folders <= set(drawn)


def test_every_arrow_is_an_import_and_goes_down(draw: ModuleType) -> None:
    row_of = {room: row for row, rooms in enumerate(draw.layers()) for room in rooms}
    assert [pair for pair in draw.arrows() if not draw.does_import(*pair) or row_of[pair[0]] >= row_of[pair[1]]] == []


@pytest.mark.torch
def test_every_step_names_what_there_is(draw: ModuleType) -> None:
    for life in draw.LIVES.values():
        _, lanes, steps = draw.parse(life)
        assert {lane for step in steps for lane in (step.source, step.target)} == set(lanes)
        for code in (step.code for step in steps if step.code):
            module, _, name = code.partition(":")
            reduce(getattr, name.split("."), importlib.import_module(f"llamarium.{module}"))
