"""The geometry of the embedding table: rows of like direction, and arithmetic on rows.

A row of the table is all that the model has of a token without context. Words of like use have rows of like direction,
which the cosine measures. "king - man + woman" is arithmetic on three rows as they stand in the table, and the result
is the row of the nearest direction. gensim and word2vec scale rows to length one first; here the sum is the one of the
table's rows (`docs/decisions/0019-what-the-shell-says.md`).

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
"""A word, or the id of a token."""

Ids = NDArray[np.int64]

Table = Runner | Callable[[Ids], Floats]
"""The model whose table it is, or what returns rows by their numbers: (C,) to (C, D)."""

CHUNK_ROWS = 512  # rows that are held in float32 at a time: what a processor's caches hold

_ROUNDING = 0.025  # by how much roundings may change a cosine: 8 bits of inputs in groups of 32 by 32^0.5 / 254 at most

_kept_lengths: WeakKeyDictionary[Runner, Floats] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class QueryWord:
    """A word of the query, its token and its printable piece: " king" within a sentence, "king" at its beginning."""

    sign: Literal["+", "-"]
    word: str
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Neighbor:
    """A row of a near direction: a cosine of 1 is the same direction, 0 a right angle."""

    token_id: int
    text: str
    cosine: float


@dataclass(frozen=True, slots=True)
class Neighbors(JsonView):
    """Result of `neighbors`: the words and their tokens, and the nearest rows, the nearest first."""

    query: tuple[QueryWord, ...]
    neighbors: tuple[Neighbor, ...]


@dataclass(frozen=True, slots=True)
class Similarity(JsonView):
    """Result of `similarity`: two words and their tokens, and the cosine of the angle between their rows."""

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
    """Rank the rows of the embedding table by their cosine with the sum of rows `word` - `minus` + `plus`.

    A word is looked up with a space before it first, as it stands within a sentence, and without one if that is no
    single token; a number is a token's id. `minus` and `plus` are one word, or several. The tokens of the words
    themselves, with and without the space, are left out of the ranking, of which the first `k` are returned.
    InputError if a word is no single token (its pieces are named), or `k` is out of range.
    """
    taken, added = _words(minus), [word, *_words(plus)]
    query = [
        _look_up(tokenizer, "+", word),
        *(_look_up(tokenizer, "-", one) for one in taken),
        *(_look_up(tokenizer, "+", one) for one in added[1:]),
    ]
    excluded = sorted({token_id for one in (*taken, *added) for token_id in tokens_of_word(tokenizer, one)})
    check_count(k, "k", tokenizer.vocab_size - len(excluded))
    vector_D = _direction(table, query)
    ids_C = _candidates(table, tokenizer.vocab_size, vector_D, k + len(excluded))
    ids_C = ids_C[~np.isin(ids_C, excluded)]
    cosines_C = np.concatenate([_cosines_of(_rows(table, part), vector_D) for part in split(ids_C, CHUNK_ROWS)])
    best = largest(cosines_C, k)
    ranked = zip(ids_C[best].tolist(), cosines_C[best].tolist(), strict=True)
    return Neighbors(tuple(query), tuple(Neighbor(i, tokenizer.token_text(i), cosine) for i, cosine in ranked))


def similarity(table: Table, tokenizer: Tokenizer, word: Word, other: Word) -> Similarity:
    """Return the cosine of the angle between two words' rows; words are looked up as in `neighbors`.

    InputError if one of them is no single token (its pieces are named).
    """
    pair = _look_up(tokenizer, "+", word), _look_up(tokenizer, "+", other)
    rows_2D = _rows(table, np.array([found.token_id for found in pair]))
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
    """Return the sum of the query's rows, scaled to length one, (D,)."""
    signs_Q1 = np.array([[1.0 if word.sign == "+" else -1.0] for word in query], np.float32)
    sum_1D = (signs_Q1 * _rows(table, np.array([word.token_id for word in query]))).sum(0, keepdims=True)
    return sum_1D[0] / _lengths_of(sum_1D)


def _candidates(table: Table, num_rows: int, vector_D: Floats, count: int) -> Ids:
    """Return ids that contain the `count` nearest rows, (C,): every row, or of a table in place, few.

    Its product takes a twentieth of the time of unpacking the table. It is equal but for roundings, which change no
    cosine by more than `_ROUNDING`.
    """
    every_V = np.arange(num_rows)
    if callable(table) or not table.is_native:
        return every_V
    cosines_V = (table.product(EMBEDDING, vector_D[None])[0] / _row_lengths(table))[:num_rows]
    is_far_V = cosines_V < cosines_V[largest(cosines_V, count)[-1]] - 2 * _ROUNDING
    return every_V[~is_far_V]  # a NaN is never far


def _row_lengths(runner: Runner) -> Floats:
    """Return the length of every row of the table, (V,), measured once: a runner's weights are frozen."""
    if runner not in _kept_lengths:
        parts = split(np.arange(runner.weights[EMBEDDING].shape[0]), CHUNK_ROWS)
        _kept_lengths[runner] = np.concatenate([_lengths_of(_rows(runner, ids_C)) for ids_C in parts])
    return _kept_lengths[runner]


def _lengths_of(rows_CD: Floats) -> Floats:
    return np.maximum(lengths(rows_CD), 1e-12)


def _cosines_of(rows_CD: Floats, vector_D: Floats) -> Floats:
    return rows_CD @ vector_D / _lengths_of(rows_CD)
