"""The geometry of the embedding table: cosine similarity between rows, and arithmetic on rows.

An embedding row is the model's representation of a token without context. Words with similar use have rows with similar
directions, which the cosine measures. "king - man + woman" is arithmetic on three rows, and its result is the row with
the nearest direction. gensim and word2vec normalize rows before they add them; here the rows are added unscaled
(`docs/decisions/0019-what-the-shell-says.md`).

Source: Mikolov et al. 2013, "Linguistic Regularities in Continuous Space Word Representations".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from llamarium.config import EMBEDDING
from llamarium.errors import InputError, show_value
from llamarium.inspect.numbers import Floats, JsonView, largest, lengths, split
from llamarium.inspect.tokens import check_count, tokens_of_word
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.base import Tokenizer

Word = str | int
"""A word, or a token id."""

Ids = NDArray[np.int64]

Table = Runner | Callable[[Ids], Floats]
"""A model with an embedding table, or a function that returns rows by their ids: (C,) to (C, D)."""

CHUNK_ROWS = 512  # rows in float32 at a time; they fit into a processor's cache

_ROUNDING = 0.025  # bound on the error of a cosine: 32^0.5 / 254 for inputs of 8 bits in groups of 32

_kept_lengths: WeakKeyDictionary[Runner, Floats] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class QueryWord:
    """A word of the query with its token; `text` is the token's text, such as " king" within a sentence."""

    sign: Literal["+", "-"]
    word: str
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Neighbor:
    """A token whose row is near the query, with the cosine between both."""

    token_id: int
    text: str
    cosine: float


@dataclass(frozen=True, slots=True)
class Neighbors(JsonView):
    """Result of `neighbors`: the query's words and tokens, and the nearest tokens, nearest first."""

    query: tuple[QueryWord, ...]
    neighbors: tuple[Neighbor, ...]


@dataclass(frozen=True, slots=True)
class Similarity(JsonView):
    """Result of `similarity`: two words with their tokens, and the cosine between their rows."""

    word: QueryWord
    other: QueryWord
    cosine: float


def neighbors(
    table: Table,
    tokenizer: Tokenizer,
    word: Word,
    *,
    minus: str | Sequence[Word] = (),
    plus: str | Sequence[Word] = (),
    k: int = 10,
) -> Neighbors:
    """Rank the rows of the embedding table by cosine similarity to the row sum `word` - `minus` + `plus`.

    A word is first looked up with a leading space, as within a sentence, and without it if that is not a single token;
    an int is a token id. `minus` and `plus` are one word or several. The tokens of the query's words, with and without
    the space, are excluded from the ranking.

    Args:
        table: A model, or a function that returns rows.
        tokenizer: The model's tokenizer.
        word: First word of the query.
        minus: Words to subtract.
        plus: Words to add.
        k: Number of neighbors to return.

    Raises:
        InputError: If a word is not a single token (the message lists its tokens), or `k` is out of range.
    """
    subtracted, added = _words(minus), [word, *_words(plus)]
    query = [
        _look_up(tokenizer, "+", word),
        *(_look_up(tokenizer, "-", item) for item in subtracted),
        *(_look_up(tokenizer, "+", item) for item in added[1:]),
    ]
    excluded = sorted({token_id for item in (*subtracted, *added) for token_id in tokens_of_word(tokenizer, item)})
    check_count(k, "k", tokenizer.vocab_size - len(excluded))
    vector_D = _direction(table, query)
    ids_C = _candidates(table, tokenizer.vocab_size, vector_D, k + len(excluded))
    ids_C = ids_C[~np.isin(ids_C, excluded)]
    cosines_C = np.concatenate([_cosines_of(_rows(table, part), vector_D) for part in split(ids_C, CHUNK_ROWS)])
    best = largest(cosines_C, k)
    ranked = zip(ids_C[best].tolist(), cosines_C[best].tolist(), strict=True)
    return Neighbors(tuple(query), tuple(Neighbor(i, tokenizer.token_text(i), cosine) for i, cosine in ranked))


def similarity(table: Table, tokenizer: Tokenizer, word: Word, other: Word) -> Similarity:
    """Return the cosine similarity of two words' rows; words are looked up as in `neighbors`.

    InputError if a word is not a single token (the message lists its tokens).
    """
    pair = _look_up(tokenizer, "+", word), _look_up(tokenizer, "+", other)
    rows_2D = _rows(table, np.array([query.token_id for query in pair]))
    return Similarity(*pair, float(_cosines_of(rows_2D[:1], rows_2D[1] / _lengths_of(rows_2D)[1])[0]))


def _words(words: str | Sequence[Word]) -> Sequence[Word]:
    if not isinstance(words, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"minus or plus is {show_value(words)}; expected a word or a list of words")
    return (words,) if isinstance(words, str) else words


def _look_up(tokenizer: Tokenizer, sign: Literal["+", "-"], word: Word) -> QueryWord:
    token_id = tokens_of_word(tokenizer, word)[0]
    text = tokenizer.token_text(token_id)
    return QueryWord(sign, word if isinstance(word, str) else text, token_id, text)


def _rows(table: Table, ids_C: Ids) -> Floats:
    return table(ids_C) if callable(table) else table.dequantize(EMBEDDING, ids_C.tolist())


def _direction(table: Table, query: Sequence[QueryWord]) -> Floats:
    """Return the sum of the query's rows, normalized, (D,)."""
    signs_Q1 = np.array([[1.0 if word.sign == "+" else -1.0] for word in query], np.float32)
    sum_1D = (signs_Q1 * _rows(table, np.array([word.token_id for word in query]))).sum(0, keepdims=True)
    return sum_1D[0] / _lengths_of(sum_1D)


def _candidates(table: Table, num_rows: int, vector_D: Floats, count: int) -> Ids:
    """Return ids that include those of the `count` nearest rows, (C,): all ids, or a few with the C kernels.

    The kernels' product with the table takes a twentieth of the time of dequantizing it. Its rounding changes a cosine
    by up to `_ROUNDING`.
    """
    every_V = np.arange(num_rows)
    if callable(table) or not table.is_native:
        return every_V
    cosines_V = (table.product(EMBEDDING, vector_D[None])[0] / _row_lengths(table))[:num_rows]
    is_far_V = cosines_V < cosines_V[largest(cosines_V, count)[-1]] - 2 * _ROUNDING
    return every_V[~is_far_V]  # a NaN compares false, and is kept


def _row_lengths(runner: Runner) -> Floats:
    """Return the norm of every row of the table, (V,), cached per runner, whose weights are frozen."""
    if runner not in _kept_lengths:
        parts = split(np.arange(runner.weights[EMBEDDING].shape[0]), CHUNK_ROWS)
        _kept_lengths[runner] = np.concatenate([_lengths_of(_rows(runner, ids_C)) for ids_C in parts])
    return _kept_lengths[runner]


def _lengths_of(rows_CD: Floats) -> Floats:
    return np.maximum(lengths(rows_CD), 1e-12)


def _cosines_of(rows_CD: Floats, vector_D: Floats) -> Floats:
    return rows_CD @ vector_D / _lengths_of(rows_CD)
