"""How the next token is chosen, for any number of requests at once.

The model gives one logit per token of the vocabulary. From there to a token, in this order:

1. `logit_bias` is added.
2. `repetition_penalty` divides the positive and multiplies the negative logits of tokens that the prompt or the answer
   holds (CTRL, https://arxiv.org/abs/1909.05858, section 4.1).
3. `presence_penalty` and `frequency_penalty` are subtracted for tokens that the answer holds (OpenAI's definition).
4. At temperature 0 the largest logit wins, the lowest id among equals, and that is all.
5. `temperature` divides the logits.
6. `top_k` keeps the k largest.
7. `top_p` keeps the fewest largest whose probabilities, among those that `top_k` left, reach p.
8. `min_p` keeps those at least min_p times as probable as the most probable.
9. One is drawn in proportion to its probability.

This is the order of transformers' `_get_logits_processor` (bias, repetition, temperature, top-k, top-p, min-p), with
OpenAI's two penalties beside the third; vLLM's differs in that min-p comes before top-k. Each filter is a threshold on
the logits, so tokens that are exactly equal stay or go together and no order among them matters.

Reported log-probabilities are the model's own: log-softmax of the logits before any of these steps, as vLLM reports.

A draw costs one uniform number, and that number is a pure function of the request's seed and the count of tokens that
the request has so far. So a request gives the same tokens alone, in any batch, on any device with the same logits, and
when it is taken up again; nothing depends on the process or on the order of requests.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence
from contextlib import nullcontext
from ctypes import Array
from dataclasses import dataclass

import torch
from torch import Tensor

from llamarium.errors import LlamariumError, SamplingError
from llamarium.generation.params import SamplingParams
from llamarium.kernels import native
from llamarium.kernels.threads import one_torch_thread

__all__ = ["Sampled", "Sampler", "SamplingParams"]

_SMALL = 2**20  # logits that one thread handles as fast as several


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens; every tensor is on the sampler's device.

    Attributes:
        token_ids: Shape (B,), int64; -1 where a row's logits were NaN or had no finite maximum.
        logprobs: Shape (B,), float32, of the chosen tokens; None if no row asked.
        top_ids: Shape (B, M), int64, the M most probable, M the most that a row asked for; None if no row asked.
        top_logprobs: Shape (B, M), float32.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def ids(self) -> list[int]:
        """Return the ids on the host.

        Raises:
            LlamariumError: If a row's logits were NaN or infinite.
        """
        ids: list[int] = self.token_ids.tolist()  # sync: the one of each step
        if -1 in ids:
            raise LlamariumError(
                f"row {ids.index(-1)}: the model's logits are NaN or infinite, so no token can be chosen; the weights "
                "may be damaged (NaN), or the dtype too narrow for this model (try float32)"
            )
        return ids


class Sampler:
    """Chooses tokens for B requests at once; what each row gets depends on that row alone.

    Attributes:
        params: The requests of the rows.
        seeds: The seed that each row uses, the request's own or a fresh one.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str = "cpu",
        *,
        answers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Prepare B rows.

        Args:
            params: One per row, each with n 1 (`SamplingParams.rows` makes them).
            prompts: The token ids of each row's prompt.
            vocab_size: V.
            device: Where the logits will be.
            answers: The tokens that each row has so far, to take requests up again.

        Raises:
            SamplingError: If a row asks for more than one answer, or names ids or counts outside the vocabulary.
        """
        answers = [()] * len(params) if answers is None else answers
        assert len(params) == len(prompts) == len(answers) > 0
        for row in params:
            _check_against_vocabulary(row, vocab_size)
        self.params = tuple(params)
        self.seeds = tuple(secrets.randbits(63) if row.seed is None else row.seed for row in params)
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._wide = torch.float32 if self._device.type == "mps" else torch.float64  # Metal has no float64
        self._steps = [len(answer) for answer in answers]
        self._build()
        penalized = [i for i, row in enumerate(params) if row.penalizes]
        self._seen_PV = self._counts([[*prompts[i], *answers[i]] for i in penalized]) > 0
        self._counts_PV = self._counts([answers[i] for i in penalized])

    @torch.inference_mode()
    def sample(self, logits_BV: Tensor) -> Sampled:
        """Choose one token for each row and remember it.

        Args:
            logits_BV: The model's logits, shape (B, V), any float dtype; not changed.

        Raises:
            MemoryBudgetError: If there is no memory for the candidates.
        """
        assert logits_BV.shape == (len(self.params), self._vocab_size)
        with one_torch_thread() if logits_BV.numel() <= _SMALL else nullcontext():
            return self._sample(logits_BV)

    def _sample(self, logits_BV: Tensor) -> Sampled:
        raw_BV = logits_BV.float()
        adjusted_BV = self._adjusted(raw_BV)
        ids_B = self._choose(adjusted_BV) if self._choices is None else self._choose_in_c(adjusted_BV, self._choices)
        self._remember(ids_B)
        return self._report(raw_BV, ids_B)

    def _choose_in_c(self, adjusted_BV: Tensor, choices: "Array[native.Choice]") -> Tensor:
        """Steps 4 to 9 in C, which looks at few of the logits: for a large vocabulary in a fraction of the time."""
        for i in self._drawn_rows:
            choices[i].uniform = _uniform(self.seeds[i], self._steps[i])
        return native.choose(adjusted_BV.contiguous(), choices)

    def _choose(self, adjusted_BV: Tensor) -> Tensor:
        """Steps 4 to 9: (B,), -1 for a row that is NaN or has no finite maximum."""
        max_B1, greedy_B1 = adjusted_BV.max(-1, keepdim=True)  # the first of equals, so the lowest id; NaN stays NaN
        ids_B = greedy_B1[:, 0]
        if self._drawn.numel():
            ids_B = ids_B.index_copy(0, self._drawn, self._draw(self._kept(adjusted_BV, max_B1)))
        return torch.where(max_B1[:, 0].isfinite(), ids_B, -1)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone, in this order."""
        places = {row: place for place, row in enumerate(i for i, p in enumerate(self.params) if p.penalizes)}
        penalized = torch.tensor([places[row] for row in rows if row in places], dtype=torch.long, device=self._device)
        self._seen_PV, self._counts_PV = self._seen_PV[penalized], self._counts_PV[penalized]
        self.params = tuple(self.params[row] for row in rows)
        self.seeds = tuple(self.seeds[row] for row in rows)
        self._steps = [self._steps[row] for row in rows]
        self._build()

    def _build(self) -> None:
        """Make the per-row tensors: P rows with penalties, R rows that are drawn, E entries of logit bias."""
        params = self.params
        penalized = [p for p in params if p.penalizes]
        self._penalized = self._ids([i for i, p in enumerate(params) if p.penalizes])
        self._repetition_P1 = self._column([p.repetition_penalty for p in penalized])
        self._presence_P1 = self._column([p.presence_penalty for p in penalized])
        self._frequency_P1 = self._column([p.frequency_penalty for p in penalized])

        bias = [(i, token_id, value) for i, p in enumerate(params) for token_id, value in p.logit_bias.items()]
        self._bias_rows_E, self._bias_ids_E = self._ids([e[0] for e in bias]), self._ids([e[1] for e in bias])
        self._bias_E = self._column([e[2] for e in bias])[:, 0]

        drawn = [p for p in params if p.temperature > 0]
        self._drawn_rows = [i for i, p in enumerate(params) if p.temperature > 0]
        self._drawn = self._ids(self._drawn_rows)
        self._temperature_R1 = self._column([p.temperature for p in drawn])
        top_k = [self._few(p.top_k) for p in drawn]
        self._top_k_R1, self._max_top_k = self._ids(top_k)[:, None], max(top_k, default=0)
        self._top_p_R1 = self._column([p.top_p for p in drawn], self._wide)
        self._any_top_p = any(p.top_p < 1 for p in drawn)
        self._min_p_R1 = self._column([p.min_p for p in drawn])
        self._any_min_p = any(p.min_p > 0 for p in drawn)
        self._choices = None
        if self._device.type == "cpu" and native.library() is not None:
            rows = [native.Choice(p.temperature, p.min_p, self._few(p.top_k), p.top_p, 0.0) for p in params]
            self._choices = (native.Choice * len(rows))(*rows)
        self._num_top = max((-1 if p.logprobs is None else p.logprobs for p in params), default=-1)

    def _few(self, top_k: int) -> int:
        """Return top_k, or 0 where it keeps the whole vocabulary."""
        return top_k if top_k < self._vocab_size else 0

    def _adjusted(self, logits_BV: Tensor) -> Tensor:
        """Steps 1 to 3: bias and penalties; the same tensor where no row has any."""
        if not (self._bias_E.numel() or self._penalized.numel()):
            return logits_BV
        out_BV = logits_BV.index_put((self._bias_rows_E, self._bias_ids_E), self._bias_E, accumulate=True)
        rows_PV = out_BV[self._penalized]
        scaled_PV = torch.where(rows_PV > 0, rows_PV / self._repetition_P1, rows_PV * self._repetition_P1)
        rows_PV = torch.where(self._seen_PV, scaled_PV, rows_PV)
        rows_PV -= self._frequency_P1 * self._counts_PV
        rows_PV -= self._presence_P1 * (self._counts_PV > 0)
        return out_BV.index_copy_(0, self._penalized, rows_PV)

    def _kept(self, logits_BV: Tensor, max_B1: Tensor) -> Tensor:
        """Steps 5 to 8 for the R rows that are drawn: probabilities before renormalizing, 0 for what is out."""
        # The maximum goes first: a small temperature then overflows towards -inf only.
        scaled_RV = logits_BV[self._drawn].sub_(max_B1[self._drawn]).div_(self._temperature_R1)
        if self._max_top_k:
            largest_RK = scaled_RV.topk(self._max_top_k).values
            floor_R1 = largest_RK.gather(1, (self._top_k_R1 - 1).clamp(min=0))
            scaled_RV.masked_fill_((scaled_RV < floor_R1) & (self._top_k_R1 > 0), -math.inf)
        probs_RV = scaled_RV.softmax(-1)
        if self._any_top_p:
            probs_RV.masked_fill_(probs_RV < self._nucleus_floor(probs_RV), 0)
        if self._any_min_p:
            probs_RV.masked_fill_(probs_RV < self._min_p_R1 * probs_RV.amax(-1, keepdim=True), 0)
        return probs_RV

    def _draw(self, probs_RV: Tensor) -> Tensor:
        """Step 9: the ids of the R rows, shape (R,)."""
        mass_RV = probs_RV.cumsum(-1, dtype=self._wide)
        total_R1 = mass_RV[:, -1:]
        uniform_R1 = self._column([_uniform(self.seeds[i], self._steps[i]) for i in self._drawn_rows], self._wide)
        uniform_R1.clamp_(max=1 - torch.finfo(self._wide).eps / 2)  # rounded to float32, a number may have become 1
        # A token is drawn when the target falls below its cumulated mass and not below its predecessor's.
        return torch.searchsorted(mass_RV, uniform_R1 * total_R1, right=True)[:, 0]

    def _nucleus_floor(self, probs_RV: Tensor) -> Tensor:
        """Return the least probability inside each row's top-p set, 0 where top-p is off; shape (R, 1).

        Sorting a vocabulary of 128,256 on a CPU takes 11 ms, its 256 largest 0.6 ms, and those hold most nuclei: so a
        CPU looks at more only when they do not. The result is the same, since prefixes of a sorted row are.
        """
        is_on_R1 = self._top_p_R1 < 1
        size = 256 if probs_RV.device.type == "cpu" else self._vocab_size
        while True:
            size = min(size, self._vocab_size)
            largest_RK = probs_RV.topk(size).values
            mass_RK = largest_RK.cumsum(-1, dtype=self._wide)
            if size == self._vocab_size or not (is_on_R1 & (mass_RK[:, -1:] < self._top_p_R1)).any():
                break
            size *= 16
        last_R1 = (mass_RK < self._top_p_R1).sum(-1, keepdim=True).clamp(max=size - 1)
        return torch.where(is_on_R1, largest_RK.gather(1, last_R1), 0)

    def _remember(self, ids_B: Tensor) -> None:
        self._steps = [step + 1 for step in self._steps]
        if self._penalized.numel():
            ids_P1 = ids_B[self._penalized, None].clamp(min=0)  # a row at -1 ends with an error
            self._seen_PV.scatter_(1, ids_P1, True)
            self._counts_PV.scatter_add_(1, ids_P1, torch.ones_like(ids_P1, dtype=torch.int32))

    def _report(self, raw_BV: Tensor, ids_B: Tensor) -> Sampled:
        if self._num_top < 0:
            return Sampled(ids_B)
        logprobs_BV = raw_BV.log_softmax(-1)
        chosen_B = logprobs_BV.gather(1, ids_B[:, None].clamp(min=0))[:, 0]
        top = logprobs_BV.topk(self._num_top)
        return Sampled(ids_B, chosen_B, top.indices, top.values)

    def _counts(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Count each row's tokens: shape (P, V), int32."""
        counts_PV = torch.zeros(len(rows), self._vocab_size, dtype=torch.int32)
        for row, ids in enumerate(rows):
            counts_PV[row] = torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=self._vocab_size)
        return counts_PV.to(self._device)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)[:, None]


def _check_against_vocabulary(row: SamplingParams, vocab_size: int) -> None:
    if row.n != 1:
        raise SamplingError(f"n is {row.n}; a row of the sampler is one answer: expected SamplingParams.rows()")
    if row.logprobs is not None and row.logprobs > vocab_size:
        raise SamplingError(f"logprobs is {row.logprobs}; expected at most the vocabulary's {vocab_size}")
    outside = [token_id for token_id in row.logit_bias if token_id >= vocab_size]
    if outside:
        raise SamplingError(f"logit_bias names token {outside[0]}; expected ids below the vocabulary's {vocab_size}")


def _uniform(seed: int, step: int) -> float:
    """Return number `step` of the stream `seed`, uniform in [0, 1) with 53 bits.

    A keyed hash of a counter rather than a generator's state: 0.8 us, no state to save, and neighbouring seeds are
    unrelated (torch's CPU generator takes 32 bits of a seed).
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, step), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
