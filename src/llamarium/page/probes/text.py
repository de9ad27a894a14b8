"""From a text to ids, with every step; words as tokens, and their rows of the table.

With a seed, the rows are those that initialisation draws from it, before any training.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from llamarium.config import EMBEDDING, ModelConfig
from llamarium.errors import QuestionError, TokenizerError, UnknownNameError, UnsupportedTokenizerError
from llamarium.extras import optional
from llamarium.inspect import neighbors as geometry
from llamarium.inspect.neighbors import Neighbors, Similarity
from llamarium.inspect.tokens import tokens_of_word
from llamarium.page.binary import Numbers
from llamarium.page.open_pass import OpenModel
from llamarium.page.schema import text as schema
from llamarium.page.schema.text import MAX_SEED, TokensRequest, TokensView, TokenView
from llamarium.server.lifecycle.service import Service
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.neighbors import Ids, Table
    from llamarium.inspect.numbers import Floats


def tokens(context: OpenModel, body: TokensRequest) -> TokensView:
    """Return a text's bytes, the pieces it is cut into, their merges in order, and the ids."""
    service: Service = context.state.service
    tokenizer = context.llama.tokenizer if body.tokenizer == "model" else llama3_tokenizer()
    tokenizer.check_length(body.text, service.max_tokens)
    return _steps(tokenizer, body)


def token_view(tokenizer: Tokenizer, token_id: int) -> TokenView:
    """Describe one token; also of an id that the vocabulary has a hole for."""
    special = tokenizer.special_tokens.values()
    try:
        data = tokenizer.token_bytes(token_id)
    except TokenizerError:
        return TokenView(id=token_id, text=f"<{token_id}>", bytes=(), is_special=False)
    text = tokenizer.token_text(token_id)
    return TokenView(id=token_id, text=text, bytes=tuple(data), is_special=token_id in special)


def _steps(tokenizer: Tokenizer, body: TokensRequest) -> TokensView:
    ids = tokenizer.encode(body.text, add_special_tokens=body.add_special_tokens)
    pieces, unexplained = list[Any](), None
    try:
        pieces = tokenizer.explain(body.text).to_dict()["pieces"]
    except UnsupportedTokenizerError as error:
        unexplained = str(error).removeprefix(f"{tokenizer.source}: ")
    return TokensView.model_validate(
        {
            "tokenizer": body.tokenizer,
            "vocab_size": tokenizer.vocab_size,
            "text": body.text,
            "utf8": list(body.text.encode()),
            "pieces": pieces,
            "tokens": [token_view(tokenizer, token_id) for token_id in ids],
            "unexplained": unexplained,
        }
    )


@functools.cache
def llama3_tokenizer() -> Tokenizer:
    """Return the built-in tokenizer of Llama 3, which is not fetched now: opening a page contacts no other host."""
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.hub.builtin import is_cached

    if not is_cached("llama3"):
        message = "Llama 3's tokenizer is not on this machine; `llamarium download llama3` fetches it"
        raise UnknownNameError(message, code="tokenizer_not_here", param="tokenizer")
    return load_tokenizer("llama3")


def neighbors(context: OpenModel, body: schema.NeighborsRequest) -> Neighbors:
    """Rank the rows of the table by their cosine with word - minus + plus."""
    table = _table(context.llama, body.random_seed)
    return geometry.neighbors(table, context.llama.tokenizer, body.word, minus=body.minus, plus=body.plus, k=body.k)


def similarity(context: OpenModel, body: schema.SimilarityRequest) -> Similarity:
    """Return the cosine of the angle between two rows."""
    return geometry.similarity(_table(context.llama, body.random_seed), context.llama.tokenizer, body.word, body.other)


def word(context: OpenModel, body: schema.WordRequest) -> TokenView:
    """Return the token of an id, or the single one that stands for a word."""
    return token_view(context.llama.tokenizer, tokens_of_word(context.llama.tokenizer, body.word)[0])


def rows(
    context: OpenModel, ids: schema.Ids, random_seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
) -> Numbers:
    """Send rows of the table, in the order of their ids, or those that initialisation draws; axes R D."""
    token_ids = [int(part) for part in ids.split(",")]
    vocab_size = context.llama.config.vocab_size
    if max(token_ids) >= vocab_size:
        message = f"an id is {max(token_ids)}; expected 0 to {vocab_size - 1}"
        raise QuestionError(message, code="invalid_parameter", param="ids")
    table = _table(context.llama, random_seed)
    return Numbers(table(np.array(token_ids)) if callable(table) else table.dequantize(EMBEDDING, token_ids), "RD")


def _table(llama: "Llama", random_seed: int | None) -> "Table":
    return llama.runner if random_seed is None else _fresh(llama.config, random_seed)


@functools.lru_cache(maxsize=2)
def _fresh(config: ModelConfig, seed: int) -> "Callable[[Ids], Floats]":
    optional("torch", "torch", "a table of random rows")
    from llamarium.model.init import FreshEmbedding

    table = FreshEmbedding(config, seed)
    return table.rows
