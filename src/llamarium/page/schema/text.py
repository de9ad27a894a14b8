"""From a text to ids."""

from typing import Literal

from llamarium.page.schema.base import View
from llamarium.server.fields import Body


class TokensRequest(Body):
    """`POST /inspect/tokens`: from a text to ids, with every step."""

    text: str
    add_special_tokens: bool = True
    tokenizer: Literal["model", "llama3"] = "model"


class ByteString(View):
    """Some bytes, and their printable text: what is no character is escaped."""

    text: str
    bytes: tuple[int, ...]


class MergeView(View):
    """Two neighbours became one part; `start` is where, in bytes of the piece."""

    rank: int
    left: ByteString
    right: ByteString
    result: ByteString
    start: int


class PieceView(View):
    """A cut of the text; `start` is where it begins, in bytes of the text."""

    text: str
    start: int
    merges: tuple[MergeView, ...]
    ids: tuple[int, ...]


class TokenView(View):
    """A token: its id and what it stands for; `is_special` of a control token, which no text becomes."""

    id: int
    text: str
    bytes: tuple[int, ...]
    is_special: bool


class TokensView(View):
    """How a text became ids.

    Attributes:
        pieces: The cuts of the text, with their merges and ids; empty where `unexplained` gives the reason.
        tokens: As the model gets them, BOS included where it was requested.
        unexplained: Why the steps are not known, if they are not.
    """

    tokenizer: Literal["model", "llama3"]
    vocab_size: int
    text: str
    utf8: tuple[int, ...]
    pieces: tuple[PieceView, ...]
    tokens: tuple[TokenView, ...]
    unexplained: str | None
