"""Calibration: measure the inputs of a model's Linears on a sample of text.

All windows of the sample are run through one layer before the next is read from disk, so only one layer in float32, its
statistics, and the sample's hidden states are in memory. A layer's inputs are measured while the layer itself is not
quantized yet; then its Linears are quantized, and the next layer receives the outputs of the quantized layer. Thus each
layer is fitted to the inputs that it will have, including the quantization errors of the layers before it.

For inputs X (one row per token), the statistics are either the mean square of each column, the cost of an error in that
column (`fit`), or X^T X, the cost for pairs of columns (`gptq`).

Source: the order of Frantar et al. 2022, "GPTQ", section 5, and of llama.cpp's importance matrix.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from llamarium.attention import Attend
from llamarium.errors import InputError, counted
from llamarium.model.llama import LlamaDecoderLayer
from llamarium.model.rope import Rotary
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.pieces import encode_pieces

LINEARS_BY_INPUT: Mapping[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""Linears of a layer that share an input, by the first of them."""

_BATCH_TOKENS = 2048  # tokens per forward pass of a layer; bounds the memory of activations


def sample_windows(tokenizer: Tokenizer, text: str, *, samples: int, context: int) -> Tensor:
    """Take up to `samples` evenly spaced windows of `context` tokens from a text, including BOS.

    Returns:
        Token ids, int64 (windows, context).

    Raises:
        InputError: If the text is shorter than one window.
    """
    bos = [tokenizer.special.bos] if tokenizer.special.add_bos and tokenizer.special.bos is not None else []
    ids = list(chain.from_iterable(encode_pieces(tokenizer, text)))
    width = context - len(bos)
    num_windows = min(samples, len(ids) // width) if width > 0 else 0
    if num_windows == 0:
        raise InputError(
            f"the text to calibrate with has {counted(len(ids), 'token')}; expected at least "
            f"{max(width, 1)}, one window of "
            f"{context}: give a longer text, or a smaller context"
        )
    gap = (len(ids) - width) // max(1, num_windows - 1)
    starts = [i * gap for i in range(num_windows)]
    return torch.tensor([bos + ids[start : start + width] for start in starts])


class InputStatistics:
    """Statistics of the inputs of a layer's Linears: X^T X if `wants_gram`, else the mean square of each column."""

    def __init__(self, *, wants_gram: bool) -> None:
        self._wants_gram = wants_gram
        self._sums: dict[str, Tensor] = {}
        self._num_tokens: dict[str, int] = {}

    def watch(self, layer: nn.Module, hooks: ExitStack) -> None:
        """Collect all inputs of the layer's Linears until `hooks` is closed."""
        for name in LINEARS_BY_INPUT:
            handle = layer.get_submodule(name).register_forward_pre_hook(partial(self._note, name))
            hooks.callback(handle.remove)

    def of(self, name: str) -> Tensor:
        """Return the statistics of a Linear, float32: the mean of x x^T, (in, in), or of x^2, (in,)."""
        first = next(first for first, names in LINEARS_BY_INPUT.items() if name in names)
        return self._sums[first] / self._num_tokens[first]

    def _note(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x_MD = inputs[0].flatten(0, -2).float()
        product = x_MD.T @ x_MD if self._wants_gram else x_MD.square().sum(0)
        if name in self._sums:
            self._sums[name] += product
        else:
            self._sums[name] = product
        self._num_tokens[name] = self._num_tokens.get(name, 0) + len(x_MD)


@torch.inference_mode()
def run_layer(
    layer: LlamaDecoderLayer,
    hidden_BTD: Tensor,
    rotary: Rotary,
    statistics: InputStatistics | None = None,
    *,
    attend: Attend,
) -> Tensor:
    """Run a layer on hidden states, float32 (B, T, D), a few sequences at a time; collect `statistics` of inputs."""
    batch = max(1, _BATCH_TOKENS // hidden_BTD.shape[1])
    out_BTD = torch.empty_like(hidden_BTD)
    with ExitStack() as hooks:
        if statistics is not None:
            statistics.watch(layer, hooks)
        for start in range(0, len(hidden_BTD), batch):
            part = slice(start, start + batch)
            out_BTD[part] = layer(hidden_BTD[part], rotary, attend)
    return out_BTD
