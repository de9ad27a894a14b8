"""PyTorch modules over GGUF blocks: weights stay packed in memory and are dequantized on use.

SmolLM2 in Q4_1 takes 5 bits per weight this way instead of 16. The buffer is called `weight` and holds the bytes of
the file, so the checkpoint's keys equal the module's keys.

In a tied model, the embedding and the head share one tensor; `LinearGGML` and `EmbeddingGGML` read the same layout.
"""

import torch
from torch import Tensor

from llamarium.errors import CheckpointError
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.quant.formats import block_format
from llamarium.quant.ggml.blocks import dequantize


class LinearGGML(QuantizedLinear):
    """A Linear over packed blocks.

    Attributes:
        type_name: A key of `GGML_TYPES`.
        weight: uint8, (out_features, row_bytes).
    """

    def __init__(self, weight: Tensor, type_name: str) -> None:
        """Wrap packed rows without copying them."""
        super().__init__(_num_columns(weight, type_name), len(weight))
        self.type_name = type_name
        self.register_buffer("weight", weight)

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of W."""
        return dequantize(self.weight[start:stop], self.type_name, dtype)

    def extra_repr(self) -> str:
        """Return the text of `nn.Linear`, and the format."""
        return f"{super().extra_repr()}, type={self.type_name}"


class EmbeddingGGML(QuantizedEmbedding):
    """An embedding over packed blocks, uint8 (num_embeddings, row_bytes): only rows looked up are dequantized."""

    def __init__(self, weight: Tensor, type_name: str, dtype: torch.dtype = torch.float32) -> None:
        """Wrap packed rows without copying them."""
        super().__init__(weight, (len(weight), _num_columns(weight, type_name)), type_name, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up integer ids (...): vectors (..., embedding_dim)."""
        rows = self.weight.index_select(0, ids.flatten())
        return dequantize(rows, self.type_name, self.dtype).view(*ids.shape, self.embedding_dim)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the whole table: (num_embeddings, embedding_dim)."""
        return dequantize(self.weight, self.type_name, dtype)


def _num_columns(weight: Tensor, type_name: str) -> int:
    block = block_format(type_name)
    if weight.dtype != torch.uint8 or weight.ndim != 2:
        raise CheckpointError(
            f"{type_name} weights are {weight.dtype} {tuple(weight.shape)}; expected uint8 (rows, row_bytes)"
        )
    return block.num_columns(weight.shape[1])
