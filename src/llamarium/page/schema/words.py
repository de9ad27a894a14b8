"""Rows of the embedding table."""

from pydantic import Field

from llamarium.page.schema.base import Query
from llamarium.server.fields import Body

MAX_SEED = 2**32 - 1


class WordRequest(Body):
    """`POST /inspect/word`: the token of an id, or the single one of a word: with a space before it first."""

    word: str | int


class NeighborsRequest(Body):
    """`POST /inspect/neighbors`: the rows nearest to word - minus + plus; a word, or a token's id.

    Attributes:
        random_seed: Among the rows that initialisation draws from this seed, in place of the learned ones.
    """

    word: str | int
    minus: tuple[str | int, ...] = Field((), strict=False, max_length=32)
    plus: tuple[str | int, ...] = Field((), strict=False, max_length=32)
    k: int = Field(10, ge=1, le=100)
    random_seed: int | None = Field(None, ge=0, le=MAX_SEED)


class SimilarityRequest(Body):
    """`POST /inspect/similarity`: the cosine of two rows; `random_seed` as for neighbors."""

    word: str | int
    other: str | int
    random_seed: int | None = Field(None, ge=0, le=MAX_SEED)


class RowsQuery(Query):
    """`GET /inspect/rows`: rows of the embedding table, by ids that commas separate; `random_seed` as for neighbors."""

    ids: str = Field(pattern=r"^[0-9]{1,9}(,[0-9]{1,9})*$", max_length=4096)
    random_seed: int | None = Field(None, ge=0, le=MAX_SEED)
