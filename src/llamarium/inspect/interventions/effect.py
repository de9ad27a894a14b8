"""Effects of edits and patches on the next token's probabilities."""

from dataclasses import dataclass

from llamarium.inspect.lens import ChosenToken
from llamarium.inspect.numbers import JsonView


@dataclass(frozen=True, slots=True)
class Measured:
    """The target's logit minus the contrast token's logit, and P(target | text)."""

    logit: float
    probability: float


@dataclass(frozen=True, slots=True)
class PatchCell(JsonView):
    """The result of patching one layer and position, measured as in `Measured`.

    Attributes:
        recovered: Fraction of the logit difference recovered: 0 is the base's logit, 1 the source's; None where both
            are equal.
        done: Number of cells computed so far, including this one.
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
    """Rounding error of the unedited pass: the model as it generates, against the same pass in float32.

    Generation rounds more than float32 does (inputs of packed weights to 8 bits, the KV cache to bfloat16). A change
    smaller than this would not be visible in generated text.

    Attributes:
        logprob: The largest difference of a reported token's log-probability.
        divergence: KL(float32 ‖ generating) of the next token, in nats.
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
    """The change in one next-token prediction caused by edits, computed in float32.

    Attributes:
        position: The token before the one that is predicted.
        divergence: KL(without ‖ with) of the next token, in nats; 0 only if nothing changed.
        floor: The change caused by rounding alone.
        tokens: The most probable tokens of both passes and the target, sorted by probability without the edits.
    """

    token_ids: tuple[int, ...]
    position: int
    divergence: float
    floor: Floor
    tokens: tuple[TokenEffect, ...]
