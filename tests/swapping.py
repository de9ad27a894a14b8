"""Replacing a model's Linears in place."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from llamarium.quant.formats import METHODS, PACKED_FORMATS, TILE_ROWS, chosen_type, quantized_type
from llamarium.quant.linears import quantize_linear
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.packed import LinearPacked


def swap_linears(
    model: nn.Module, make: Callable[[str, nn.Linear], nn.Module], skip: Sequence[str] = ("lm_head",)
) -> None:
    """Replace each Linear by what `make(name, linear)` returns, but those in `skip` with all that they contain."""
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in linears:
        if not any(f".{part}." in f".{name}." for part in skip):
            model.set_submodule(name, make(name, linear))


def quantize_linears(model: nn.Module, method: str, *, skip: Sequence[str] = ("lm_head",)) -> None:
    """Quantize each Linear as `load(quantize=method)` does; on the meta device, only the module tree changes."""
    name = chosen_type("quantize", method, METHODS)

    def quantized(_: str, linear: nn.Linear) -> nn.Module:
        type_name = quantized_type(name, linear.in_features)
        if type_name is None:
            return linear
        if not linear.weight.is_meta:
            return quantize_linear(linear.weight, type_name)
        if type_name == "NF4":
            return Linear4bit(linear.in_features, linear.out_features, device="meta")
        format = PACKED_FORMATS[type_name]
        shape = -(-linear.out_features // TILE_ROWS), linear.in_features // format.columns, format.tile_bytes
        return LinearPacked(torch.empty(shape, dtype=torch.uint8, device="meta"), linear.out_features, format)

    swap_linears(model, quantized, skip)
