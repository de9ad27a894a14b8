"""The effect of edits and patches on the next token: its probabilities without them and with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llamarium.errors import AnswerError
from llamarium.inspect.json_values import JsonView
from llamarium.inspect.lens import ChosenToken, predictions_of
from llamarium.inspect.measures.divergence import kl_of_rows
from llamarium.inspect.numbers import Floats, largest, log_softmax
from llamarium.inspect.tokens import check_count, check_token, text_of
from llamarium.inspect.trace import trace
from llamarium.runtime.loaded_model import runner_of
from llamarium.runtime.runner import Runner
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
class Floor:
    """The floor of rounding: the unchanged pass as the model answers, against the same pass in float32.

    An answering pass rounds more than float32 does (inputs of packed weights to 8 bits, keys and values to bfloat16).
    A smaller change than this is none that its answers would show.

    Attributes:
        logprob: The largest difference of a reported token's log-probability.
        divergence: KL(float32 ‖ answering) of the next token, in nats.
    """

    logprob: float
    divergence: float


@dataclass(frozen=True, slots=True)
class TokenEffect:
    """A next token's prediction without the edits (`before`), and with them; `text` is None without a tokenizer."""

    token_id: int
    text: str | None
    before: ChosenToken
    after: ChosenToken


@dataclass(frozen=True, slots=True)
class Effect(JsonView):
    """What edits change after one token of a text, computed in float32.

    Attributes:
        position: The token before the one that is predicted.
        divergence: KL(without ‖ with) of the next token, in nats; 0 only where nothing has changed.
        floor: What rounding alone changes.
        tokens: The most probable ones of either, and the chosen one; by their probability without.
    """

    token_ids: tuple[int, ...]
    position: int
    divergence: float
    floor: Floor
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
    answering: Runner | None = None,
) -> Effect:
    """Run a text without edits and with them, both in float32, and compare the next token; see `Inspector.effect`.

    `answering` runs the model's answers, for the floor of rounding; the modules as they are where left out.

    Raises:
        InputError: For an invalid edit, position, `k` or token.
        AnswerError: If the logits with the edits are not finite.
    """
    from llamarium.inspect.interventions import edited

    check_count(k, "k", model.config.vocab_size)
    if chosen_id is not None:
        check_token(chosen_id, model.config.vocab_size, "chosen_id")
    with edited(model) as plain, edited(model, edits) as other:
        runners = runner_of(plain), runner_of(other), answering or runner_of(model)
        runs = [trace(runner, ids, names=["logits"], positions=[position]) for runner in runners]
    before_V, after_V, answering_V = (run.arrays["logits", None][0] for run in runs)
    if not np.isfinite(after_V).all():
        raise AnswerError("with these edits the logits are not finite; use smaller factors or strengths")
    reported: set[int] = {*largest(before_V, k).tolist(), *largest(after_V, k).tolist()}
    reported |= set() if chosen_id is None else {chosen_id}
    tokens = [
        TokenEffect(i, text_of(i, tokenizer), *(next(predictions_of(x_V[None], i)) for x_V in (before_V, after_V)))
        for i in reported
    ]
    tokens.sort(key=lambda one: (-one.before.logprob, one.token_id))
    logprobs = [log_softmax(logits_V.astype(np.float64)) for logits_V in (before_V, after_V, answering_V)]
    far = max(abs(logprobs[2][i] - logprobs[0][i]) for i in reported)
    floor = Floor(float(far), _kl(logprobs[0], logprobs[2]))
    return Effect(tuple(ids), runs[0].positions[0], _kl(logprobs[0], logprobs[1]), floor, tuple(tokens))


def _kl(p_V: Floats, q_V: Floats) -> float:
    return max(0.0, float(kl_of_rows(p_V[None], q_V[None])[0]))  # rounding may pass below 0
