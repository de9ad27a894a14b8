"""The files of a learner's folder: the text of a step, an empty function, and the solution."""

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
    """Write a folder for a learner: the files that are missing; those that are there stay as they are.

    OutputError if the folder holds something else.
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
    """Return the file of a step: its text, and the function, empty."""
    function = _plain_source(step)
    docstring = function.body[0]
    function.body = [docstring, *ast.parse(f"raise NotImplementedError({EMPTY!r})").body]
    about = textwrap.fill(step.about, 110)
    about = f"Step {number_of(step)}: {step.title}.\n\n{about}\n\nThe course: {section_words(step.section)}."
    letters = _letters(step)
    return f'"""{about}\n"""\n\nimport numpy as np\n{letters}\n\n{_unparsed(function)}\n'


def definition(step: Step) -> str:
    """Return the function's head and what it takes and returns, in words."""
    function = _plain_source(step)
    function.body = function.body[:1]
    return _unparsed(function)


def is_empty(step: Step, path: Path) -> bool:
    """Return whether a step's file is missing, or its function ends as the template's does."""
    try:
        body = ast.parse(read_small(path)).body
    except OSError:
        return True
    except (SyntaxError, ValueError):  # which importing it will say better
        return False
    ends = [node.body[-1] for node in body if isinstance(node, ast.FunctionDef) and node.name == step.name]
    return bool(ends) and isinstance(ends[-1], ast.Raise) and "NotImplementedError" in ast.unparse(ends[-1])


def solution(step: Step) -> str:
    """Return the right function, as it could stand in the file."""
    function = _plain_source(step)
    function.body = function.body[1:]
    return f"import numpy as np\n\n\n{_unparsed(function)}\n"


def section_words(section: str) -> str:
    """Return where in the course something stands: a file of the documentation, and a heading in it."""
    chapter, _, heading = section.partition("#")
    return f'docs/learn/{chapter}.md, "{heading}"'


def _plain_source(step: Step) -> ast.FunctionDef:
    """Return the function without annotations, which only the library needs."""
    function = ast.parse(textwrap.dedent(inspect.getsource(step.right))).body[0]
    assert isinstance(function, ast.FunctionDef)
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
    return _Bare().visit(function)


class _Bare(ast.NodeTransformer):
    """Makes plain assignments of annotated ones."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:  # the name that ast calls
        assert node.value is not None
        return ast.Assign([node.target], node.value, lineno=node.lineno)


def _unparsed(function: ast.FunctionDef) -> str:
    return ast.unparse(ast.fix_missing_locations(function))


def _letters(step: Step) -> str:
    """Explain the letters of the shapes that a step uses, in a comment."""
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
