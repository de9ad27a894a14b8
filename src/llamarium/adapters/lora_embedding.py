"""LoRA for the embedding table: a trained correction of low rank to rows that are looked up.

A frozen table `E` (V, D) gets `A` (r, V) and `B` (D, r), so the row of a token is

    E[token] + scale * B A[:, token]

As in PEFT, A begins as zeros and B is drawn; DoRA scales each feature, a column of E, by its learned length; dropout
does not apply; and a head that is tied to the table is not corrected.

Source: peft, `tuners/lora/layer.py` (`Embedding`) and `dora.py` (`DoraEmbeddingLayer`).
"""

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.adapters.config import LoRAConfig
from llamarium.quant.base import QuantizedEmbedding

_CHUNK_WEIGHTS = 2**20  # of the table in float32 at a time: 4 MiB


class LoRAEmbedding(nn.Module):
    """A frozen embedding table with a trained correction of low rank.

    Args:
        base: The table, plain or quantized. It is frozen.
        rank: Of the correction.
        scale: What the correction is multiplied by.
        generator: On the CPU; draws B. Without it the adapter is left uninitialized.

    Attributes:
        lora_embedding_A: (r, num_embeddings), zeros.
        lora_embedding_B: (embedding_dim, r), normal with standard deviation 1.
        lora_magnitude_vector: (embedding_dim,), DoRA's lengths; None without DoRA.
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
        """Initialize to no correction: A to zeros, the lengths to those of the table's columns."""
        drawn = torch.empty(self.lora_embedding_B.shape).normal_(generator=generator)
        self.lora_embedding_B.copy_(drawn)  # drawn on the CPU, so that it is the same on every device
        self.lora_embedding_A.zero_()
        if self.lora_magnitude_vector is not None:
            self.lora_magnitude_vector.copy_(self.column_norms())

    def forward(self, ids: Tensor) -> Tensor:
        """Look up: (...) to (..., embedding_dim); in the table's dtype, under autocast in float32."""
        y = self.base_layer(ids)
        half = torch.is_autocast_enabled(ids.device.type)
        if not self.enabled:
            return y.float() if half else y
        low = F.embedding(ids, self.lora_embedding_A.T) * self.scale
        both = y.float() + F.linear(low, self.lora_embedding_B)
        if self.lora_magnitude_vector is not None:
            both = both * (self.lora_magnitude_vector / self.column_norms())
        return both if half else both.to(y.dtype)

    @torch.no_grad()
    def merged_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the effective table in float32, a range of rows at a time: start, stop, (rows, embedding_dim)."""
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
        """Return rows of the table without the correction: (stop - start, embedding_dim), float32."""
        return self.base_layer(torch.arange(start, stop, device=self.lora_embedding_A.device)).float()

    def _corrected_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        step = max(1, _CHUNK_WEIGHTS // self.embedding_dim)
        with torch.autocast(self.lora_embedding_A.device.type, enabled=False):
            for start in range(0, self.num_embeddings, step):
                stop = min(start + step, self.num_embeddings)
                low = self.lora_embedding_A[:, start:stop].T * self.scale
                yield start, stop, self.base_rows(start, stop) + low @ self.lora_embedding_B.T


def table_of(embedding: nn.Module) -> nn.Module:
    """Return the table itself, plain or quantized, of a model's embedding with or without an adapter."""
    return embedding.base_layer if isinstance(embedding, LoRAEmbedding) else embedding


def is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding table that can get an adapter."""
    return isinstance(module, nn.Embedding | QuantizedEmbedding)
