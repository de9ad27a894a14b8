"""Read lesson files, TOML written by a teacher. Errors have the path and the line. Torch-free.

A lesson has a `title`, `large` for a projector, and a `[[parts]]` table per question: `text`, `question`, `answer`, and
`cards` and `answer_cards`, which list cards of the page's story.
"""

import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, cast

from llamarium.errors import InputError, escape, show_value
from llamarium.page.schema.lesson import ClassLesson, ClassLessonPart

MAX_BYTES = 2**16
"""Maximum size of a lesson file."""

CARDS = (
    "pieces", "rows", "stream", "looking", "position", "scores", "shares", "values", "mlp", "layers", "guess", "again",
)  # fmt: skip
"""Ids of the story's cards, as in `web/src/story/cards.ts`."""

_MAX_DOTS = 100
_KEYS = ("title", "large", "parts")
_PART_KEYS = ("text", "question", "answer", "cards", "answer_cards")


def read_lesson(path: Path) -> ClassLesson:
    """Read a lesson; unknown keys are ignored with a warning.

    Raises:
        InputError: If the file cannot be read, is not TOML, or lacks required keys; `path:line: message`.
    """
    text = _text_of(path)
    _check_keys(path, text)
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _of_syntax(path, text, error) from None
    return _Lesson(path, text).view(values)


def _text_of(path: Path) -> str:
    shown = escape(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror}; expected a lesson file (TOML)") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{shown}: has more than {MAX_BYTES:,} bytes; a lesson file is shorter")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(
            f"{shown}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def _check_keys(path: Path, text: str) -> None:
    """Raise InputError for keys with very many dots, for which `tomllib` takes minutes."""
    for number, line in enumerate(text.split("\n"), 1):
        key = line if line.lstrip().startswith("[") else line.partition("=")[0] if "=" in line else ""
        if key.count(".") > _MAX_DOTS:
            raise InputError(f"{escape(path)}:{number}: a key has more than {_MAX_DOTS} parts")


def _of_syntax(path: Path, text: str, error: Exception) -> InputError:
    """Return the error for a file that is not TOML, with its line."""
    if isinstance(error, RecursionError):
        return InputError(f"{escape(path)}: is nested too deeply; expected a title and [[parts]]")
    place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
    line = place[1] if place and place[1] else text.rstrip("\n").count("\n") + 1
    problem = str(error)[: place.start()] if place else str(error)
    return InputError(f"{escape(path)}:{line}: not TOML: {escape(problem)}")


@dataclass(frozen=True, slots=True)
class _Lesson:
    """A lesson file, for error messages with line numbers."""

    path: Path
    text: str

    def view(self, values: Mapping[str, object]) -> ClassLesson:
        self._name_unknown(values, _KEYS, None)
        parts = values.get("parts")
        if not isinstance(parts, list) or not parts:
            self._refuse("parts", None, "a lesson needs at least one [[parts]] table with a text and a question")
        large = values.get("large", False)
        if not isinstance(large, bool):
            self._refuse("large", None, f"large is {show_value(large)}; expected true or false")
        return ClassLesson(
            title=self._string(values, "title", None) or "",
            large=large,
            parts=tuple(self._parts(cast("list[object]", parts))),
        )

    def _parts(self, parts: list[object]) -> Iterator[ClassLessonPart]:
        """Yield the parts; a part without a text uses the previous text."""
        text: str | None = None
        for index, part in enumerate(parts):
            if not isinstance(part, dict):
                self._refuse("parts", None, f"parts[{index}] is {show_value(part)}; expected a [[parts]] table")
            values = cast("dict[str, object]", part)
            self._name_unknown(values, _PART_KEYS, index)
            text = self._string(values, "text", index) or text
            if text is None:
                self._refuse("", index, 'the first part has no text; add one: text = "The capital of France is"')
            question = self._string(values, "question", index)
            if question is None:
                self._refuse("", index, 'this part has no question; add one: question = "..."')
            yield ClassLessonPart(
                text=text,
                question=question,
                answer=self._string(values, "answer", index),
                cards=self._cards(values, "cards", index),
                answer_cards=self._cards(values, "answer_cards", index),
            )

    def _string(self, values: Mapping[str, object], key: str, index: int | None) -> str | None:
        value = values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            self._refuse(key, index, f"{key} is {show_value(value)}; expected a text in quotes")
        return value

    def _cards(self, values: Mapping[str, object], key: str, index: int) -> tuple[str, ...]:
        names = values.get(key, [])
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list):
            self._refuse(key, index, f"{key} is {show_value(names)}; expected a list of {', '.join(CARDS)}")
        for name in cast("list[object]", names):
            if name not in CARDS:
                self._refuse(key, index, f"{key} has {show_value(name)}; expected some of {', '.join(CARDS)}")
        return tuple(dict.fromkeys(cast("list[str]", names)))

    def _name_unknown(self, values: Mapping[str, object], names: tuple[str, ...], index: int | None) -> None:
        for key in values:
            if key not in names:
                similar = get_close_matches(key, names, 1)
                hint = f"; did you mean {similar[0]}?" if similar else f"; a lesson has {', '.join(names)} here"
                message = f"{self._where(key, index)}: {escape(key, 40)} is no key of a lesson and has no effect{hint}"
                warnings.warn(message, stacklevel=2)

    def _refuse(self, key: str, index: int | None, problem: str) -> NoReturn:
        raise InputError(f"{self._where(key, index)}: {problem}")

    def _where(self, key: str, index: int | None) -> str:
        line = self._line(key, index)
        return escape(self.path) if line is None else f"{escape(self.path)}:{line}"

    def _line(self, key: str, index: int | None) -> int | None:
        """Return the line of a key of the file, or of a part (of its header if the key is ""); None if there is none.

        A line within a multi-line string may look like the key; then the lines above it are not valid TOML.
        """
        lines = self.text.split("\n")
        header = re.compile(r"\s*\[\[\s*[\"']?parts[\"']?\s*\]\]")
        sought = re.compile(rf"\s*(?:\[\[?\s*)?[\"']?{re.escape(key)}[\"']?\s*[=.\]]") if key else header
        above = index if index is None or not key else index + 1  # part headers above the line
        headers = 0
        for number, line in enumerate(lines):
            if sought.match(line) and (above is None or headers == above) and _is_whole(lines[:number]):
                return number + 1
            headers += header.match(line) is not None and _is_whole(lines[:number])
        return None


def _is_whole(lines: list[str]) -> bool:
    try:
        tomllib.loads("\n".join(lines))
    except ValueError:
        return False
    return True
