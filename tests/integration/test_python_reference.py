"""docs/reference/python.md is what the docstrings say; `test_docs.py` runs its examples."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import llamarium

pytestmark = pytest.mark.torch("it imports all that is public")

ROOT = Path(__file__).parents[2]
PUBLIC = [getattr(llamarium, name) for name in llamarium.__all__]  # imported before another test replaces `load`


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_reference", ROOT / "tools/python_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_docstrings_say(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), "run python tools/python_reference.py"


def test_every_public_name_has_an_example(tool: ModuleType) -> None:
    names = [name for section in tool.SECTIONS.values() for name in section]
    assert len(names) == len(set(names))
    methods = {f"Llama.{name}" for name in vars_of(llamarium.Llama)}
    assert {*llamarium.__all__, *methods} <= set(names)
    assert [name for name in names if ">>> " not in tool.documented(name)[1]] == []


def vars_of(owner: type) -> set[str]:
    """The public methods and properties of a class, inherited ones too."""
    members = inspect.getmembers_static(owner)
    return {name for name, value in members if name[0] != "_" and (isinstance(value, property) or callable(value))}
