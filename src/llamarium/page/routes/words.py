"""Words as tokens, and their rows of the table: which are near, what arithmetic on them finds, and they themselves.

With a seed, the rows are those that initialisation draws from it, before any training.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import numpy as np
from fastapi import APIRouter, Query, Request, Response

from llamarium.config import EMBEDDING, ModelConfig
from llamarium.extras import optional
from llamarium.inspect import neighbors as geometry
from llamarium.inspect.neighbors import Neighbors, Similarity
from llamarium.inspect.tokens import tokens_of_word
from llamarium.page.binary import Numbers, respond
from llamarium.page.routes.tokens import token_view
from llamarium.page.schema import words as schema
from llamarium.page.schema.text import TokenView
from llamarium.page.work import work_on
from llamarium.server.errors import ApiError
from llamarium.server.http.body import StrictRoute

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.neighbors import Ids, Table
    from llamarium.inspect.numbers import Floats

router = APIRouter(prefix="/inspect", route_class=StrictRoute)


@router.post("/neighbors")
async def neighbors(request: Request, body: schema.NeighborsRequest) -> Neighbors:
    """Rank the rows of the table by their cosine with word - minus + plus."""

    def read(llama: "Llama", _: object) -> Neighbors:
        table = _table(llama, body.random_seed)
        return geometry.neighbors(table, llama.tokenizer, body.word, minus=body.minus, plus=body.plus, k=body.k)

    return await work_on(request, "word", read)


@router.post("/similarity")
async def similarity(request: Request, body: schema.SimilarityRequest) -> Similarity:
    """Return the cosine of the angle between two rows."""

    def read(llama: "Llama", _: object) -> Similarity:
        return geometry.similarity(_table(llama, body.random_seed), llama.tokenizer, body.word, body.other)

    return await work_on(request, "word", read)


@router.post("/word")
async def word(request: Request, body: schema.WordRequest) -> TokenView:
    """Return the token of an id, or the single one that stands for a word."""

    def read(llama: "Llama", _: object) -> TokenView:
        return token_view(llama.tokenizer, tokens_of_word(llama.tokenizer, body.word)[0])

    return await work_on(request, "word", read)


@router.get("/rows", response_class=Response)
async def rows(request: Request, query: Annotated[schema.RowsQuery, Query()]) -> Response:
    """Send rows of the table, in the order of their ids; axes R D."""
    ids = [int(part) for part in query.ids.split(",")]

    def read(llama: "Llama", _: object) -> Response:
        if max(ids) >= llama.config.vocab_size:
            message = f"an id is {max(ids)}; expected 0 to {llama.config.vocab_size - 1}"
            raise ApiError(400, message, code="invalid_parameter", param="ids")
        return respond(Numbers(_rows(_table(llama, query.random_seed), ids), "RD"), "float32")

    return await work_on(request, "ids", read)


def _table(llama: "Llama", random_seed: int | None) -> "Table":
    """Return the learned table, or one as initialisation draws it."""
    return llama.runner if random_seed is None else _fresh(llama.config, random_seed)


@functools.lru_cache(maxsize=2)
def _fresh(config: ModelConfig, seed: int) -> "Callable[[Ids], Floats]":
    optional("torch", "torch", "a table of random rows")
    from llamarium.model.init import FreshEmbedding

    table = FreshEmbedding(config, seed)
    return table.rows


def _rows(table: "Table", ids: list[int]) -> "Floats":
    return table(np.array(ids)) if callable(table) else table.dequantize(EMBEDDING, ids)
