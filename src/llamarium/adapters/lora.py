"""LoRA: learn a small correction to a large matrix that stays unchanged.

A frozen Linear computes `W x`. Two small matrices beside it, `A` (r, in) and `B` (out, r), add a correction:

    y = W x + scale * B (A x)

`B A` has the shape of W but rank r only: 16 rows and 16 columns stand for the 4,194,304 numbers of a 2048 x 2048
matrix, so gradients and optimizer state are 64 times smaller than the matrix. B begins as zeros, so training begins at
the model as it was. W is never changed, so it may be packed in 4 bits: that is QLoRA.

- `scale` is alpha / r, so alpha fits other ranks; rsLoRA takes alpha / sqrt(r): high ranks learn as fast as low ones.
- DoRA learns each row's length apart from its direction: W + scale B A is divided by the norms of its rows, and
  multiplied by a learned `m`, which begins as the norms of W's rows. Backwards, the divisor is a constant.
  Dropout applies to the adapter's input alone, as without DoRA; peft's DoRA also drops the change of W x's length.

Afterwards the correction can be added to W (`merge.py`). Names are PEFT's, so state-dict keys with `lora_` are those of
its files (`files.py`).

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

# Weights of the base in float32 at a time, for DoRA and merges: 4 MiB.
_CHUNK_WEIGHTS = 2**20


class LoRALinear(nn.Module):
    """A frozen Linear with a trained correction of low rank.

    The adapters are float32, cast to x's dtype for the product: an optimizer step is often too small for bfloat16.

    Args:
        base: Any Linear: plain, in half precision, or quantized. It is frozen.
        rank: Of the correction; None is the config's.
        scale: What B A x is multiplied by; None is the config's.
        generator: On the CPU; draws A. Without it A is left uninitialized.

    Attributes:
        lora_A: (r, in_features), uniform within ±1 / sqrt(in_features), like an `nn.Linear`.
        lora_B: (out_features, r), zeros.
        lora_magnitude_vector: (out_features,), DoRA's m; None without DoRA.
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
        """Initialize to no correction: B to zeros, m to the norms of W's rows."""
        bound = 1 / math.sqrt(self.in_features)  # Kaiming-uniform with a = sqrt(5)
        drawn = torch.empty(self.lora_A.weight.shape).uniform_(-bound, bound, generator=generator)
        self.lora_A.weight.copy_(drawn)  # drawn on the CPU, so that it is the same on every device
        self.lora_B.weight.zero_()
        if self.lora_magnitude_vector is not None:
            self.lora_magnitude_vector.copy_(self.row_norms())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: (..., in_features) to (..., out_features); in the base's dtype, under autocast in float32."""
        half = torch.is_autocast_enabled(x.device.type)
        x = x.to(torch.get_autocast_dtype(x.device.type)) if half else x  # once for all products
        y = self.base_layer(x)
        if not self.enabled:
            return y.float() if half else y
        low = F.linear(self.lora_dropout(x), self.lora_A.weight.to(x.dtype)) * self.scale  # r numbers, not out
        correction = F.linear(low, self.lora_B.weight.to(x.dtype))
        both = y.float() + correction if half else y + correction  # bfloat16 would round away what begins at zero
        if self.lora_magnitude_vector is not None:  # of the rows of a matrix, so not of a bias
            bias = cast("Tensor | None", getattr(self.base_layer, "bias", None))
            without = both if bias is None else both - bias
            scaled = without * (self.lora_magnitude_vector / self.row_norms())
            both = scaled if bias is None else scaled + bias
        return both if half else both.to(y.dtype)

    def effective_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight of `forward`, (out, in), differentiable by the adapters; without dropout."""
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
        """Yield the effective weight in float32, a range of rows at a time: start, stop, (rows, columns)."""
        for start, stop, rows in self._corrected_rows():
            if self.lora_magnitude_vector is not None:
                rows *= (self.lora_magnitude_vector[start:stop] / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
            yield start, stop, rows

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return the norms of the rows of W + scale B A: (out_features,), float32, a constant to autograd."""
        return torch.cat([torch.linalg.vector_norm(rows, dim=1) for _, _, rows in self._corrected_rows()])

    def base_rows(self, start: int, stop: int) -> Tensor:
        """Return rows of the frozen weight, unpacked: (stop - start, in_features), float32."""
        return rows_of(self.base_layer, start, stop)

    @torch.no_grad()
    def correction(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of scale B A: (stop - start, in_features), float32."""
        return (self.lora_B.weight[start:stop] @ self.lora_A.weight).mul_(self.scale)

    @torch.no_grad()
    def _corrected_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield W + scale B A in float32, a range of rows at a time, so a packed W is never unpacked whole."""
        with torch.autocast(self.lora_A.weight.device.type, enabled=False):
            for start, stop in _chunks(self.out_features, self.in_features):
                yield start, stop, self.correction(start, stop).add_(rows_of(self.base_layer, start, stop))


def _chunks(num_rows: int, num_columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_WEIGHTS // num_columns)
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def rows_of(linear: nn.Module, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop` of a Linear's weight, unpacked: (stop - start, in_features), float32."""
    if isinstance(linear, QuantizedLinear):
        return linear.dequantize_rows(start, stop, torch.float32)
    return linear.get_parameter("weight")[start:stop].float()


Adapted = LoRALinear | LoRAEmbedding


def apply_lora(model: LlamaForCausalLM, config: LoRAConfig, *, seed: int | None = 0) -> int:
    """Add adapters to the targeted modules and freeze all else, in place; return the number of trainable parameters.

    The embedding, targeted by its name, gets a `LoRAEmbedding`. `seed` draws A; None leaves the adapters uninitialized.
    Modules to save are trained whole. TrainingError for a model that has adapters, or a target that it lacks.
    """
    if any(adapted_modules(model)):
        raise TrainingError("the model has LoRA adapters already; merge them, or load the model afresh")
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear) or (name == EMBED_TOKENS and is_table(module))
    ]
    if seed is not None:  # the settings are a user's
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
    """Switch a model's adapters off within the `with` block."""
    adapted = [module for _, module in adapted_modules(model)]
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yield the adapted Linears and the adapted embedding with their full names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Adapted))


def lora_linears(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yield the adapted Linears with their full names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def meta_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a float32 Linear on the meta device: no memory, no random draws."""
    return nn.Linear(in_features, out_features, bias=False, device="meta", dtype=torch.float32)
