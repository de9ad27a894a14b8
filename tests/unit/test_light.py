"""tests/light.txt names the tests that run without PyTorch, all of them: here it is held to what they import.

It runs where there is no PyTorch, so that a module that is missing is one that the light half does without.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
LIGHT = set((TESTS / "light.txt").read_text().split())
FIXTURES = {"model_files", "llama", "running"}  # of conftest.py, with PyTorch
LATE = {  # what these call imports PyTorch, or the oracle that they ask
    "integration/test_api.py",
    "integration/test_page_site.py",  # with the compiler for browsers, of the dev extra
    "integration/test_python_o.py",
    "integration/test_python_reference.py",
    "integration/test_soak.py",
    "integration/test_training_functions.py",
    "unit/test_chat_templates.py",
    "unit/test_cli_options.py",
    "unit/test_compare_cpu.py",
    "unit/test_constraint.py",
    "unit/test_drawings.py",
    "unit/test_native_run.py",
    "unit/test_peer_table.py",
    "unit/test_page_schema.py",
    "unit/test_sampling_params.py",
    "unit/test_text_engine.py",
    "unit/test_trackers.py",
    "unit/test_speedrun.py",
    "unit/test_train_tokenizer.py",
    "unit/test_wasm.py",  # with the compiler for browsers, of the dev extra
    "unit/test_wasm_chat.py",  # likewise
}

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
    return name == "torch" or find_spec(name.partition(".")[0]) is None


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


def test_the_list_is_complete() -> None:
    paths = [path for path in TESTS.glob("*/test_*.py") if path.parent.name != "parity"]
    files = {path.relative_to(TESTS).as_posix(): path for path in paths}
    assert sorted(LIGHT - set(files)) == [], "no such file"
    assert sorted(LIGHT & LATE) == []
    may = {name for name, path in files.items() if can_be_imported(path) and not FIXTURES & fixtures(path)}
    assert sorted(may - LIGHT - LATE) == [], "they need no PyTorch: name them in tests/light.txt"
    assert sorted(LIGHT - may) == [], "they need PyTorch"
    assert sorted(LATE - may) == [], "that is plain from what they import"
