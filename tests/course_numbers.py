"""Numbers in the prose of the course's chapters, and those that the code beside them prints."""

# ruff: noqa: RUF001  (the chapters write minus signs)

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COURSE = Path(__file__).parents[1] / "docs/learn"
CHAPTERS = sorted(COURSE.glob("[0-9]-*.md"))

_CODE = re.compile(r"^```\w*\n.*?^```$", re.M | re.S)
_NUMBER = re.compile(r"(?<![\w.,₁₂])[−-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
# What is no statement: comments and solutions' titles, code spans, targets of links, names of models, years.
_SILENT = re.compile(
    r"<!--.*?-->|</?(?:details|summary)>|Solution \d|^\*\*\d\.\*\*|`[^`\n]+`|\]\([^)]*\)|"
    r"\bLlama 3(?:\.\d)?(?: \d+B)?|\bGPT-2\b|\b(?:19|20)\d\d\b|\b\d of \[|layer-\d",
    re.M,
)


class Stated(NamedTuple):
    """A number as a sentence of a section has it."""

    section: str
    sentence: str
    number: str


def sections(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each section's heading and text; the opening has the chapter's title."""
    text = path.read_text(encoding="utf-8").removeprefix("# ")
    for part in re.split(r"^## ", text, flags=re.M):
        heading, _, body = part.partition("\n")
        yield heading, body


def value(number: str) -> float:
    """Return what a number stands for."""
    return float(number.replace("−", "-").replace(",", ""))


def is_backed(number: str, shown: list[float]) -> bool:
    """Whether one of the numbers that are shown is this one, rounded as the sentence rounds it."""
    digits = len(number.partition(".")[2])
    return any(abs(round(abs(one), digits) - abs(value(number))) < 1e-9 for one in shown)


def stated_without_code(path: Path) -> list[Stated]:
    """Return the numbers of a chapter's sentences that no code, output or drawing of their section has."""
    found, by_hand = list[Stated](), list[float]()
    for heading, body in sections(path):
        shown = [value(one) for block in _CODE.findall(body) for one in _NUMBER.findall(block.replace("−", "-"))]
        by_hand = shown if heading.endswith("by hand") else by_hand
        shown += by_hand if heading == "Exercises" else []  # which go on with that example
        prose = " ".join(_SILENT.sub(" ", _CODE.sub("\n\n", body)).split())
        for sentence in re.split(r"(?<=[.?!:]) (?=[A-Z0-9(\"*])", prose):
            numbers = [one for one in _NUMBER.findall(sentence) if one not in ("0", "1")]  # which state too little
            found += [Stated(heading, sentence, one) for one in numbers if not is_backed(one, shown)]
    return found
