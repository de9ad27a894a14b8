"""Random initial weights, for training and for benchmarks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llamarium.config import ModelConfig
from llamarium.model.llama import LlamaForCausalLM
from llamarium.model.norm import LlamaRMSNorm

_PIECE_ROWS = 8192  # rows of a table that are drawn at a time: 64 MB for Llama 3.2 1B


@torch.no_grad()
def init_weights(model: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """Draw every matrix from N(0, initializer_range) and set every norm's weight to one, in place.

    Args:
        model: On a real device.
        seed: Seed of a separate generator; the process's random state does not change.

    Source: transformers' `LlamaPreTrainedModel._init_weights`.
    """
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.normal_(0.0, model.config.initializer_range, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                module.bias.zero_()
    return model


class FreshEmbedding(nn.Module):
    """The embedding table of `init_weights` without the model: rows are drawn again when they are looked up.

    It stores only the generator's states, one per 8,192 rows. The rows equal those of
    `init_weights(LlamaForCausalLM(config), seed)` on a CPU to the bit. A tied table is drawn last, as the head, so all
    other weights are drawn once before it.

    Args:
        config: The model configuration.
        seed: As in `init_weights`.
    """

    states: Tensor

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = config.vocab_size, config.hidden_size
        self._std = config.initializer_range
        generator = torch.Generator().manual_seed(seed)
        for shape in _drawn_before_the_table(config):
            for rows in _pieces(shape[0]):
                self._draw(len(rows), shape[1], generator)
        states: list[Tensor] = []
        self._rows = list(_pieces(config.vocab_size))
        for rows in self._rows:
            states.append(generator.get_state())
            self._draw(len(rows), config.hidden_size, generator)
        self.register_buffer("states", torch.stack(states))

    def rows(self, ids: Any) -> Any:
        """Draw the rows of ids given as a numpy array, as `inspect.neighbors` needs them."""
        return self(torch.from_numpy(ids)).numpy()

    def forward(self, ids: Tensor) -> Tensor:
        """Draw the rows of integer ids (...): (..., embedding_dim), float32."""
        flat_M = ids.flatten()
        piece_M = (flat_M // _PIECE_ROWS).clamp(max=len(self._rows) - 1)
        found_MD = torch.empty(len(flat_M), self.embedding_dim)
        for piece in piece_M.unique().tolist():
            rows, is_here_M = self._rows[piece], piece_M == piece
            generator = torch.Generator()
            generator.set_state(self.states[piece].clone())  # torch reads it from the storage's beginning
            drawn_RD = self._draw(len(rows), self.embedding_dim, generator)
            found_MD[is_here_M] = drawn_RD[flat_M[is_here_M] - rows.start]
        return found_MD.view(*ids.shape, self.embedding_dim)

    def _draw(self, num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
        return torch.empty(num_rows, num_columns).normal_(0.0, self._std, generator=generator)


def _drawn_before_the_table(config: ModelConfig) -> Iterator[tuple[int, ...]]:
    """Yield the shapes that `init_weights` draws before the table gets the values that it keeps."""
    if not config.tie_word_embeddings:
        return
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module is not model.lm_head:
            yield tuple(module.weight.shape)


def _pieces(num_rows: int) -> Iterator[range]:
    """Cut rows so that pieces draw what the whole does: PyTorch draws 16 numbers at a time, the last ones once more."""
    last = max(0, num_rows // _PIECE_ROWS - 1) * _PIECE_ROWS
    yield from (range(start, start + _PIECE_ROWS) for start in range(0, last, _PIECE_ROWS))
    yield range(last, num_rows)
