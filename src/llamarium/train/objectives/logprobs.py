"""Differentiable log-probabilities of given tokens, without materializing the logits of a whole batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarium.kernels.cpu_training import checkpointed
from llamarium.model import LlamaForCausalLM
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.objectives.base import Trunk, head_weight

_CHUNK_LOGITS = 2**23  # logits per chunk: 32 MiB of float32


def learned_logprobs(model: LlamaForCausalLM, batch: TrainingBatch, trunk: Trunk) -> Tensor:
    """Return the log-probability of each learned token: (N,), float32, row by row."""
    hidden_BTD = trunk(model, batch)
    places_N = (batch.labels_BT.flatten() != IGNORED).nonzero().squeeze(1)
    labels_N = batch.labels_BT.flatten()[places_N]
    return token_logprobs(hidden_BTD.flatten(0, 1)[places_N], head_weight(model), labels_N)


def token_logprobs(hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Return the log-probability of each label: (N,), float32; the backward pass recomputes the logits in chunks."""
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
    log_sum_C = below_CV.exp().sum(-1, dtype=wide).log()  # as in the sampler; F.cross_entropy is off by up to 1e-5
    return (below_CV.gather(-1, labels_C[:, None]).squeeze(-1) - log_sum_C).float()
