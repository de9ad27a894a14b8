"""Replacing a model's Linears in place, one at a time.

Only one Linear exists in both forms at any moment, so a model is quantized in little more memory than it has. The
head is left alone by default: it is where rounding shows most, and in a tied model it is the embedding table.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from llamarium.errors import OptionError
from llamarium.quant.base import QuantizedLinear
from llamarium.quant.formats import chosen_type
from llamarium.quant.int4 import LinearInt4
from llamarium.quant.int8 import Linear8bit
from llamarium.quant.nf4 import Linear4bit

Method = Literal["NF4", "Q8_0", "Q4_1"]
METHODS: tuple[Method, ...] = ("NF4", "Q8_0", "Q4_1")
"""What Linears can become while a model is loaded."""

QUANTIZED_LINEARS: dict[Method, type[Linear4bit] | type[Linear8bit] | type[LinearInt4]] = {
    "NF4": Linear4bit,
    "Q8_0": Linear8bit,
    "Q4_1": LinearInt4,
}


def swap_linears(
    model: nn.Module, factory: Callable[[str, nn.Linear], nn.Module], skip: Sequence[str] = ("lm_head",)
) -> int:
    """Replace every `nn.Linear` in `model` by what `factory(name, linear)` makes of it.

    Args:
        model: Changed in place.
        factory: Gets the dotted name and the Linear; the old one is freed before the next is asked for.
        skip: Names that are left alone, with all they contain: `lm_head`, `mlp`, `layers.0`, `self_attn.q_proj`.

    Returns:
        How many were replaced.
    """
    # Names, not modules: a list of modules would keep every weight alive until the end.
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [name for name in names if not any(f".{part}." in f".{name}." for part in skip)]
    for name in names:
        path, _, child = name.rpartition(".")
        parent = model.get_submodule(path)
        linear = parent.get_submodule(child)
        assert isinstance(linear, nn.Linear)
        setattr(parent, child, factory(name, linear))
    return len(names)


def quantize_linears(model: nn.Module, method: str, *, skip: Sequence[str] = ("lm_head",)) -> None:
    """Quantize every Linear of `model` in place; on the meta device, only the module tree changes.

    Raises:
        OptionError: For an unknown method, a model without Linears to quantize, a Linear with a bias, one that
            shares its weight, or one whose shape the method cannot take.
    """
    kind = QUANTIZED_LINEARS[chosen_type("quantize", method, METHODS)]
    owners = _count_owners(model)

    def quantize(name: str, linear: nn.Linear) -> QuantizedLinear:
        if linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            raise OptionError(f"{name} has a bias; quantized Linears have none. Add it to skip")
        if owners[id(linear.weight)] > 1:
            raise OptionError(
                f"{name} shares its weight with another module, and quantizing would part them. Add it to skip"
            )
        if not linear.weight.is_meta:
            return kind.from_weight(linear.weight)
        return kind(linear.in_features, linear.out_features, device="meta")

    if not swap_linears(model, quantize, skip):
        raise OptionError(f"there is no Linear left to quantize as {method}: the model is quantized already")


def _count_owners(model: nn.Module) -> dict[int, int]:
    """Count the modules that hold each parameter."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners
