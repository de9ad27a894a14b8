"""Choosing the next token from its logits: our sampler in C and in PyTorch, and what transformers does.

    python bench/choose.py [--vocab-size 128256]

Each way chooses from the same logits, in turn; a figure is the median of the rounds' mean of 20 choices. Logits are
normal with a spread of 3, as a model's are about, and of 0.5, where half of the vocabulary stays.
"""

import time
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import common
from llamarium.kernels import native
from llamarium.sampling.params import SamplingParams
from llamarium.sampling.row import SamplingRow
from llamarium.sampling.sampler import Sampler

NUM_CHOICES = 20
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "greedy": (3.0, {"temperature": 0.0}),
    "temperature": (3.0, {"temperature": 0.8}),
    "top_k 40, top_p 0.9": (3.0, {"temperature": 0.8, "top_k": 40, "top_p": 0.9}),
    "top_p 0.9": (3.0, {"temperature": 0.8, "top_p": 0.9}),
    "top_p 0.9, nearly flat": (0.5, {"temperature": 0.8, "top_p": 0.9}),
}


def main() -> None:
    """Measure each case each way."""
    parser = common.parser(__doc__)
    parser.add_argument("--vocab-size", type=int, default=128256, help="logits (default 128256, as Llama 3 has)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for name, (spread, chosen) in CASES.items():
        logits_1V = torch.randn(1, options.vocab_size, generator=torch.Generator().manual_seed(0)) * spread
        params = SamplingParams(**chosen, seed=1)
        in_c = Sampler(options.vocab_size)
        with mock.patch.object(native, "library", return_value=None):
            in_torch = Sampler(options.vocab_size)
        row, logits = [SamplingRow(params, [0], options.vocab_size)], logits_1V.numpy()
        sides = {
            "C": partial(microseconds, lambda s=in_c, rows=row, x=logits: s.sample(rows, x)),
            "PyTorch": partial(microseconds, lambda s=in_torch, rows=row, x=logits: s.sample(rows, x)),
            "transformers": partial(microseconds, lambda p=params, x=logits_1V: as_transformers(x, p)),
        }
        medians = {side: value["microseconds"] for side, value in common.alternate(options.rounds, sides).items()}
        rows.append({"microseconds": name, **{side: medians[side] for side in sides}})
        results[name] = medians
    common.report("choose", options, rows, results)


def microseconds(choose: Any) -> dict[str, float]:
    """Return the mean time of a choice."""
    begin = time.perf_counter()
    for _ in range(NUM_CHOICES):
        choose()
    return {"microseconds": (time.perf_counter() - begin) / NUM_CHOICES * 1e6}


def as_transformers(logits_1V: Tensor, params: SamplingParams) -> list[int]:
    """Choose as `generate` of transformers does: its processors, then a draw."""
    if params.temperature == 0:
        return logits_1V.argmax(-1).tolist()
    ids_1T = torch.zeros(1, 1, dtype=torch.long)
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    for warper in warpers:
        logits_1V = warper(ids_1T, logits_1V)
    return torch.multinomial(logits_1V.softmax(-1), num_samples=1)[:, 0].tolist()


if __name__ == "__main__":
    main()
