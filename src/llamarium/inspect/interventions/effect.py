"""The effect of edits and patches on the next token: its probabilities without them and with them."""

from dataclasses import dataclass

from llamarium.inspect.lens import ChosenToken
from llamarium.inspect.numbers import JsonView


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
