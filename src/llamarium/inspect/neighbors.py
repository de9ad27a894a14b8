"""The geometry of the embedding table: which rows point the same way, and what arithmetic on rows finds.

A row of the table is all that the model knows of a token before it has seen any other. Words of like use have rows of
like direction, which the cosine measures. "king - man + woman" is arithmetic on three rows as they stand in the table,
and asks whose row points most nearly as the sum does. gensim and word2vec scale rows to length one first;
here the sum is the one that a reader gets from the table (`docs/decisions/0019-what-the-shell-says.md`).

Source: Mikolov et al. 2013, "Linguistic Regularities in Continuous Space Word Representations".
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.errors import InputError, show_value
from llamarium.inspect.tokens import check_count, tokens_of_word
from llamarium.kernels import native
from llamarium.kernels.threads import one_torch_thread
from llamarium.quant.packed import EmbeddingPacked
from llamarium.tokenizer.base import Tokenizer

Word = str | int
"""A word, or the id of a token."""

CHUNK_ROWS = 512  # rows that are held in float32 at a time: what a processor's caches hold

_ROUNDING = 0.005
"""By how much roundings may change a cosine: bfloat16's of a row's numbers 2^-8 at most, of 16 bits of inputs 2^-12."""

_kept_lengths: WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class QueryWord:
    """A word of the question and the token that stands for it.

    Attributes:
        sign: "+" or "-".
        word: As it was given.
        token_id: The token whose row was used.
        text: Its printable piece: " king" is the word as it stands within a sentence, "king" as it begins one.
    """

    sign: Literal["+", "-"]
    word: str
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Neighbor:
    """A row that points nearly the same way.

    Attributes:
        token_id: The row.
        text: The token's printable piece.
        cosine: Of the angle to the question's vector; 1 is the same direction, 0 a right angle.
    """

    token_id: int
    text: str
    cosine: float


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The answer to `neighbors`.

    Attributes:
        query: The words and the tokens that were used for them.
        neighbors: The nearest rows, the nearest first.
    """

    query: tuple[QueryWord, ...]
    neighbors: tuple[Neighbor, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Similarity:
    """The answer to `similarity`.

    Attributes:
        word: The one, and the token that was used for it.
        other: The other.
        cosine: Of the angle between their rows; 1 is the same direction, 0 a right angle.
    """

    word: QueryWord
    other: QueryWord
    cosine: float

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return asdict(self)


def neighbors(
    embedding: nn.Module,
    tokenizer: Tokenizer,
    word: Word,
    *,
    minus: str | Sequence[Word] = (),
    plus: str | Sequence[Word] = (),
    k: int = 10,
) -> Neighbors:
    """Rank the rows of the embedding table by their cosine with the sum of rows `word` - `minus` + `plus`.

    A word is looked up with a space before it first, as it stands within a sentence, and without one if that is no
    single token. The tokens of the words themselves, with and without the space, are left out of the ranking.

    Args:
        embedding: Maps ids to rows, packed or not; `model.model.embed_tokens`.
        tokenizer: Its tokenizer.
        word: What to look for; a number is a token's id.
        minus: Words whose rows are taken away; one word may stand by itself.
        plus: Words whose rows are added.
        k: How many neighbours.

    Raises:
        InputError: If a word is no single token (its pieces are named), or `k` is out of range.
    """
    taken, added = _words(minus), [word, *_words(plus)]
    query = [
        _look_up(tokenizer, "+", word),
        *(_look_up(tokenizer, "-", one) for one in taken),
        *(_look_up(tokenizer, "+", one) for one in added[1:]),
    ]
    excluded = sorted({token_id for one in (*taken, *added) for token_id in tokens_of_word(tokenizer, one)})
    check_count(k, "k", tokenizer.vocab_size - len(excluded))
    with torch.inference_mode(), one_torch_thread():
        vector_D = _direction(embedding, query)
        ids_C = _candidates(embedding, tokenizer.vocab_size, vector_D, k + len(excluded))
        cosines_C = torch.cat([_cosines_of(embedding(part).float(), vector_D) for part in ids_C.split(CHUNK_ROWS)])
        cosines_C[torch.isin(ids_C, torch.tensor(excluded, device=ids_C.device))] = float("-inf")
        best = cosines_C.topk(k)
    ranked = zip(ids_C[best.indices].tolist(), best.values.tolist(), strict=True)  # sync: to show
    return Neighbors(tuple(query), tuple(Neighbor(i, tokenizer.token_text(i), cosine) for i, cosine in ranked))


def similarity(embedding: nn.Module, tokenizer: Tokenizer, word: Word, other: Word) -> Similarity:
    """Return the cosine of the angle between two words' rows of the embedding table.

    Args:
        embedding: Maps ids to rows, packed or not; `model.model.embed_tokens`.
        tokenizer: Its tokenizer.
        word: Looked up as `neighbors` does.
        other: As well.

    Raises:
        InputError: If one of them is no single token (its pieces are named).
    """
    pair = _look_up(tokenizer, "+", word), _look_up(tokenizer, "+", other)
    ids = torch.tensor([found.token_id for found in pair], device=_device(embedding))
    with torch.inference_mode():
        rows_2D = _directions(embedding, ids)
        return Similarity(*pair, float(rows_2D[0] @ rows_2D[1]))  # sync: to show


def _words(words: str | Sequence[Word]) -> Sequence[Word]:
    if not isinstance(words, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"minus or plus is {show_value(words)}; expected a word or a list of words")
    return (words,) if isinstance(words, str) else words


def _look_up(tokenizer: Tokenizer, sign: Literal["+", "-"], word: Word) -> QueryWord:
    token_id = tokens_of_word(tokenizer, word)[0]
    text = tokenizer.token_text(token_id)
    return QueryWord(sign, word if isinstance(word, str) else text, token_id, text)


def _direction(embedding: nn.Module, query: Sequence[QueryWord]) -> Tensor:
    """Return the sum of the query's rows, scaled to length one, (D,) float32."""
    device = _device(embedding)
    signs_Q1 = torch.tensor([[1.0] if word.sign == "+" else [-1.0] for word in query], device=device)
    rows_QD = embedding(torch.tensor([word.token_id for word in query], device=device)).float()
    return F.normalize((signs_Q1 * rows_QD).sum(dim=0), dim=0)


def _candidates(embedding: nn.Module, num_rows: int, vector_D: Tensor, count: int) -> Tensor:
    """Return ids among which the `count` nearest rows are, (C,): every row, or where the kernels hold the table, few.

    Their product takes a twentieth of the time that unpacking the table does. It is the same but for roundings, which
    change no cosine by more than `_ROUNDING`.
    """
    every_V = torch.arange(num_rows, device=vector_D.device)
    if not isinstance(embedding, EmbeddingPacked) or native.library() is None or embedding.weight.device.type != "cpu":
        return every_V
    dots_V = torch.from_numpy(native.product(embedding.linear.matrix, vector_D[None].numpy(), input_bits=16))[0]
    cosines_V = (dots_V / _lengths(embedding))[:num_rows]
    is_far_V = cosines_V < cosines_V.topk(count).values[-1] - 2 * _ROUNDING
    return every_V[~is_far_V]  # a NaN is never far


def _lengths(embedding: EmbeddingPacked) -> Tensor:
    """Return the length of every row of a packed table, (V,) float32; measured once for the numbers that it holds."""
    weight = embedding.weight
    state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
    kept = _kept_lengths.get(embedding)
    if kept is None or kept[0] != state:
        every_V = torch.arange(embedding.num_embeddings)
        parts = [_length_of(embedding(ids_C).float()) for ids_C in every_V.split(CHUNK_ROWS)]
        kept = _kept_lengths[embedding] = (state, torch.cat(parts))
    return kept[1]


def _length_of(rows_CD: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows_CD, dim=-1).clamp_min(1e-12)


def _cosines_of(rows_CD: Tensor, vector_D: Tensor) -> Tensor:
    """Return the cosines of rows with a vector of length one, (C,); the rows are read twice and not written."""
    return rows_CD @ vector_D / _length_of(rows_CD)


def _directions(embedding: nn.Module, ids_C: Tensor) -> Tensor:
    """Return rows scaled to length one, (C, D) float32."""
    return F.normalize(embedding(ids_C).float(), dim=-1)


def _device(embedding: nn.Module) -> torch.device:
    return next(chain(embedding.parameters(), embedding.buffers())).device
