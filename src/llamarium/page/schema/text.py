"""From a text to ids; words, and rows of the embedding table."""

from typing import Annotated, Literal

from pydantic import Field

from llamarium.page.schema.base import PageRequest, View


class TokensRequest(PageRequest):
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


MAX_SEED = 2**32 - 1

Ids = Annotated[str, Field(pattern=r"^[0-9]{1,9}(,[0-9]{1,9})*$", max_length=4096)]
"""Of tokens, separated by commas."""


class WordRequest(PageRequest):
    """`POST /inspect/word`: the token of an id, or the single one of a word: with a space before it first."""

    word: str | int


class NeighborsRequest(PageRequest):
    """`POST /inspect/neighbors`: the rows nearest to word - minus + plus; a word, or a token's id.

    With a `random_seed` the rows are those that initialisation draws from it, in place of the learned ones.
    """

    word: str | int
    minus: tuple[str | int, ...] = Field((), strict=False, max_length=32)
    plus: tuple[str | int, ...] = Field((), strict=False, max_length=32)
    k: int = Field(10, ge=1, le=100)
    random_seed: int | None = Field(None, ge=0, le=MAX_SEED)


class SimilarityRequest(PageRequest):
    """`POST /inspect/similarity`: the cosine of two rows; `random_seed` as for neighbors."""

    word: str | int
    other: str | int
    random_seed: int | None = Field(None, ge=0, le=MAX_SEED)
