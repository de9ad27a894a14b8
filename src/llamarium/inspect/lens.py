"""The logit lens: what the model would predict if it stopped after each layer.

Every layer adds to one residual stream, and the head reads that stream at the end. Reading it earlier with the same
norm and head shows where in the depth a prediction forms: after a layer's attention ("resid_mid" of a trace), and after
its MLP ("resid").

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
"""The stream after each half of a layer, in the order of computation, as a trace calls it."""

_Place = tuple[int, Half]  # a layer, and after which half of it


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """The prediction of one given token.

    Attributes:
        probability: P(token | context).
        logprob: Its natural logarithm.
        rank: 1 if no other token is more probable, 2 if one is, ...
    """

    probability: float
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class LensLayer(JsonView):
    """The predictions at one place in the depth.

    Attributes:
        candidates: For each of the lens's positions the most probable next tokens, the best first.
        after: Which half of the layer has been added.
        chosen: For each position the prediction of the chosen token; empty without one.
    """

    layer: int
    candidates: tuple[tuple[Candidate, ...], ...]
    after: Half = "mlp"
    chosen: tuple[ChosenToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Lens(JsonView):
    """The predictions at every traced layer.

    Attributes:
        positions: The tokens whose successors are predicted.
        layers: One entry for each traced place, in the order of computation; after the MLP of the last layer it is the
            model's own prediction.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    layers: tuple[LensLayer, ...]
    chosen_id: int | None = None


def lens(
    runner: Runner, trace: Trace, k: int = 5, tokenizer: Tokenizer | None = None, *, chosen_id: int | None = None
) -> Lens:
    """Read the residual stream of each traced layer with the model's own norm and head; see `Inspector.lens`.

    `trace` holds "resid" of the layers that are read after their MLP, "resid_mid" of those after their attention.
    `tokenizer` gives the candidates their texts.

    Raises:
        InputError: If the trace holds no residual stream, or for a `k` or a token outside the vocabulary.
        AnswerError: If what the head makes of a stream is not finite.
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
    step = max(1, forward.num_rows(vocab_size) // num_positions)  # places that share one read of the head
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
    """Yield the prediction of a token at each row of logits, (C, V)."""
    logprobs_C = log_softmax(logits_CV)[:, token_id]
    ranks_C = (logits_CV > logits_CV[:, token_id, None]).sum(-1) + 1
    return map(ChosenToken, np.exp(logprobs_C).tolist(), logprobs_C.tolist(), ranks_C.tolist())
