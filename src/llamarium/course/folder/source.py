"""Writes the files of a learner's folder, and returns solutions."""

import ast
import inspect
import textwrap
from pathlib import Path

from llamarium.course.learner import EMPTY
from llamarium.course.outline import Course, file_of, number_of, step_named
from llamarium.course.step import Step
from llamarium.errors import OutputError, escape
from llamarium.hub.folders import COURSE, trust
from llamarium.io import atomic_file, read_small


def start(folder: Path, course: Course | None = None) -> list[Path]:
    """Create a learner's folder, or add missing files to it; existing files are unchanged.

    Args:
        folder: The folder.
        course: The course; None is the folder's own or the default one.

    Returns:
        The paths of the files of steps that were written.

    Raises:
        OutputError: If the folder is a file, contains other files, or belongs to another course.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{escape(folder)} is a file; choose a directory")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / COURSE).is_file():
        raise OutputError(f"{escape(folder)} contains other files; choose a new directory")
    folder.mkdir(parents=True, exist_ok=True)
    if course is None:
        course = Course.read(folder / COURSE) if (folder / COURSE).is_file() else Course()
    if not (folder / COURSE).is_file():
        course.write(folder / COURSE)
        trust(folder)
    elif Course.read(folder / COURSE) != course:
        raise OutputError(f"{escape(folder)} belongs to another course; choose a new directory")
    written = [folder / file_of(step) for step in map(step_named, course.steps)]
    missing = [path for path in written if not path.exists()]
    for path in missing:
        with atomic_file(path) as file:
            file.write(template(step_named(path.stem.partition("_")[2])).encode())
    return missing


def template(step: Step) -> str:
    """Return the initial content of a step's file: its text, and a function without body."""
    function = _plain_source(step)
    docstring = function.body[0]
    function.body = [docstring, *ast.parse(f"raise NotImplementedError({EMPTY!r})").body]
    about = textwrap.fill(step.about, 110)
    about = f"Step {number_of(step)}: {step.title}.\n\n{about}\n\nThe course: {section_words(step.section)}."
    letters = _letters(step)
    return f'"""{about}\n"""\n\nimport numpy as np\n{letters}\n\n{_unparsed(function)}\n'


def definition(step: Step) -> str:
    """Return the function's signature and docstring."""
    function = _plain_source(step)
    function.body = function.body[:1]
    return _unparsed(function)


def is_empty(step: Step, path: Path) -> bool:
    """Whether a step's file is missing, or its function still ends with NotImplementedError."""
    try:
        body = ast.parse(read_small(path)).body
    except OSError:
        return True
    except (SyntaxError, ValueError):  # importing the file reports it better
        return False
    ends = [node.body[-1] for node in body if isinstance(node, ast.FunctionDef) and node.name == step.name]
    return bool(ends) and isinstance(ends[-1], ast.Raise) and "NotImplementedError" in ast.unparse(ends[-1])


def solution(step: Step) -> str:
    """Return the right function as source code for the step's file."""
    function = _plain_source(step)
    function.body = function.body[1:]
    return f"import numpy as np\n\n\n{_unparsed(function)}\n"


def section_words(section: str) -> str:
    """Return a section of the course as a file of the documentation and a heading in it."""
    chapter, _, heading = section.partition("#")
    return f'docs/learn/{chapter}.md, "{heading}"'


def _plain_source(step: Step) -> ast.FunctionDef:
    """Return the right function without annotations, which learners do not need."""
    function = ast.parse(textwrap.dedent(inspect.getsource(step.right))).body[0]
    assert isinstance(function, ast.FunctionDef)
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return _Bare().visit(function)


class _Bare(ast.NodeTransformer):
    """Replaces annotated assignments by plain ones."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:  # ast requires this name
        assert node.value is not None
        return ast.Assign([node.target], node.value, lineno=node.lineno)


def _unparsed(function: ast.FunctionDef) -> str:
    return ast.unparse(ast.fix_missing_locations(function))


def _letters(step: Step) -> str:
    """Return a comment that explains the axis letters in a step's shapes, or ""."""
    meanings = {
        "T": "tokens", "D": "numbers of a row", "N": "query heads", "K": "heads of keys and values",
        "H": "numbers of a head", "S": "tokens up to now", "F": "numbers inside the MLP",
        "V": "tokens of the vocabulary", "R": "the rank", "I": "numbers that go in", "O": "numbers that come out",
        "W": "weights of a block",
    }  # fmt: skip
    text = (step.right.__doc__ or "") + " ".join(step.outputs)
    words = [word.strip("().,;*:") for word in text.split()]
    used = [letter for letter in meanings if any(letter in word for word in words if set(word) <= set(meanings))]
    return "\n# " + ", ".join(f"{letter}: {meanings[letter]}" for letter in used) + "\n" if used else ""
