"""A course: its steps, texts and model; and the numbers and file names of steps."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from llamarium.course.arguments import SENTENCES
from llamarium.course.step import Step
from llamarium.course.steps import STEPS
from llamarium.errors import InputError, OutputError, UnknownNameError, escape
from llamarium.hub.folders import COURSE
from llamarium.io import read_small, write_json

MODEL = "smollm2-135m"
FORMAT = 1

_NUMBERS = {step.name: number for number, step in enumerate(STEPS, 1)}


@dataclass(frozen=True, slots=True)
class Course:
    """A course.

    Attributes:
        steps: Names of the steps, in the order of the course.
        texts: Texts from which checks choose sentences.
        model: Name of the model inside which functions run.
    """

    steps: tuple[str, ...] = tuple(_NUMBERS)
    texts: tuple[str, ...] = SENTENCES
    model: str = MODEL

    @classmethod
    def read(cls, path: Path) -> "Course":
        """Read a course from a file; InputError if it is not a course."""
        try:
            raw = json.loads(read_small(path))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{escape(path)}: no course: {escape(error)}; `llamarium build pack` makes one") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:  # pyright: ignore[reportUnknownMemberType]
            raise InputError(f"{escape(path)}: no course of format {FORMAT}; `llamarium build pack` makes one")
        return cls.of(raw.get("steps"), raw.get("texts"), raw.get("model"), str(path))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    @classmethod
    def of(cls, steps: object, texts: object, model: object = MODEL, source: str = "the course") -> "Course":
        """Return a course from untrusted values.

        Args:
            steps: Names or numbers of the steps.
            texts: Texts for the checks.
            model: Name of the model.
            source: Where the values come from, for errors.

        Raises:
            InputError: If a value has the wrong type or a text is too short.
            UnknownNameError: If a step does not exist.
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
        """Write the course to a file; OutputError if it exists, unless `force` is set."""
        if path.exists() and not force:
            raise OutputError(f"{escape(path)} exists; use --force to replace it, or choose another name")
        write_json(path, {"format": FORMAT, **asdict(self)})


def step_named(name: str) -> Step:
    """Return the step with a name or number; UnknownNameError if it does not exist."""
    for step in STEPS:
        if name in (step.name, str(_NUMBERS[step.name])):
            return step
    expected = f"expected 1 to {len(STEPS)} or a name: {', '.join(_NUMBERS)}"
    raise UnknownNameError(f"step {escape(name)} does not exist; {expected}", param="step")


def number_of(step: Step) -> int:
    """Return a step's number, from 1."""
    return _NUMBERS[step.name]


def file_of(step: Step) -> str:
    """Return a step's file name."""
    return f"step{_NUMBERS[step.name]:02}_{step.name}.py"


def course_of(folder: Path) -> Course:
    """Return the course of a learner's folder; InputError if it is not a learner's folder."""
    if not (folder / COURSE).is_file():
        raise InputError(f"{escape(folder)} is no folder of `llamarium build`; name another, or write one with it")
    return Course.read(folder / COURSE)
