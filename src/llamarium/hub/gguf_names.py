"""Names of split GGUF files: `name-00001-of-00003.gguf` is the first of three parts of one model.

Source: llama.cpp, `llama_split_path` and `llama_split_prefix`.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

_PART = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]{5})-of-(?P<total>[0-9]{5})\.gguf", re.DOTALL | re.ASCII)


class PartName(NamedTuple):
    """A part's name, taken apart.

    Attributes:
        prefix: What all parts begin with, folders included.
        number: From 1 to `total`.
    """

    prefix: str
    number: int
    total: int

    def of(self, number: int) -> str:
        """Return the name of the part with this number."""
        return f"{self.prefix}-{number:05d}-of-{self.total:05d}.gguf"

    @property
    def first(self) -> str:
        """The name of the first part, which stands for the whole model."""
        return self.of(1)


def part_name(name: str) -> PartName | None:
    """Take the name of a part of a split GGUF file apart; None for any other name."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    part = PartName(match["prefix"], int(match["number"]), int(match["total"]))
    return part if 1 <= part.number <= part.total else None


def gguf_models(names: Iterable[str]) -> list[str]:
    """Return the GGUF models among file names, sorted: files that are not parts, and the first part of each split."""
    models: dict[str, str] = {}
    for name in sorted(name for name in names if name.endswith(".gguf")):
        part = part_name(name)
        models.setdefault(name if part is None else part.first, name)
    return list(models.values())
