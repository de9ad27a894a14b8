"""Log-probabilities of chosen tokens, differentiable, without the logits of a whole batch in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.kernels.cpu_training import checkpointed

_CHUNK_LOGITS = 2**23  # that are held at a time: 32 MiB of float32


def token_logprobs(hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Return log P of each label, (N,), float32 and differentiable; chunks of logits are recomputed backwards."""
    step = max(1, _CHUNK_LOGITS // head_VD.shape[0])
    chunks = [
        checkpointed(_logprobs, hidden_ND[rows], head_VD, labels_N[rows])
        for rows in (slice(start, start + step) for start in range(0, len(labels_N), step))
    ]
    return torch.cat(chunks) if chunks else hidden_ND.new_zeros(0, dtype=torch.float32)


def _logprobs(hidden_CD: Tensor, head_VD: Tensor, labels_C: Tensor) -> Tensor:
    logits_CV = F.linear(hidden_CD, head_VD.to(hidden_CD.dtype)).float()
    below_CV = logits_CV - logits_CV.detach().amax(-1, keepdim=True)
    wide = torch.float32 if logits_CV.device.type == "mps" else torch.float64  # Metal has no float64
    log_sum_C = below_CV.exp().sum(-1, dtype=wide).log()  # as the sampler; F.cross_entropy's sum is off by 1e-5
    return (below_CV.gather(-1, labels_C[:, None]).squeeze(-1) - log_sum_C).float()
