"""LoRA: train a low-rank correction to a frozen weight matrix.

A frozen Linear computes `W x`. Two small matrices, `A` (r, in) and `B` (out, r), add a correction:

    y = W x + scale * B (A x)

`B A` has the shape of W but only rank r. For a 2048 x 2048 matrix with 4,194,304 weights and r = 16, A and B have
65,536 weights, so gradients and optimizer state are 64 times smaller. B is initialized to zeros, so training starts
from the unchanged model. W never changes, so it may be quantized to 4 bits, which is QLoRA.

- `scale` is alpha / r, so that alpha need not change with the rank; rsLoRA uses alpha / sqrt(r), with which high ranks
  learn as fast as low ones.
- DoRA learns the norm of each row separately from its direction: W + scale B A is divided by the norms of its rows and
  multiplied by a learned `m`, initialized to the norms of W's rows. The divisor is a constant to autograd. Dropout
  applies only to the adapter's input, as without DoRA; peft's DoRA also applies it to the rescaled W x.

After training the correction can be added to W (`merge.py`). Names are PEFT's, so state-dict keys with `lora_` are
those of its files (`files.py`).

Source: Hu et al. 2021, "LoRA", section 4.1; Kalajdzievski 2023, "A Rank Stabilization Scaling Factor"; Liu et al. 2024,
"DoRA", section 4; Dettmers et al. 2023, "QLoRA"; peft, `tuners/lora/layer.py` and `dora.py`.
"""

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarium.adapters.config import EMBED_TOKENS, LoRAConfig
from llamarium.adapters.lora_embedding import LoRAEmbedding, is_table
from llamarium.adapters.patterns import PatternMatcher
from llamarium.errors import TrainingError
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedLinear

# Weights of the base processed at a time, for DoRA and merges: 4 MiB in float32.
_CHUNK_WEIGHTS = 2**20


class LoRALinear(nn.Module):
    """A frozen Linear with a trainable low-rank correction.

    The adapters are float32, because optimizer steps are often too small for bfloat16; they are cast to x's dtype for
    the product.

    Args:
        base: Any Linear: plain, in half precision, or quantized. It is frozen.
        config: LoRA settings.
        generator: CPU generator that initializes A; without it the adapter is not initialized.
        rank: Rank of the correction; None for the config's.
        scale: Factor of B A x; None for the config's.

    Attributes:
        lora_A: (r, in_features), initialized uniformly within ±1 / sqrt(in_features), as in `nn.Linear`.
        lora_B: (out_features, r), initialized to zeros.
        lora_magnitude_vector: DoRA's m, (out_features,); None without DoRA.
    """

    in_features: int
    out_features: int

    def __init__(
        self,
        base: nn.Module,
        config: LoRAConfig,
        generator: torch.Generator | None = None,
        *,
        rank: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.rank = config.r if rank is None else rank
        self.scale = config.scale_of("") if scale is None else scale
        self.in_features, self.out_features = cast(int, base.in_features), cast(int, base.out_features)
        device = next(chain(base.parameters(), base.buffers())).device
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.Dropout(config.dropout)
        self.lora_A = meta_linear(self.in_features, self.rank).to_empty(device=device)
        self.lora_B = meta_linear(self.rank, self.out_features).to_empty(device=device)
        magnitude = torch.empty(self.out_features, device=device) if config.use_dora else None
        self.lora_magnitude_vector = None if magnitude is None else nn.Parameter(magnitude)
        self.enabled = True
        self.train(base.training)
        if generator is not None:
            self._begin(generator)

    @torch.no_grad()
    def _begin(self, generator: torch.Generator) -> None:
        """Initialize A randomly, B to zeros, and m to the norms of W's rows, so that the correction is zero."""
        bound = 1 / math.sqrt(self.in_features)  # Kaiming-uniform with a = sqrt(5)
        values = torch.empty(self.lora_A.weight.shape).uniform_(-bound, bound, generator=generator)
        self.lora_A.weight.copy_(values)  # drawn on the CPU, for the same values on every device
        self.lora_B.weight.zero_()
        if self.lora_magnitude_vector is not None:
            self.lora_magnitude_vector.copy_(self.row_norms())

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out_features) for (..., in_features), in the base's dtype, or float32 under autocast."""
        is_autocast = torch.is_autocast_enabled(x.device.type)
        x = x.to(torch.get_autocast_dtype(x.device.type)) if is_autocast else x  # cast once for all products
        y = self.base_layer(x)
        if not self.enabled:
            return y.float() if is_autocast else y
        low = F.linear(self.lora_dropout(x), self.lora_A.weight.to(x.dtype)) * self.scale  # r numbers, not out
        correction = F.linear(low, self.lora_B.weight.to(x.dtype))
        # in bfloat16 a small correction would be lost, so sum in float32
        corrected = y.float() + correction if is_autocast else y + correction
        if self.lora_magnitude_vector is not None:  # scales rows of the matrix, but not the bias
            bias = cast("Tensor | None", getattr(self.base_layer, "bias", None))
            without = corrected if bias is None else corrected - bias
            scaled = without * (self.lora_magnitude_vector / self.row_norms())
            corrected = scaled if bias is None else scaled + bias
        return corrected if is_autocast else corrected.to(y.dtype)

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the corrected weight, (out, in), differentiable with respect to the adapters; without dropout."""
        rows = (rows_of(self.base_layer, *chunk) for chunk in _chunks(self.out_features, self.in_features))
        base = torch.cat([*rows]).detach()
        if not self.enabled:
            return base.to(dtype)
        weight = base + (self.lora_B.weight @ self.lora_A.weight) * self.scale
        if self.lora_magnitude_vector is not None:
            weight = weight * (self.lora_magnitude_vector / self.row_norms()).unsqueeze(1)
        return weight.to(dtype)

    @torch.no_grad()
    def merged_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the corrected weight in ranges of rows: start, stop, float32 (rows, columns)."""
        for start, stop, rows in self._corrected_rows():
            if self.lora_magnitude_vector is not None:
                rows *= (self.lora_magnitude_vector[start:stop] / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
            yield start, stop, rows

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return the norms of the rows of W + scale B A: (out_features,), float32, a constant to autograd."""
        return torch.cat([torch.linalg.vector_norm(rows, dim=1) for _, _, rows in self._corrected_rows()])

    def base_rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of the frozen weight, dequantized: float32 (stop - start, in_features)."""
        return rows_of(self.base_layer, start, stop)

    @torch.no_grad()
    def correction(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of scale B A: (stop - start, in_features), float32."""
        return (self.lora_B.weight[start:stop] @ self.lora_A.weight).mul_(self.scale)

    @torch.no_grad()
    def _corrected_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield W + scale B A in ranges of rows, in float32, so that W is never dequantized as a whole."""
        with torch.autocast(self.lora_A.weight.device.type, enabled=False):
            for start, stop in _chunks(self.out_features, self.in_features):
                yield start, stop, self.correction(start, stop).add_(rows_of(self.base_layer, start, stop))


def _chunks(num_rows: int, num_columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_WEIGHTS // num_columns)
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def rows_of(linear: nn.Module, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop` of a Linear's weight, dequantized: float32 (stop - start, in_features)."""
    if isinstance(linear, QuantizedLinear):
        return linear.dequantize_rows(start, stop, torch.float32)
    return linear.get_parameter("weight")[start:stop].float()


Adapted = LoRALinear | LoRAEmbedding


def apply_lora(model: LlamaForCausalLM, config: LoRAConfig, *, seed: int | None = 0) -> int:
    """Add adapters to the target modules and freeze all other weights, in place.

    The embedding, if it is targeted by its name, gets a `LoRAEmbedding`.

    Args:
        model: A model without adapters.
        config: LoRA settings.
        seed: Seed of the initialization; None leaves the adapters uninitialized, and does not check the targets.

    Returns:
        The number of trainable parameters.

    Raises:
        TrainingError: If the model has adapters already, or lacks a target.
    """
    if any(adapted_modules(model)):
        raise TrainingError("the model has LoRA adapters already; merge them, or load the model afresh")
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear) or (name == EMBED_TOKENS and is_table(module))
    ]
    if seed is not None:  # the settings are a user's, not a file's
        config.check_targets(names)
    generator, matcher = None if seed is None else torch.Generator().manual_seed(seed), PatternMatcher()
    model.requires_grad_(False)
    for name in config.choose(names):
        rank, scale = config.rank_of(name, matcher), config.scale_of(name, matcher)
        kind = LoRAEmbedding if name == EMBED_TOKENS else LoRALinear
        model.set_submodule(name, kind(model.get_submodule(name), config, generator, rank=rank, scale=scale))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Disable a model's adapters within the `with` block."""
    adapted = [module for _, module in adapted_modules(model)]
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yield the modules with adapters, Linears and embedding, with their full names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapted))


def lora_linears(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yield the Linears with adapters, with their full names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def meta_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a float32 Linear on the meta device: no memory, no random draws."""
    return nn.Linear(in_features, out_features, bias=False, device="meta", dtype=torch.float32)
