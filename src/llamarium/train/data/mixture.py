"""Mixtures of data: several sources, each with a weight.

    a.jsonl=2,b.parquet=0.5             in the shell
    {"a.jsonl": 2, "b.parquet": 0.5}    in Python and TOML, for any name

The probability of a source is its weight divided by the sum of the weights: a.jsonl is drawn four times out of five. A
draw is an example, a pair or a prompt; in pretraining it is a row, so that shares are in tokens. An epoch has as many
draws as the sources have units in total, in an order determined by the seed. Each source is traversed in passes, each
in a new order, so no unit is drawn again before all others of its source. A source that runs out within an epoch is
repeated; one that does not continues in the next epoch.

Source: Megatron-LM's blends of data sets, and `probabilities` of `interleave_datasets` in Hugging Face's datasets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from llamarium.errors import TrainingError, counted, escape, show_value
from llamarium.train.data.order import permutation


@dataclass(frozen=True, slots=True)
class Mixture:
    """A weighted mixture of sources, whose units are examples, pairs, prompts or rows.

    Attributes:
        weights: Weight of each source, by name.
        sizes: Number of units of each source.
        seed: Seed of the order; None draws the sources one after the other in file order, for validation.
    """

    weights: Mapping[str, float]
    sizes: Sequence[int]
    seed: int | None

    @property
    def counts(self) -> list[int]:
        """Draws of each source per epoch, rounded, at least 1."""
        scale = sum(self.sizes) / sum(self.weights.values())
        return [max(1, round(weight * scale)) for weight in self.weights.values()]

    def draws(self, epoch: int) -> Tensor:
        """Return an epoch's draws, int64 (n, 3): source, number of completed passes over it, and unit within it."""
        return _draws(tuple(self.sizes), tuple(self.counts), self.seed, epoch)

    def units(self, epoch: int) -> Tensor:
        """Return an epoch's draws as unit indices over all sources, int64 (n,)."""
        starts, drawn = torch.tensor([0, *self.sizes]).cumsum(0), self.draws(epoch)
        return starts[drawn[:, 0]] + drawn[:, 2]

    def split(self, validation: float) -> tuple[tuple[list[int], "Mixture"], tuple[list[int], "Mixture"]]:
        """Return the units and mixtures for training, and for validation (the last share of each source, fixed order).

        TrainingError if either would have no unit of a source.
        """
        parts: tuple[list[int], list[int]] = [], []
        held: list[int] = []
        for name, size in zip(self.weights, self.sizes, strict=True):
            held.append(max(1, round(size * validation)) if validation > 0 else 0)
            if not 0 < held[-1] < size:
                raise TrainingError(
                    f"{f'{escape(name)}: ' * bool(name)}of {counted(size, 'example')}, validation "
                    f"{show_value(validation)} takes {held[-1]}; expected at least one to validate and one to train "
                    "on: give more examples, or no validation (--validation 0)"
                )
            start = sum(map(len, parts))
            parts[0].extend(range(start, start + size - held[-1]))
            parts[1].extend(range(start + size - held[-1], start + size))
        kept = [size - count for size, count in zip(self.sizes, held, strict=True)]
        return (parts[0], replace(self, sizes=kept)), (parts[1], replace(self, sizes=held, seed=None))

    @property
    def label(self) -> str:
        """Part of the fingerprint that describes several sources; empty for one."""
        return f" {self.counts} {[*self.sizes]}" if len(self.sizes) > 1 else ""

    def sums(self, tokens: Sequence[int]) -> list[int]:
        """Return the sum of `tokens` for each source; every unit has the same number of entries."""
        each = len(tokens) // sum(self.sizes)
        return [sum(tokens[a * each : b * each]) for a, b in pairwise([0, *accumulate(self.sizes)])]

    def about(self, tokens: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
        """Return each source's share of draws, passes per epoch and `tokens` as JSON values; empty for one source."""
        rows = zip(self.weights.items(), self.counts, self.sizes, tokens, strict=True)
        sources = [
            {"source": name, "weight": weight, "share": n / sum(self.counts), "passes": n / size, "tokens": held}
            for (name, weight), n, size, held in rows
        ]
        return {"sources": sources} if len(sources) > 1 else {}


@lru_cache(maxsize=4)  # a batch may span two epochs, and validation alternates with training
def _draws(sizes: Sequence[int], counts: Sequence[int], seed: int | None, epoch: int) -> Tensor:
    draws: list[Tensor] = []
    for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        first, end = epoch * count, (epoch + 1) * count
        for done in range(first // size, (end - 1) // size + 1):
            order = permutation(size, seed, f"dialogs {source}" if source else "dialogs", done)
            units = order[max(0, first - done * size) : end - done * size]
            draws.append(torch.stack([torch.full_like(units, source), torch.full_like(units, done), units], 1))
    drawn = torch.cat(draws)
    return drawn if len(sizes) == 1 else drawn[permutation(len(drawn), seed, "mixture", epoch)]
