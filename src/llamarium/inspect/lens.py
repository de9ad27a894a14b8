"""The logit lens: what the model would say if it stopped thinking after each layer.

Every layer adds to one residual stream, and the head reads that stream at the end. Reading it earlier with the same
norm and head shows where in the depth a prediction forms.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
"""

from dataclasses import dataclass
from typing import Any

import torch

from llamarium.errors import InputError
from llamarium.inspect.tokens import Candidate, check_count, name_candidates, top_candidates
from llamarium.inspect.trace import Trace, make_key
from llamarium.model import LlamaForCausalLM
from llamarium.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class LensLayer:
    """What one layer would say.

    Attributes:
        layer: Its index.
        candidates: For each of the lens's positions the most probable next tokens, the best first.
    """

    layer: int
    candidates: tuple[tuple[Candidate, ...], ...]


@dataclass(frozen=True, slots=True)
class Lens:
    """What every traced layer would say.

    Attributes:
        token_ids: The ids of the text.
        positions: Where in it the next token is asked for.
        layers: One entry a layer, the first first; the last layer of the model says what the model says.
    """

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    layers: tuple[LensLayer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return {
            "token_ids": list(self.token_ids),
            "positions": list(self.positions),
            "layers": [
                {"layer": row.layer, "candidates": [[c.to_dict() for c in best] for best in row.candidates]}
                for row in self.layers
            ],
        }


def lens(model: LlamaForCausalLM, trace: Trace, k: int = 5, tokenizer: Tokenizer | None = None) -> Lens:
    """Read the residual stream of each traced layer with the model's own norm and head.

    Args:
        model: The model that was traced.
        trace: With "resid" of the layers that are to be read, at the positions that are to be read.
        k: Candidates for each layer and position.
        tokenizer: Gives the candidates their texts.

    Raises:
        InputError: If the trace holds no residual stream, or for a `k` outside the vocabulary.
    """
    check_count(k, "k", model.config.vocab_size)
    layers = [layer for layer in trace.layers if make_key("resid", layer) in trace]
    if not layers:
        raise InputError('the trace holds no residual stream; trace with names=["resid"] (or more)')
    return Lens(trace.token_ids, trace.positions, tuple(_read(model, trace, i, k, tokenizer) for i in layers))


@torch.no_grad()
def _read(model: LlamaForCausalLM, trace: Trace, layer: int, k: int, tokenizer: Tokenizer | None) -> LensLayer:
    stream_TD = trace[make_key("resid", layer)].to(model.dtype)
    logits_TV = model.logits(model.model.norm(stream_TD))
    rows = top_candidates(logits_TV, k)
    return LensLayer(layer, tuple(name_candidates(row, tokenizer) for row in rows))
