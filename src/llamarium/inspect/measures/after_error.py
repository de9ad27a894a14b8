"""Surprise after an error: a wrong token is put into a text; how much longer is the model surprised by what follows?

At some places of each text one token is replaced, and the text goes on as it was. At each distance behind the place,
-log P of the text's token is compared with that in the unchanged text, in nats, and averaged over places and texts. If
errors added up in a text that goes on rightly, the difference would grow with the distance. What a model goes on with
by itself is another matter: its own answer follows the error (Ranzato et al. 2015, "Sequence Level Training with
Recurrent Neural Networks", section 2, exposure bias).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import InputError, check_choice
from llamarium.inspect.forward import logits_of, num_rows, rows_logits
from llamarium.inspect.measures.perplexity import check_number
from llamarium.inspect.numbers import Floats, JsonView, log_softmax
from llamarium.inspect.tokens import check_count, check_ids
from llamarium.runtime.runner import Runner

ErrorKind = Literal["likely", "random"]
"""Of the wrong token: the most probable one but the right one, or any of the vocabulary."""

_FIRST = 4  # tokens before the first place
_SENTENCES = """\
The old lighthouse stood at the end of a narrow road. Every evening the keeper climbed the stairs, lit the lamp and \
watched the ships until the morning came.
Water boils when it is heated to one hundred degrees. The steam rises into the air, cools down again and falls as \
small drops on everything that is cold.
My sister wanted to learn how to play the piano. She practised for an hour every day after school, and in the summer \
she gave a small concert for her friends.
The train to the city was late again. People waited on the platform, looked at their watches and talked about the \
weather until it finally arrived.
A farmer had three sons and a small field. When he grew old he asked them what they would do with the land, and each \
of them gave a different answer.
Bread is made of flour, water, salt and yeast. The dough has to rest in a warm place for some hours before it is put \
into the oven.
In the winter the lake was covered with ice. The children of the village went there every afternoon to skate, and \
their parents made hot tea for them.
The doctor told him to sleep more and to drink less coffee. He promised to try, but the next night he was still \
working when the sun came up."""
TEXTS = tuple(_SENTENCES.splitlines())
"""What is read where no text is given."""


@dataclass(frozen=True, slots=True)
class AfterError(JsonView):
    """Surprise behind a wrong token, by distance: 1 is the next token.

    Attributes:
        num_places: How many replaced tokens each is a mean over.
        plain: -log P of the token at each distance in the unchanged text, nats.
        after: The same behind the wrong token.
        error: The standard error of the difference of the two, as if places were independent of each other.
    """

    kind: ErrorKind
    num_places: int
    plain: tuple[float, ...]
    after: tuple[float, ...]
    error: tuple[float, ...]


def surprise_after_error(
    runner: Runner,
    texts: Sequence[Sequence[int]],
    *,
    kind: ErrorKind = "likely",
    num_tokens: int = 16,
    stride: int = 4,
    seed: int = 0,
    check_wanted: Callable[[], object] | None = None,
) -> AfterError:
    """Replace tokens of texts one at a time; see `Inspector.surprise_after_error`.

    `check_wanted` is called before each text; an exception of it ends the work.

    Raises:
        InputError: If no text has room for a place, or a number is out of range.
        ContextLengthError: If a text is longer than the context.
        LlamariumError: If the model's logits are NaN.
    """
    check_choice("kind", kind, get_args(ErrorKind))
    check_count(num_tokens, "num_tokens", num_rows(runner.config.vocab_size))
    check_count(stride, "stride", runner.config.max_position_embeddings)
    token_ids, rng = [check_ids(runner.config, ids) for ids in texts], np.random.default_rng(seed)
    pairs_2PD: list[NDArray[np.float64]] = []
    for ids in token_ids:
        if check_wanted:
            check_wanted()
        pairs_2PD.extend(_of_text(runner, ids, kind, num_tokens, stride, rng))
    if not pairs_2PD:
        minimum = _FIRST + num_tokens + 1
        raise InputError(f"no text has {minimum} tokens, as {num_tokens} after an error need; use longer texts")
    plain_PD, after_PD = np.stack(pairs_2PD, axis=1)
    check_number(float(after_PD.sum()), "the model")
    error_D = (after_PD - plain_PD).std(0) / math.sqrt(len(plain_PD))
    means = (tuple(values_D.tolist()) for values_D in (plain_PD.mean(0), after_PD.mean(0), error_D))
    return AfterError(kind, len(plain_PD), *means)


def _of_text(
    runner: Runner, ids: list[int], kind: ErrorKind, num_tokens: int, stride: int, rng: np.random.Generator
) -> Iterator[NDArray[np.float64]]:
    """Yield for each place of a text the surprise at each distance, without the error and with it: (2, D)."""
    places = range(_FIRST, len(ids) - num_tokens, stride)
    if not places:
        return
    logits_TV = np.concatenate(list(logits_of(runner, ids)))
    plain_T = _surprise(logits_TV[:-1], ids[1:])
    rows = [[*ids[:at], _wrong(logits_TV[at - 1], ids[at], kind, rng), *ids[at + 1 : at + num_tokens]] for at in places]
    at_once = num_rows(runner.config.vocab_size) // num_tokens
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        logits = rows_logits(runner, some, [num_tokens] * len(some))
        for at, logits_DV in zip(places[start : start + at_once], logits, strict=True):
            yield np.stack([plain_T[at : at + num_tokens], _surprise(logits_DV, ids[at + 1 : at + num_tokens + 1])])


def _wrong(logits_V: Floats, correct_id: int, kind: ErrorKind, rng: np.random.Generator) -> int:
    if kind == "likely":
        return int(np.where(np.arange(len(logits_V)) == correct_id, -np.inf, logits_V).argmax())
    return (correct_id + int(rng.integers(1, len(logits_V)))) % len(logits_V)


def _surprise(logits_TV: Floats, next_T: Sequence[int]) -> NDArray[np.float64]:
    return -log_softmax(logits_TV)[np.arange(len(next_T)), next_T].astype(np.float64)
