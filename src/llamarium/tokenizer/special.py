"""The control tokens of a vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
