"""What counts as text, and the control tokens of a vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llamarium.errors import TokenizerError


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
