"""The steps of `sampling/steps.py` in PyTorch: for logits on a GPU, and where the C kernels are missing.

A row's state is sparse on the host, as for the other implementation, and copied in each step. Only ids, and requested
log-probabilities, are copied back from the device.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llamarium.kernels.threads import one_torch_thread
from llamarium.runtime.runner import Logits
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.processor import Floats
from llamarium.sampling.row import Chosen, SamplingRow
from llamarium.sampling.steps import GOLDEN, MIX1, MIX2, splitmix64

_SMALL = 2**20  # logits that one thread handles as fast as several


class InTorch:
    """The steps on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._wide = torch.float32 if self._device.type == "mps" else torch.float64  # Metal has no float64

    @torch.inference_mode()
    def choose(self, rows: Sequence[SamplingRow], logits: Logits, processed: Mapping[int, Floats]) -> list[int]:
        """Return an id for each row, or -1; `processed` takes the place of the logits of some rows."""
        with _threads(logits):
            own_BV = self._processed(processed, self._float32(logits))
            adjusted_BV = self._masked(rows, self._penalized(rows, self._biased(rows, own_BV)))
            max_B1, greedy_B1 = adjusted_BV.max(-1, keepdim=True)  # the first of equals; NaN stays NaN
            ids_B = greedy_B1[:, 0]
            drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
            if drawn:
                at_R = self._int64(drawn)
                ids_R = self._draw([rows[i] for i in drawn], adjusted_BV[at_R], max_B1[at_R])
                ids_B = ids_B.index_copy(0, at_R, ids_R)
            ids: list[int] = torch.where(max_B1[:, 0].isfinite(), ids_B, -1).tolist()  # sync: the one of each step
            return ids

    @torch.inference_mode()
    def logprobs(self, logits_V: Logits, token_id: int, num_top: int) -> Chosen:
        """Report on a token that has been chosen."""
        with _threads(logits_V):
            raw_V = self._float32(logits_V)
            logprobs_V = raw_V.log_softmax(-1)
            top_ids = raw_V.sort(descending=True, stable=True).indices[:num_top]
            top = zip(top_ids.tolist(), logprobs_V[top_ids].tolist(), strict=True)  # sync: for rows that ask
            return Chosen(token_id, logprobs_V[token_id].item(), tuple(top))

    def _processed(self, processed: Mapping[int, Floats], logits_BV: Tensor) -> Tensor:
        """Step 0; the same tensor where no row has a function."""
        if not processed:
            return logits_BV
        return logits_BV.index_copy(0, self._int64([*processed]), self._float32(np.stack([*processed.values()])))

    def _biased(self, rows: Sequence[SamplingRow], logits_BV: Tensor) -> Tensor:
        """Step 1; the same tensor where no row has a bias."""
        bias = [(i, token_id, value) for i, row in enumerate(rows) for token_id, value in row.params.logit_bias.items()]
        if not bias:
            return logits_BV
        places_E = self._int64([e[0] for e in bias]), self._int64([e[1] for e in bias])
        return logits_BV.index_put(places_E, self._float32([e[2] for e in bias]), accumulate=True)

    def _penalized(self, rows: Sequence[SamplingRow], logits_BV: Tensor) -> Tensor:
        """Steps 2 and 3, but for grammars; the same tensor where no row has penalties."""
        penalized = [(i, row.params, row.penalties) for i, row in enumerate(rows) if row.penalties is not None]
        if not penalized:
            return logits_BV
        lengths = [len(penalties.ids) for _, _, penalties in penalized]

        def each(values: Sequence[float]) -> Any:
            return np.repeat(values, lengths)

        rows_E = self._int64(each([i for i, _, _ in penalized]))
        ids_E = self._int64(np.concatenate([penalties.ids for _, _, penalties in penalized]))
        counts_E = self._float32(np.concatenate([penalties.counts for _, _, penalties in penalized]))
        repetition_E = self._float32(each([p.repetition_penalty for _, p, _ in penalized]))
        values_E = logits_BV[rows_E, ids_E]
        values_E = torch.where(values_E > 0, values_E / repetition_E, values_E * repetition_E)
        values_E -= self._float32(each([p.frequency_penalty for _, p, _ in penalized])) * counts_E
        values_E -= self._float32(each([p.presence_penalty for _, p, _ in penalized])) * (counts_E > 0)
        return logits_BV.index_put((rows_E, ids_E), values_E)

    def _masked(self, rows: Sequence[SamplingRow], logits_BV: Tensor) -> Tensor:
        """Exclude what grammars do not allow, and ends before `min_tokens`; the same tensor if there are none."""
        early = [(i, token_id) for i, row in enumerate(rows) for token_id in row.excluded]
        if early:
            places_E = self._int64([e[0] for e in early]), self._int64([e[1] for e in early])
            logits_BV = logits_BV.index_put(places_E, self._float32([-math.inf]))
        constrained = [(i, row.constraint) for i, row in enumerate(rows) if row.constraint is not None]
        if not constrained:
            return logits_BV
        words_RW = self._int64(np.stack([constraint.mask() for _, constraint in constrained]).astype(np.int64))
        bits_RV = (words_RW[:, :, None] >> torch.arange(32, device=self._device) & 1).flatten(1)
        at_R = self._int64([i for i, _ in constrained])
        left_RV = logits_BV[at_R].masked_fill(bits_RV[:, : logits_BV.shape[1]] == 0, -math.inf)
        return logits_BV.index_copy(0, at_R, left_RV)

    def _draw(self, rows: Sequence[SamplingRow], logits_RV: Tensor, max_R1: Tensor) -> Tensor:
        """Steps 5 to 9 for the R rows that are drawn: their ids, shape (R,)."""
        params = [row.params for row in rows]
        temperature_R1 = self._float32([p.temperature for p in params])[:, None]
        kept_RV = self._kept(params, (logits_RV - max_R1) / temperature_R1) > 0
        # The maximum goes first, so that a small temperature overflows towards -inf only.
        scores_RV = logits_RV.to(self._wide).sub_(max_R1).div_(temperature_R1)
        scores_RV += self._noise(rows, logits_RV.shape[1])
        return scores_RV.masked_fill_(~kept_RV, -math.inf).argmax(-1)

    def _kept(self, params: Sequence[SamplingParams], scaled_RV: Tensor) -> Tensor:
        """Steps 6 to 8: probabilities before renormalizing, 0 for excluded tokens."""
        return self._min_p(params, self._top_p(params, self._top_k(params, scaled_RV).softmax(-1)))

    def _top_k(self, params: Sequence[SamplingParams], scaled_RV: Tensor) -> Tensor:
        """Step 6: -inf for excluded tokens; the same tensor if no row has it."""
        vocab_size = scaled_RV.shape[1]
        top_k = [p.top_k if p.top_k < vocab_size else 0 for p in params]
        if not any(top_k):
            return scaled_RV
        top_k_R1 = self._int64(top_k)[:, None]
        floor_R1 = scaled_RV.topk(max(top_k)).values.gather(1, (top_k_R1 - 1).clamp(min=0))
        return scaled_RV.masked_fill((scaled_RV < floor_R1) & (top_k_R1 > 0), -math.inf)

    def _top_p(self, params: Sequence[SamplingParams], probs_RV: Tensor) -> Tensor:
        """Step 7: 0 for excluded tokens, in place."""
        if all(p.top_p == 1 for p in params):
            return probs_RV
        top_p_R1 = torch.tensor([p.top_p for p in params], dtype=self._wide, device=self._device)[:, None]
        return probs_RV.masked_fill_(probs_RV < self._nucleus_floor(probs_RV, top_p_R1), 0)

    def _min_p(self, params: Sequence[SamplingParams], probs_RV: Tensor) -> Tensor:
        """Step 8: 0 for excluded tokens, in place."""
        if all(p.min_p == 0 for p in params):
            return probs_RV
        min_p_R1 = self._float32([p.min_p for p in params])[:, None]
        return probs_RV.masked_fill_(probs_RV < min_p_R1 * probs_RV.amax(-1, keepdim=True), 0)

    def _nucleus_floor(self, probs_RV: Tensor, top_p_R1: Tensor) -> Tensor:
        """Return the least probability inside each row's top-p set, 0 where top-p is off; shape (R, 1).

        Sorting a vocabulary of 128,256 on a CPU takes 11 ms, its 256 largest 0.6 ms, and those hold most nuclei: so a
        CPU looks at more only when they do not. The result is the same, since prefixes of a sorted row are.
        """
        is_on_R1, vocab_size = top_p_R1 < 1, probs_RV.shape[1]
        size = 256 if probs_RV.device.type == "cpu" else vocab_size
        while True:
            size = min(size, vocab_size)
            largest_RK = probs_RV.topk(size).values
            mass_RK = largest_RK.cumsum(-1, dtype=self._wide)
            if size == vocab_size or not (is_on_R1 & (mass_RK[:, -1:] < top_p_R1)).any():
                break
            size *= 16
        last_R1 = (mass_RK < top_p_R1).sum(-1, keepdim=True).clamp(max=size - 1)
        return torch.where(is_on_R1, largest_RK.gather(1, last_R1), 0)

    def _noise(self, rows: Sequence[SamplingRow], vocab_size: int) -> Tensor:
        """Return each token's g, shape (R, V)."""
        streams = [splitmix64(splitmix64(row.seed, 0), row.num_tokens) for row in rows]
        ids_V = torch.arange(1, vocab_size + 1, device=self._device)
        z_RV = self._int64([_signed(stream) for stream in streams])[:, None] + ids_V * _signed(GOLDEN)
        z_RV ^= _shifted(z_RV, 30)
        z_RV *= _signed(MIX1)
        z_RV ^= _shifted(z_RV, 27)
        z_RV *= _signed(MIX2)
        z_RV ^= _shifted(z_RV, 31)
        v_RV = _shifted(z_RV, 12).to(self._wide).add_(0.5).mul_(2.0**-52)
        return v_RV.neg_().log1p_().neg_().log_().neg_()

    def _int64(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)

    def _float32(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float32, device=self._device)


def _signed(bits: int) -> int:
    """The int64 of the same 64 bits: PyTorch multiplies and adds those modulo 2**64, too."""
    return bits - 2**64 if bits >= 2**63 else bits


def _shifted(z: Tensor, count: int) -> Tensor:
    """Shift to the right, with zeros from the left; PyTorch's own shift copies the sign."""
    return (z >> count).bitwise_and_(2 ** (64 - count) - 1)


def _threads(logits: Logits) -> AbstractContextManager[None]:
    return one_torch_thread() if math.prod(logits.shape) <= _SMALL else nullcontext()
