"""A learner's folder: one file for each step, the course, and what was reached."""

import ast
import hashlib
import inspect
import json
import textwrap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamarium.build.arguments import SENTENCES
from llamarium.build.check import Result
from llamarium.build.learner import EMPTY
from llamarium.build.step import Step
from llamarium.build.steps import STEPS
from llamarium.errors import InputError, OutputError, UnknownNameError, escape
from llamarium.hub.own_folders import COURSE, note
from llamarium.io import atomic_file, write_json

PROGRESS = "progress.json"
MODEL = "smollm2-135m"
FORMAT = 1

_NUMBERS = {step.name: number for number, step in enumerate(STEPS, 1)}


@dataclass(frozen=True, slots=True)
class Course:
    """What is to be learned.

    Attributes:
        steps: Names of the steps, in the order of a pass.
        texts: What checks choose sentences from.
        model: The model inside which functions run.
    """

    steps: tuple[str, ...] = tuple(_NUMBERS)
    texts: tuple[str, ...] = SENTENCES
    model: str = MODEL

    @classmethod
    def read(cls, path: Path) -> "Course":
        """Read a course.

        Raises:
            InputError: If it is not one.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{escape(path)}: no course: {escape(error)}; `llamarium build pack` makes one") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
            raise InputError(f"{escape(path)}: no course of format {FORMAT}; `llamarium build pack` makes one")
        return cls.of(raw.get("steps"), raw.get("texts"), raw.get("model"), str(path))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    @classmethod
    def of(cls, steps: object, texts: object, model: object = MODEL, source: str = "the course") -> "Course":
        """Return a course of these steps and texts, checked.

        Raises:
            InputError: If a step is unknown, or a text too short.
        """
        for name, value in (("steps", steps), ("texts", texts)):
            if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, str) for item in value):  # pyright: ignore[reportUnknownVariableType]
                raise InputError(f"{escape(source)}: {name} is {escape(value)}; expected a list of texts, at least one")
        assert isinstance(steps, (list, tuple))
        assert isinstance(texts, (list, tuple))
        for text in texts:  # pyright: ignore[reportUnknownVariableType]
            if len(text.split()) < 4:  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
                raise InputError(
                    f"{escape(source)}: the text {escape(text)!r} is too short; expected four words or more"
                )
        if not isinstance(model, str):
            raise InputError(f"{escape(source)}: model is {escape(model)}; expected a name")
        chosen = {step_named(name).name for name in steps}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return cls(tuple(name for name in _NUMBERS if name in chosen), tuple(texts), model)  # pyright: ignore[reportUnknownArgumentType]

    def write(self, path: Path, *, force: bool = False) -> None:
        """Write the course; OutputError if there is something and `force` is not given."""
        if path.exists() and not force:
            raise OutputError(f"{escape(path)} exists; give --force, or another name")
        write_json(path, {"format": FORMAT, **asdict(self)})


def step_named(name: str) -> Step:
    """Return a step by its name or its number.

    Raises:
        UnknownNameError: If there is none.
    """
    for step in STEPS:
        if name in (step.name, str(_NUMBERS[step.name])):
            return step
    raise UnknownNameError(f"no step {escape(name)}; there are: {', '.join(_NUMBERS)}", param="step")


def number_of(step: Step) -> int:
    """Return a step's number, from 1."""
    return _NUMBERS[step.name]


def file_of(step: Step) -> str:
    """Return the name of a step's file."""
    return f"step{_NUMBERS[step.name]:02}_{step.name}.py"


def start(folder: Path, course: Course | None = None) -> list[Path]:
    """Write a folder for a learner: the files that are missing; those that are there stay as they are.

    Raises:
        OutputError: If the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{escape(folder)} is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / COURSE).is_file():
        raise OutputError(f"{escape(folder)} holds other files; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if course is None:
        course = Course.read(folder / COURSE) if (folder / COURSE).is_file() else Course()
    if not (folder / COURSE).is_file():
        course.write(folder / COURSE)
        note(folder)
    elif Course.read(folder / COURSE) != course:
        raise OutputError(f"{escape(folder)} belongs to another course; name a new folder")
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
        body = ast.parse(path.read_text(encoding="utf-8")).body
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
    """Return where in the course something stands, as a reader finds it."""
    chapter, _, heading = section.partition("#")
    number, _, rest = chapter.partition("-")
    return f'chapter {number}, {rest.replace("-", " ")}: "{heading}"'


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


# --- what was reached -------------------------------------------------------------------------------------------------

_keeping = threading.Lock()
"""Held while what was reached is read and written; another process finds the file complete, and may be forgotten."""


def progress(folder: Path) -> dict[str, dict[str, Any]]:
    """Return by step what was reached: `passed` (the file as it is now was right), `tries`, `hints`."""
    kept = _read_progress(folder)
    for name, entry in kept.items():
        entry["passed"] = entry.get("right") is not None and entry["right"] == _digest(
            folder / file_of(step_named(name))
        )
    return kept


def keep(folder: Path, results: Sequence[Result] = (), hints: Mapping[str, int] | None = None) -> None:
    """Keep what checks found, and how many hints were read."""
    with _keeping:
        kept = _read_progress(folder)
        for result in results:
            entry = kept.setdefault(result.step, {})
            entry["tries"] = entry.get("tries", 0) + 1
            if result.passed:
                entry["right"] = _digest(folder / file_of(step_named(result.step)))
        for name, depth in (hints or {}).items():
            entry = kept.setdefault(name, {})
            entry["hints"] = max(depth, entry.get("hints", 0))
        write_json(folder / PROGRESS, kept)


def _read_progress(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the progress file's content; what is damaged counts as nothing reached."""
    try:
        raw = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return (
        {name: entry for name, entry in raw.items() if name in _NUMBERS and isinstance(entry, dict)}
        if isinstance(raw, dict)
        else {}
    )  # pyright: ignore[reportUnknownVariableType]


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
