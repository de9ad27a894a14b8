"""Cross-entropy that never holds the logits of a whole batch.

With 128,256 words the logits of a batch are larger than everything else in a training step: 4 rows of 2,048 tokens make
4.2 GB in float32, and autograd would keep them twice. Here a few rows at a time go through the head, and their gradient
is computed on the spot, while their logits are at hand: d loss / d logits is softmax minus one at the label, so nothing
has to be kept but the gradients of the hidden states and of the head.

Source: the derivative is that of the log-softmax; computing it in the forward pass is Liger Kernel's idea
(`fused_linear_cross_entropy`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.train.batch import IGNORED

# Logits that are held at a time: 32 MiB of float32.
_CHUNK_LOGITS = 2**23


def cross_entropy_sum(hidden: Tensor, head_VD: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of -log P(label) over all positions that are learned, differentiable.

    A sum and not a mean, so that micro-batches of different numbers of learned tokens add up to what one large batch
    would give: divide by the number of learned tokens of the whole step.

    Args:
        hidden: (..., D); the normalised hidden states. Under autocast the product is computed in its dtype.
        head_VD: The head's weight.
        labels: (...) int64; `IGNORED` where nothing is learned.

    Returns:
        A float32 scalar; 0 where nothing is learned.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden_ND = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    loss = _CrossEntropySum.apply(hidden_ND, head_VD, labels.reshape(-1))
    assert isinstance(loss, Tensor)
    return loss


class _CrossEntropySum(torch.autograd.Function):
    """The gradients are computed forwards, and scaled backwards."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> Tensor:
        needs_hidden, needs_head, _ = ctx.needs_input_grad
        weight_VD = head_VD.to(hidden_ND.dtype)
        grad_hidden_ND = torch.zeros_like(hidden_ND) if needs_hidden else None
        grad_head_VD = torch.zeros_like(head_VD) if needs_head else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for rows in _chunks(len(labels_N), len(head_VD)):
            hidden_CD, labels_C = hidden_ND[rows], labels_N[rows]
            logits_CV = F.linear(hidden_CD, weight_VD).float()
            logprobs_CV = logits_CV.log_softmax(dim=-1)
            total += F.nll_loss(logprobs_CV, labels_C, ignore_index=IGNORED, reduction="sum")
            if not (needs_hidden or needs_head):
                continue
            grad_CV = _grad_logits(logprobs_CV, labels_C).to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_head_VD is not None:
                grad_head_VD += grad_CV.T @ hidden_CD
        ctx.gradients = (grad_hidden_ND, grad_head_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grad_outputs
        if ctx.gradients is None:
            raise RuntimeError("the gradients of cross_entropy_sum can be had once; compute the loss anew")
        hidden, head = (None if kept is None else kept.mul_(grad) for kept in ctx.gradients)  # in place: V·D is large
        ctx.gradients = None
        return hidden, head, None


def _grad_logits(logprobs_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Turn log-probabilities into softmax - one at the label, in place; zero where nothing is learned."""
    learned_C1 = (labels_C != IGNORED).unsqueeze(1)
    grad_CV = logprobs_CV.exp_().mul_(learned_C1)
    return grad_CV.scatter_add_(1, labels_C.clamp(min=0).unsqueeze(1), -learned_C1.to(grad_CV.dtype))


def _chunks(num_rows: int, vocab_size: int) -> list[slice]:
    step = max(1, _CHUNK_LOGITS // vocab_size)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
