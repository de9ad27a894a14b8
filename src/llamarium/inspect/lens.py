"""The logit lens: the model's predictions from the residual stream after each layer.

Every layer adds to the residual stream, and the head reads it at the end. Applying the final norm and the head earlier
shows in which layer a prediction forms: after a layer's attention ("resid_mid" in a trace), and after its MLP
("resid").

Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llamarium.errors import InputError
from llamarium.inspect import forward
from llamarium.inspect.numbers import Floats, JsonView, log_softmax, split
from llamarium.inspect.tokens import Candidate, check_count, check_token, name_candidates, top_candidates
from llamarium.inspect.trace import Trace
from llamarium.runtime.runner import Runner
from llamarium.tokenizer.base import Tokenizer

Half = Literal["attention", "mlp"]

STREAMS: dict[Half, str] = {"attention": "resid_mid", "mlp": "resid"}
"""Name in a trace of the residual stream after each half of a layer, in the order of computation."""

_Place = tuple[int, Half]  # a layer, and the half of it that precedes the reading


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The prediction of one chosen token.

    Attributes:
        probability: P(token | context).
        logprob: Natural logarithm of the probability.
        rank: Rank among all tokens, 1 for the most likely.
    """

    probability: float
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class LensLayer(JsonView):
    """The predictions after one half of a layer.

    Attributes:
        layer: Index of the layer.
        candidates: For each position of the lens, the most likely next tokens, best first.
        after: "attention" or "mlp": the half of the layer that was added last.
        chosen: For each position, the prediction of the chosen token; empty without one.
    """

    layer: int
    candidates: tuple[tuple[Candidate, ...], ...]
    after: Half = "mlp"
    chosen: tuple[ChosenToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Lens(JsonView):
    """The predictions of the logit lens at all traced layers.

    Attributes:
        token_ids: Token ids of the text.
        positions: Positions whose next token is predicted.
        layers: Predictions in the order of computation; the one after the last layer's MLP is the model's output.
        chosen_id: Id of the chosen token, or None.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    layers: tuple[LensLayer, ...]
    chosen_id: int | None = None


def lens(
    runner: Runner, trace: Trace, k: int = 5, tokenizer: Tokenizer | None = None, *, chosen_id: int | None = None
) -> Lens:
    """Apply the model's final norm and head to the residual stream of each traced layer; see `Inspector.lens`.

    Args:
        runner: Executes the model.
        trace: A trace with "resid" for predictions after the MLP, and "resid_mid" for those after attention.
        k: Number of candidates per position.
        tokenizer: Provides the candidates' texts.
        chosen_id: A token whose prediction is included.

    Raises:
        InputError: If the trace has no residual stream, or `k` or the token is outside the vocabulary.
        AnswerError: If logits are not finite.
    """
    vocab_size = runner.config.vocab_size
    check_count(k, "k", vocab_size)
    if chosen_id is not None:
        check_token(chosen_id, vocab_size, "chosen_id")
    places: list[_Place] = [
        (layer, half) for layer in trace.layers for half, name in STREAMS.items() if (name, layer) in trace.arrays
    ]
    if not places:
        raise InputError('the trace holds no residual stream; trace with names=["resid"] (or more)')
    layers: list[LensLayer] = []
    num_positions = len(trace.positions)
    step = max(1, forward.num_rows(vocab_size) // num_positions)  # readings that share one product with the head
    for group in (places[start : start + step] for start in range(0, len(places), step)):
        best: list[tuple[Candidate, ...]] = []
        chosen: list[ChosenToken] = []
        streams_MD = np.concatenate([trace.arrays[STREAMS[half], layer] for layer, half in group])
        for part_CD in split(streams_MD, forward.num_rows(vocab_size)):
            logits_CV = runner.read_stream(part_CD)
            best += (name_candidates(row, tokenizer) for row in top_candidates(logits_CV, k))
            chosen += () if chosen_id is None else predictions_of(logits_CV, chosen_id)
        for i, (layer, half) in enumerate(group):
            rows = slice(i * num_positions, (i + 1) * num_positions)
            layers.append(LensLayer(layer, tuple(best[rows]), half, tuple(chosen[rows])))
    return Lens(trace.token_ids, trace.positions, tuple(layers), chosen_id)


def predictions_of(logits_CV: Floats, token_id: int) -> Iterator[ChosenToken]:
    """Yield the prediction of a token for each row of logits, (C, V)."""
    logprobs_C = log_softmax(logits_CV)[:, token_id]
    ranks_C = (logits_CV > logits_CV[:, token_id, None]).sum(-1) + 1
    return map(ChosenToken, np.exp(logprobs_C).tolist(), logprobs_C.tolist(), ranks_C.tolist())
