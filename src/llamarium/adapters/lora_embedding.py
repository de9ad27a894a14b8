"""LoRA for the embedding table: a low-rank correction to the rows that are looked up.

A frozen table `E` (V, D) gets `A` (r, V) and `B` (D, r), so the row of a token is

    E[token] + scale * B A[:, token]

As in PEFT, A is initialized to zeros and B randomly; DoRA scales each column of E by a learned magnitude; dropout does
not apply; and a tied head is not corrected.

Source: peft, `tuners/lora/layer.py` (`Embedding`) and `dora.py` (`DoraEmbeddingLayer`).
"""

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.adapters.config import LoRAConfig
from llamarium.quant.base import QuantizedEmbedding

_CHUNK_WEIGHTS = 2**20  # weights of the table processed at a time: 4 MiB in float32


class LoRAEmbedding(nn.Module):
    """A frozen embedding table with a trainable low-rank correction.

    Args:
        base: The table, plain or quantized. It is frozen.
        config: LoRA settings.
        generator: CPU generator that initializes B; without it the adapter is not initialized.
        rank: Rank of the correction.
        scale: Factor of the correction.

    Attributes:
        lora_embedding_A: (r, num_embeddings), initialized to zeros.
        lora_embedding_B: (embedding_dim, r), initialized from a standard normal distribution.
        lora_magnitude_vector: DoRA's magnitudes, (embedding_dim,); None without DoRA.
    """

    def __init__(
        self, base: nn.Module, config: LoRAConfig, generator: torch.Generator | None = None, *, rank: int, scale: float
    ) -> None:
        super().__init__()
        self.config, self.rank, self.scale = config, rank, scale
        self.num_embeddings = cast(int, base.num_embeddings)
        self.embedding_dim = cast(int, base.embedding_dim)
        device = cast(Tensor, base.weight).device
        self.base_layer = base.requires_grad_(False)
        self.lora_embedding_A = nn.Parameter(torch.empty(rank, self.num_embeddings, device=device))
        self.lora_embedding_B = nn.Parameter(torch.empty(self.embedding_dim, rank, device=device))
        magnitude = torch.empty(self.embedding_dim, device=device) if config.use_dora else None
        self.lora_magnitude_vector = None if magnitude is None else nn.Parameter(magnitude)
        self.enabled = True
        self.train(base.training)
        if generator is not None:
            self._begin(generator)

    @torch.no_grad()
    def _begin(self, generator: torch.Generator) -> None:
        """Initialize B randomly, A to zeros, and magnitudes to the columns' norms, so that the correction is zero."""
        values = torch.empty(self.lora_embedding_B.shape).normal_(generator=generator)
        self.lora_embedding_B.copy_(values)  # drawn on the CPU, for the same values on every device
        self.lora_embedding_A.zero_()
        if self.lora_magnitude_vector is not None:
            self.lora_magnitude_vector.copy_(self.column_norms())

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (..., embedding_dim) of ids (...), in the table's dtype, or float32 under autocast."""
        y = self.base_layer(ids)
        is_autocast = torch.is_autocast_enabled(ids.device.type)
        if not self.enabled:
            return y.float() if is_autocast else y
        low = F.embedding(ids, self.lora_embedding_A.T) * self.scale
        corrected = y.float() + F.linear(low, self.lora_embedding_B)
        if self.lora_magnitude_vector is not None:
            corrected = corrected * (self.lora_magnitude_vector / self.column_norms())
        return corrected if is_autocast else corrected.to(y.dtype)

    @torch.no_grad()
    def merged_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the corrected table in ranges of rows: start, stop, float32 (rows, embedding_dim)."""
        gain = None if self.lora_magnitude_vector is None else self.lora_magnitude_vector / self.column_norms()
        for start, stop, rows in self._corrected_rows():
            yield start, stop, rows if gain is None else rows * gain

    @torch.no_grad()
    def column_norms(self) -> Tensor:
        """Return the norms of the corrected table's columns: (embedding_dim,), float32, a constant to autograd."""
        squares = torch.zeros(self.embedding_dim, dtype=torch.float64, device=self.lora_embedding_B.device)
        for _, _, rows in self._corrected_rows():
            squares += rows.double().square().sum(dim=0)
        return squares.sqrt().float()

    @torch.no_grad()
    def base_rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of the frozen table, dequantized: float32 (stop - start, embedding_dim)."""
        return self.base_layer(torch.arange(start, stop, device=self.lora_embedding_A.device)).float()

    def _corrected_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        step = max(1, _CHUNK_WEIGHTS // self.embedding_dim)
        with torch.autocast(self.lora_embedding_A.device.type, enabled=False):
            for start in range(0, self.num_embeddings, step):
                stop = min(start + step, self.num_embeddings)
                low = self.lora_embedding_A[:, start:stop].T * self.scale
                yield start, stop, self.base_rows(start, stop) + low @ self.lora_embedding_B.T


def table_of(embedding: nn.Module) -> nn.Module:
    """Return the base table, plain or quantized, of an embedding with or without an adapter."""
    return embedding.base_layer if isinstance(embedding, LoRAEmbedding) else embedding


def is_table(module: nn.Module) -> bool:
    """Return whether a module is an embedding table that can get an adapter."""
    return isinstance(module, nn.Embedding | QuantizedEmbedding)
