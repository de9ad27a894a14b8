"""Helpers of inspections: validation of token ids, and the most likely tokens for logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from llamarium.config import ModelConfig
from llamarium.errors import AnswerError, ContextLengthError, InputError, escape, show_value
from llamarium.inspect.numbers import Floats, JsonView, largest, log_softmax
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.special import check_text

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Candidate(JsonView):
    """A possible next token.

    Attributes:
        token_id: Id of the token.
        probability: P(token | context), the softmax of the logits.
        logprob: Natural logarithm of the probability.
        text: The token's text, or None without a tokenizer.
    """

    token_id: int
    probability: float
    logprob: float
    text: str | None = None


def check_count(value: object, name: str, limit: int) -> None:
    """Check that a count is an integer between 1 and `limit`; InputError if not."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise InputError(f"{name} is {show_value(value)}; expected a whole number within 1..{limit}")


def check_ids(config: ModelConfig, ids: "Sequence[int] | Tensor") -> list[int]:
    """Validate the token ids of one text and return them as a list.

    Raises:
        InputError: If they are not a flat, non-empty sequence of integers within the vocabulary.
        ContextLengthError: If there are more than the context length.
    """
    try:
        ids_T = np.asarray(ids.tolist() if hasattr(ids, "tolist") else ids)  # pyright: ignore
    except (TypeError, ValueError):
        raise InputError("token ids are no flat sequence of whole numbers") from None
    if ids_T.shape == (0,):
        raise InputError("the text has no tokens; expected at least one")
    if ids_T.ndim != 1 or ids_T.dtype.kind not in "iu":
        raise InputError(f"token ids are {ids_T.shape} of {ids_T.dtype}; expected a flat sequence of whole numbers")
    limit, vocab_size = config.max_position_embeddings, config.vocab_size
    if len(ids_T) > limit:
        raise ContextLengthError(f"{len(ids_T)} tokens; the model's context holds {limit}: use a shorter text")
    low, high = int(ids_T.min()), int(ids_T.max())
    if low < 0 or high >= vocab_size:
        raise InputError(f"token ids span {low}..{high}; the model's vocabulary is 0..{vocab_size - 1}")
    return ids_T.tolist()


def check_logits(logits_TV: Floats) -> None:
    """Check that logits are finite; AnswerError if not."""
    if not np.isfinite(logits_TV).all():
        raise AnswerError(
            "the model's logits are not finite (NaN or infinite), so that they predict no token; `llamarium info` "
            "counts weights that are not finite, and --dtype float32 has the widest range"
        )


def top_candidates(logits_TV: Floats, k: int) -> list[tuple[Candidate, ...]]:
    """Return the k most likely tokens of each row, best first; ties are broken by the lower id.

    AnswerError if logits are not finite.
    """
    check_logits(logits_TV)
    return [_best(logprobs_V, k) for logprobs_V in log_softmax(logits_TV)]


def _best(logprobs_V: Floats, k: int) -> tuple[Candidate, ...]:
    ids = largest(logprobs_V, k)
    best = logprobs_V[ids]
    return tuple(map(Candidate, ids.tolist(), np.exp(best).tolist(), best.tolist()))


def text_of(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    """Return a token's text, or None without a tokenizer."""
    return None if tokenizer is None else tokenizer.token_text(token_id)


def name_candidates(candidates: Sequence[Candidate], tokenizer: Tokenizer | None) -> tuple[Candidate, ...]:
    """Return candidates with their texts."""
    return tuple(replace(c, text=text_of(c.token_id, tokenizer)) for c in candidates)


def tokens_of_word(tokenizer: Tokenizer, word: str | int) -> list[int]:
    """Return the single tokens for a word: with a leading space, then without; for an id, the id.

    InputError if there are none; the message lists the word's tokens.
    """
    if isinstance(word, int):
        return [check_token(word, tokenizer.vocab_size)]
    check_text(word)
    if not word:
        raise InputError("the word is empty; expected one with a token of its own")
    spellings = [word] if word.startswith(" ") else [f" {word}", word]
    encoded = [tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings]
    single = [ids[0] for ids in encoded if len(ids) == 1]
    if single:
        return single
    pieces = escape(" + ".join(repr(tokenizer.token_text(i)) for i in encoded[0]) or "nothing")
    raise InputError(f"{show_value(word)} is no single token of this vocabulary: {pieces}; choose a commoner word")


def check_token(token_id: object, vocab_size: int, name: str = "the token") -> int:
    """Return a token id; InputError if it is not in the vocabulary."""
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise InputError(f"{name} is {show_value(token_id)}; expected an id within 0..{vocab_size - 1}")
    return token_id
