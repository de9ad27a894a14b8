"""Replacing a model's Linears in place."""

from collections.abc import Callable, Sequence

from torch import nn

from llamarium.quant.formats import METHODS, chosen_type
from llamarium.quant.linears import QUANTIZED_LINEARS


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
    kind = QUANTIZED_LINEARS[chosen_type("quantize", method, METHODS)]

    def quantized(_: str, linear: nn.Linear) -> nn.Module:
        if linear.weight.is_meta:
            return kind(linear.in_features, linear.out_features, device="meta")
        return kind.from_weight(linear.weight)

    swap_linears(model, quantized, skip)
