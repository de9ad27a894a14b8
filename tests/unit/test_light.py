"""The mark `torch` is on files that cannot be imported without PyTorch, and on no others without a reason.

It runs where there is no PyTorch, so that a module that is missing is one that the other tests do without.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from conftest import marks_of_all

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
FIXTURES = {"model_files", "llama", "running"}  # of conftest.py, with PyTorch

pytestmark = pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is here")


def imported(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The modules that are imported with a module, by name; a name that is imported from one may be one too."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith("llamarium"))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imported(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from imported(node.body)


def of_ours(name: str) -> Path | None:
    """The file of a module of the package, or of the tests' own."""
    for path in (SOURCE / name.replace(".", "/"), TESTS / name):
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
    return None


def is_missing(name: str) -> bool:
    """Whether a module is not installed; those of Python itself that other systems have are not missing."""
    package = name.partition(".")[0]
    return name == "torch" or (package not in sys.stdlib_module_names and find_spec(package) is None)


@cache
def needed(path: Path) -> frozenset[str]:
    """The modules that importing a file imports."""
    return frozenset(imported(ast.parse(path.read_text()).body))


def can_be_imported(path: Path) -> bool:
    seen, left = {path}, [path]
    while left:
        for name in needed(left.pop()):
            parts = name.split(".")
            for i in range(len(parts)):
                file = of_ours(".".join(parts[: i + 1]))
                if file is None and i == 0 and is_missing(name):
                    return False
                if file is not None and file not in seen:
                    seen.add(file)
                    left.append(file)
    return True


def fixtures(path: Path) -> set[str]:
    """What the tests of a file ask for by name and the file does not define."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    asked = {argument.arg for function in functions for argument in function.args.args}
    return asked - {function.name for function in functions}


def test_files_are_marked_that_need_pytorch_and_others_say_why() -> None:
    """One that imports it within functions has the mark on those tests, or on all with the reason: `torch("...")`."""
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.glob("*/test_*.py")}
    need = {name for name, path in files.items() if not can_be_imported(path) or FIXTURES & fixtures(path)}
    marked = {name for name, path in files.items() if "torch" in marks_of_all(path.read_text())}
    plain = {
        name for name in marked if re.search(r"^pytestmark.*?mark\.torch\b(?!\()", files[name].read_text(), re.M | re.S)
    }
    assert sorted(need - marked) == [], "they need PyTorch: pytestmark = pytest.mark.torch"
    assert sorted(plain - need) == [], "they are imported without PyTorch: mark the tests that need it, or say why"
