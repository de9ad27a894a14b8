"""Encoding texts of any length.

The packages that encode need 100 bytes and more a token while they work, so a whole book or a corpus goes through them
piece by piece. The ids are the same: a cut that would change one is not made.
"""

import re
from collections.abc import Iterator

from llamarium.tokenizer.base import Tokenizer

LINE_BEGINS = re.compile(r"\n(?=\S)")
"""Where a text may be cut: Llama 3's pre-tokenizer, as the other usual ones, cuts there too."""

_PIECE_CHARACTERS = 1 << 20
_CUT_CONTEXT = 1024  # characters on each side with which a cut is tried


def encode_pieces(tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Encode a text of any length, piece by piece: the ids, joined, are those of the whole text, without BOS.

    A long text is cut between lines. There the usual vocabularies let no token reach over the cut, nor any rule look
    far beyond it. That it is so is tried for each cut on the text around it, and one that would change an id is not
    made; where none can be, as in Llama 2's vocabulary, which puts a space before every text, the text is encoded
    whole.
    """
    start = 0
    while not tokenizer.strip_first_space and (cut := _next_cut(tokenizer, text, start + _PIECE_CHARACTERS)):
        yield tokenizer.encode(text[start:cut], add_special_tokens=False)
        start = cut
    yield tokenizer.encode(text[start:], add_special_tokens=False)


def line_parts(text: str, least: int | None = None) -> Iterator[str]:
    """Cut a long text between lines, into parts of a million characters and more, or of `least` and more."""
    start = 0
    while cut := LINE_BEGINS.search(text, start + (least or _PIECE_CHARACTERS)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def _next_cut(tokenizer: Tokenizer, text: str, least: int) -> int | None:
    """Return the first place from `least` on where cutting changes no id, or None."""

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    for match in LINE_BEGINS.finditer(text, least):
        cut = match.end()
        left, right = text[cut - _CUT_CONTEXT : cut], text[cut : cut + _CUT_CONTEXT]
        if encode(left + right) == encode(left) + encode(right):
            return cut
    return None
