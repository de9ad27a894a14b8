"""The effect of edits and patches on the next token: its probabilities without them and with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llamarium.errors import AnswerError
from llamarium.inspect.json_values import JsonView
from llamarium.inspect.lens import ChosenToken, predictions_of
from llamarium.inspect.measures.divergence import kl_of_rows
from llamarium.inspect.numbers import largest, log_softmax
from llamarium.inspect.tokens import check_count, check_token, text_of
from llamarium.inspect.trace import trace
from llamarium.runtime.loaded_model import runner_of
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.inspect.interventions.edits import Edit
    from llamarium.model import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Measured:
    """The target's logit, less that of the token it is held against, and P(target | text)."""

    logit: float
    probability: float


@dataclass(frozen=True, slots=True)
class PatchCell(JsonView):
    """The pass with one place of it from the other prompt, measured as in `Measured`.

    Attributes:
        recovered: Of the way from the base's logit to the source's: 0 is the base's, 1 the source's; None where both
            are equal.
        done: Cells so far, this one among them.
        total: Cells in all.
    """

    layer: int
    position: int
    logit: float
    probability: float
    recovered: float | None
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TokenEffect:
    """A next token's prediction without the edits (`before`), and with them; `text` is None without a tokenizer."""

    token_id: int
    text: str | None
    before: ChosenToken
    after: ChosenToken


@dataclass(frozen=True, slots=True)
class Effect(JsonView):
    """What edits change after one token of a text.

    Attributes:
        position: The token before the one that is predicted.
        divergence: KL(without ‖ with) of the next token, in nats; 0 only where nothing has changed.
        tokens: The most probable ones of either, and the chosen one; by their probability without.
    """

    token_ids: tuple[int, ...]
    position: int
    divergence: float
    tokens: tuple[TokenEffect, ...]


def effect_of(
    model: "LlamaForCausalLM",
    ids: Sequence[int],
    edits: "Sequence[Edit]",
    *,
    position: int = -1,
    k: int = 10,
    chosen_id: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Effect:
    """Run a text without edits and with them, both on the modules, and compare the next token; see `Inspector.effect`.

    Raises:
        InputError: For an invalid edit, position, `k` or token.
        AnswerError: If the logits with the edits are not finite.
    """
    from llamarium.inspect.interventions.edits import edited

    check_count(k, "k", model.config.vocab_size)
    if chosen_id is not None:
        check_token(chosen_id, model.config.vocab_size, "chosen_id")
    with edited(model, edits) as other:
        runs = [trace(runner_of(one), ids, names=["logits"], positions=[position]) for one in (model, other)]
    before_V, after_V = (run.arrays["logits", None][0] for run in runs)
    if not np.isfinite(after_V).all():
        raise AnswerError("with these edits the logits are not finite; use smaller factors or strengths")
    reported: set[int] = {*largest(before_V, k).tolist(), *largest(after_V, k).tolist()}
    reported |= set() if chosen_id is None else {chosen_id}
    tokens = [
        TokenEffect(i, text_of(i, tokenizer), *(next(predictions_of(x_V[None], i)) for x_V in (before_V, after_V)))
        for i in reported
    ]
    tokens.sort(key=lambda one: (-one.before.logprob, one.token_id))
    kl = kl_of_rows(*(log_softmax(logits_V.astype(np.float64))[None] for logits_V in (before_V, after_V)))[0]
    return Effect(tuple(ids), runs[0].positions[0], max(0.0, float(kl)), tuple(tokens))  # rounding may pass below 0
