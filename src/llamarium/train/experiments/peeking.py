"""Measure how a bidirectional model cheats: it attends to the next token and copies it instead of predicting it."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llamarium.attention import CausalAttend, attend_eagerly
from llamarium.model import LlamaForCausalLM
from llamarium.train.config import RunConfig
from llamarium.train.data.batch import Rows
from llamarium.train.objectives.base import Trunk
from llamarium.train.step import bidirectional_trunk, causal_trunk, measure


@dataclass(frozen=True, slots=True)
class Peeking:
    """How a model uses the token to predict.

    Attributes:
        loss: Validation loss as trained, in nats.
        loss_without: Validation loss with causal attention, in nats.
        share: Largest mean attention weight of a head on the next token.
        layer_idx: Layer of that head.
        head_idx: Index of that head.
    """

    loss: float
    loss_without: float
    share: float
    layer_idx: int
    head_idx: int


class _NextTokenShares:
    """Attends as in training, and records each head's mean attention weight on the next token."""

    def __init__(self, inner: CausalAttend) -> None:
        self.inner = inner
        self.shares: list[Tensor] = []

    def __call__(self, layer_idx: int, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> Tensor:
        eager = attend_eagerly(q_BTNH, self.inner.context(layer_idx, k_BTKH, v_BTKH))
        self.shares.append(eager.pattern_BNTS.diagonal(1, dim1=-2, dim2=-1).mean(dim=(0, 2)))
        return eager.out_BTNH


@torch.no_grad()
def measure_peeking(model: LlamaForCausalLM, rows: Rows, trunk: Trunk, config: RunConfig) -> Peeking:
    """Measure a model with and without access to the next token, and find the head that attends to it most."""
    limits = {"batch_rows": config.batch_rows, "max_rows": config.eval_rows}
    loss = partial(measure, model, rows, **limits, precision=config.chosen_precision)
    batch = rows.batch(0, range(min(4, rows.num_rows(0)))).to(model.device)
    ahead = trunk is bidirectional_trunk
    window = None if ahead else model.config.sliding_window
    attend = _NextTokenShares(CausalAttend(segments_BT=batch.segments_BT, bidirectional=ahead, window=window))
    model.model(batch.ids_BT, batch.positions_BT, attend)
    shares_LN = torch.stack(attend.shares)
    layer_idx, head_idx = divmod(int(shares_LN.argmax()), shares_LN.shape[1])
    return Peeking(loss(trunk=trunk).loss, loss(trunk=causal_trunk).loss, float(shares_LN.max()), layer_idx, head_idx)


def about_peeking(label: str, found: Peeking) -> str:
    """Describe the result."""
    return (
        f"How it cheats: in layer {found.layer_idx}, head {found.head_idx} of the {label} model gives "
        f"{found.share:.0%} of its attention to the very next token, which is the answer. Its validation loss is "
        f"{found.loss:.3f} nats with that token in sight, and {found.loss_without:.3f} when each token sees only those "
        "before it."
    )
