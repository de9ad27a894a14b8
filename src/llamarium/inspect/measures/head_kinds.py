"""Kinds of heads: how much of each head's attention goes to the token before, to the first one, or to what came next.

An induction head finds an earlier occurrence of the current token and attends to what followed it: in "A B ... A" it
reads B. It shows best on a text that says everything twice, where nothing but repetition predicts the second half.

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022, "In-context
Learning and Induction Heads", for the test on random tokens that are repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import InputError, check_choice
from llamarium.inspect.numbers import Floats, JsonView
from llamarium.inspect.shapes import check_whole
from llamarium.inspect.trace import Trace

NAMES = ("pattern",)
"""What a trace has to hold, at all tokens."""

Kind = Literal["previous", "first", "itself", "induction"]


@dataclass(frozen=True, slots=True)
class HeadKind:
    """Mean shares of one head's attention, over the queries that have such a key.

    Attributes:
        previous: To the token before the query.
        first: To the first token, where heads rest that find nothing.
        itself: To the query's own token.
        induction: To the tokens that followed earlier occurrences of the query's token; None where none recurs.
    """

    layer: int
    head: int
    previous: float
    first: float
    itself: float
    induction: float | None


@dataclass(frozen=True, slots=True)
class HeadKinds(JsonView):
    """The heads of the traced layers; `num_repeated` counts the queries that `induction` is a mean over."""

    token_ids: tuple[int, ...]
    num_repeated: int
    heads: tuple[HeadKind, ...]

    def by(self, kind: Kind) -> tuple[HeadKind, ...]:
        """Return the heads, the largest share first; OptionError for another kind, InputError if no token recurs."""
        check_choice("kind", kind, get_args(Kind))
        if kind == "induction" and not self.num_repeated:
            raise InputError("no token recurs after another one; use a text of repeats, or leave the prompt out")
        return tuple(sorted(self.heads, key=lambda head: -getattr(head, kind)))


def head_kinds(trace: Trace) -> HeadKinds:
    """Return the kinds of all heads of a trace; see `Inspector.head_kinds`.

    InputError if the trace lacks a pattern or a token, or the text has a single token.
    """
    num_tokens = len(trace.token_ids)
    if trace.positions != tuple(range(num_tokens)) or not any(name == "pattern" for name, _ in trace.arrays):
        raise InputError('expected a trace with names=["pattern"] of all positions')
    if num_tokens < 2:
        raise InputError("the text has one token, which leaves no choice; expected two or more")
    follows_TS = _follows(trace.token_ids)
    num_repeated = int(follows_TS.any(axis=1).sum())
    heads = [
        HeadKind(layer, head, *shares)
        for layer in trace.layers
        for head, shares in enumerate(_shares(trace.arrays["pattern", layer], follows_TS, num_repeated))
    ]
    return HeadKinds(trace.token_ids, num_repeated, tuple(heads))


def repeats(vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Return different random tokens, twice: 2 * num_tokens ids."""
    check_whole([num_tokens, seed], "num_tokens and seed")
    if not 2 <= num_tokens <= vocab_size or seed < 0:
        raise InputError(f"num_tokens is {num_tokens}, seed {seed}; expected 2 to {vocab_size}, and 0 or more")
    return 2 * np.random.default_rng(seed).permutation(vocab_size)[:num_tokens].tolist()


def _follows(ids: Sequence[int]) -> NDArray[np.bool_]:
    """Return (T, S): whether key s stands right after an earlier occurrence of query t's token."""
    ids_T = np.asarray(ids)
    follows_TS = np.zeros((len(ids), len(ids)), np.bool_)
    follows_TS[:, 1:] = ids_T[:, None] == ids_T[:-1]
    return np.tril(follows_TS, -1)  # the key before the query at the latest


def _shares(
    pattern_NTS: Floats, follows_TS: NDArray[np.bool_], num_repeated: int
) -> list[tuple[float, float, float, float | None]]:
    previous_N = np.diagonal(pattern_NTS, -1, 1, 2).mean(-1)
    itself_N = np.diagonal(pattern_NTS, 0, 1, 2)[:, 1:].mean(-1)
    induction_N = pattern_NTS[:, follows_TS].sum(-1) / max(1, num_repeated)
    rows = zip(previous_N, pattern_NTS[:, 1:, 0].mean(-1), itself_N, induction_N, strict=True)
    return [(float(p), float(f), float(i), float(n) if num_repeated else None) for p, f, i, n in rows]
