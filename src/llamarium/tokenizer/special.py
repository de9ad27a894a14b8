"""What counts as text, and the control tokens of a vocabulary."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from llamarium.errors import TokenizerError

Parts = Sequence[str | int]
"""Texts and ids of control tokens, in the order in which they are one string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What a vocabulary's files say about its control tokens.

    Attributes:
        ids: Spelling to id, of every control token.
        bos: The id before a text, or None.
        eos: The ids that end a text, the file's main one first.
        pad: The id that fills short rows, or None.
        add_bos: `encode` puts `bos` before a text.
    """

    ids: Mapping[str, int] = field(default_factory=dict[str, int])
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    add_bos: bool = False


def check_text(text: object) -> None:
    """Refuse what is no text, and a lone surrogate, half of a UTF-16 pair, which UTF-8 cannot hold: TokenizerError."""
    if not isinstance(text, str):
        raise TokenizerError(f"expected text (str), found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; it is no "
            'valid Unicode: read the source with its own encoding, or use errors="replace"'
        ) from None


def split_spellings(text: str, control: Mapping[str, int]) -> list[str]:
    """Split into text, control token, text, ...: control tokens, the longest first, stand at the odd places."""
    return _pattern(frozenset(control)).split(text) if control else [text]


def split_control(text: str, control: Mapping[str, int]) -> list[str | int]:
    """Split into texts and the ids of the control tokens that are spelled between them; no text is empty."""
    split = split_spellings(text, control)
    parts = [control[part] if place % 2 else part for place, part in enumerate(split)]
    return [part for part in parts if part != ""]


@lru_cache(8)
def _pattern(spellings: frozenset[str]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) + ")")
