"""Bounds on the length of functions and files, and no import cycles.

Each is a look at the source with `ast`, so an import counts wherever it stands: within a function, or for types alone.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

FUNCTION_LINES, FILE_LINES = 50, 400
REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src"


@cache
def sources() -> dict[Path, str]:
    """Every file of Python but the tests, and what benchmarks install and check out (bench/generated)."""
    paths = (path for folder in ("src", "bench", "examples") for path in (REPOSITORY / folder).rglob("*.py"))
    own = (path for path in paths if REPOSITORY / "bench/generated" not in path.parents)
    return {path: path.read_text(encoding="utf-8") for path in sorted((*own, *REPOSITORY.glob("hatch_*.py")))}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


def short(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def functions() -> Iterator[tuple[str, int]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{short(path)}, {node.name}", node.end_lineno - node.lineno + 1


def modules() -> dict[str, Path]:
    """The package's modules by name; a folder is the module of its `__init__.py`."""
    parts = {path: path.relative_to(SOURCE).with_suffix("").parts for path in sources() if SOURCE in path.parents}
    return {".".join(part[:-1] if part[-1] == "__init__" else part): path for path, part in parts.items()}


def imports(tree: ast.Module, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names if node.module in known)


def test_no_function_is_long() -> None:
    assert [f"{name}: {lines} lines" for name, lines in functions() if lines > FUNCTION_LINES] == []


def test_no_file_is_long() -> None:
    lengths = {path: len(text.splitlines()) for path, text in sources().items()}
    assert [f"{short(path)}: {lines} lines" for path, lines in lengths.items() if lines > FILE_LINES] == []


def test_no_import_goes_in_a_circle() -> None:
    known = modules()
    graph = {name: set(imports(trees()[path], known)) for name, path in known.items()}
    assert "llamarium.tokenizer.chat.choose" in graph["llamarium.tokenizer.base"]  # within a function
    assert "llamarium.tokenizer.chat.format" in graph["llamarium.tokenizer.base"]  # for its type
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' -> '.join(reversed(error.args[1]))}") from None


def test_the_runner_is_a_seam() -> None:
    """Which runner answers is known where one is chosen, and nowhere else."""
    may = SOURCE / "llamarium/runtime", SOURCE / "llamarium/checkpoints"
    named = [short(path) for path, text in sources().items() if "NativeRunner" in text or "ModuleRunner" in text]
    outside = [
        name
        for name in named
        if name.startswith("src/") and not any(folder in (REPOSITORY / name).parents for folder in may)
    ]
    assert named and outside == []
