"""Cross-entropy without materializing the logits of a whole batch.

With a vocabulary of 128,256 tokens, the logits are larger than everything else in a training step: 4 rows of 2,048
tokens take 4.2 GB in float32, and autograd would keep them twice. Here the LM head processes a chunk of positions at a
time and computes the gradient while the logits exist: d loss / d logits is the softmax minus one at the label. Only the
gradients of the hidden states and of the head are kept.

Source: the derivative of the log-softmax; computing it in the forward pass is from Liger Kernel
(`fused_linear_cross_entropy`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.train.data.batch import IGNORED

# Minimum number of logits per chunk: 32 MiB of float32. If the head is trained, a chunk has at least D / 2 rows, whose
# logits and log-probabilities take as much memory as the head's gradient. On a GPU it has at least 512 rows, or D.
_CHUNK_LOGITS = 2**23
_DEVICE_ROWS = 512


def cross_entropy_sum(hidden: Tensor, head_VD: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of -log P(label) over learned positions: a differentiable float32 scalar, 0 if there are none.

    It is a sum, not a mean, so that micro-batches with different numbers of learned tokens add up to one large batch;
    divide by the number of learned tokens of the whole step.

    Args:
        hidden: (..., D); normalized hidden states. Under autocast the product is computed in its dtype.
        head_VD: Weight of the LM head.
        labels: (...) int64; `IGNORED` for positions without a loss.
        weights: (...) float32; loss weight of each label. None means 1.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden_ND = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    weights_N = None if weights is None else weights.reshape(-1)
    loss = _CrossEntropySum.apply(hidden_ND, head_VD, labels.reshape(-1), weights_N)
    assert isinstance(loss, Tensor)
    return loss


class _CrossEntropySum(torch.autograd.Function):
    """Computes the gradients in the forward pass, and scales them in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor, weights_N: Tensor | None) -> Tensor:
        needs_hidden, needs_head, *_ = ctx.needs_input_grad
        learned_M = (labels_N != IGNORED).nonzero().squeeze(1)  # sync: the number of learned positions
        hidden_MD, labels_M = hidden_ND[learned_M], labels_N[learned_M]
        weights_M = None if weights_N is None else weights_N[learned_M]
        weight_VD = head_VD.to(hidden_ND.dtype)
        grad_hidden_MD = torch.empty_like(hidden_MD) if needs_hidden else None
        grad_head_VD = torch.zeros_like(head_VD) if needs_head else None
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for rows in _chunks(len(labels_M), head_VD, needs_head=needs_head):
            hidden_CD, labels_C = hidden_MD[rows], labels_M[rows]
            logits_CV = F.linear(hidden_CD, weight_VD).float()
            logprobs_CV = logits_CV.log_softmax(dim=-1)
            if weights_M is None:
                total += F.nll_loss(logprobs_CV, labels_C, reduction="sum")
            else:
                total += F.nll_loss(logprobs_CV, labels_C, reduction="none") @ weights_M[rows]
            if not (needs_hidden or needs_head):
                continue
            grad_CV = _grad_logits(logprobs_CV, labels_C)
            if weights_M is not None:
                grad_CV *= weights_M[rows].unsqueeze(1)
            grad_CV = grad_CV.to(hidden_ND.dtype)
            if grad_hidden_MD is not None:
                torch.mm(grad_CV, weight_VD, out=grad_hidden_MD[rows])
            if grad_head_VD is not None:
                _add_product(grad_head_VD, grad_CV.T, hidden_CD)
        grad_hidden_ND = None
        if grad_hidden_MD is not None:
            grad_hidden_ND = torch.zeros_like(hidden_ND).index_copy_(0, learned_M, grad_hidden_MD)
        ctx.gradients = (grad_hidden_ND, grad_head_VD)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grad_outputs
        if ctx.gradients is None:
            raise RuntimeError("the gradients of cross_entropy_sum can be had once; compute the loss anew")
        hidden, head = (None if kept is None else kept.mul_(grad) for kept in ctx.gradients)  # in place: V·D is large
        ctx.gradients = None
        return hidden, head, None, None


def _grad_logits(logprobs_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Convert log-probabilities in place to the gradient of the logits: softmax minus one at the label."""
    minus_one = logprobs_CV.new_full((1, 1), -1.0)
    return logprobs_CV.exp_().scatter_add_(1, labels_C.unsqueeze(1), minus_one.expand(len(labels_C), 1))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to `total`; if dtypes differ, as under autocast, this takes a temporary of its size."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(num_rows: int, head_VD: Tensor, *, needs_head: bool) -> list[slice]:
    """Split the rows into chunks; each chunk updates the head's whole gradient, so small chunks are slow."""
    vocab_size, width = head_VD.shape
    on_cpu = head_VD.device.type == "cpu"
    enough = (width // 2 if on_cpu else width) if needs_head else 1
    step = max(_CHUNK_LOGITS // vocab_size, enough, 1 if on_cpu else _DEVICE_ROWS)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
