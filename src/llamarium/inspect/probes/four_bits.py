"""Four bits: what a weight is stored as, what it means, and how far that is from what it was.

A quantized weight is a code, and a scale that it shares with its neighbours, in some types a minimum too: it means
levels[code] · scale + minimum. Inputs of packed weights are rounded as well (`quant/packed.py`), and what all of this
does to a pass is seen in its stream, layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llamarium.errors import InputError
from llamarium.inspect.shapes import indices
from llamarium.quant.formats import GROUP, chosen_type
from llamarium.quant.int4 import LinearInt4
from llamarium.quant.int8 import Linear8bit
from llamarium.quant.nf4 import NF4_LEVELS, Linear4bit
from llamarium.quant.packed import LinearPacked, quantize_inputs
from llamarium.quant.swap import METHODS, QUANTIZED_LINEARS


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeights:
    """Some rows of a matrix, weight by weight.

    Attributes:
        type_name: The type, by GGUF's name; NF4 by bitsandbytes'.
        rows: Which rows, R of them.
        levels: What each code stands for before the scale.
        codes_RC: int64; the index of each weight's level.
        scales_RC: float32; what its level is multiplied with.
        minimums_RC: float32; what is added then; None where the type has none.
        values_RC: float32; what the weights mean: levels[codes] * scales + minimums.
        original_RC: float32; what they were before, or None where that is not there.
    """

    type_name: str
    rows: tuple[int, ...]
    levels: tuple[float, ...]
    codes_RC: Tensor
    scales_RC: Tensor
    minimums_RC: Tensor | None
    values_RC: Tensor
    original_RC: Tensor | None

    @property
    def errors_RC(self) -> Tensor:
        """What the weights mean, less what they were.

        Raises:
            InputError: If that is not there.
        """
        if self.original_RC is None:
            raise InputError("the unquantized weights are not there; give `original`, or quantize a plain Linear")
        return self.values_RC - self.original_RC

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        tensors = ("codes", "scales", "minimums", "values", "original")
        found = {name: getattr(self, f"{name}_RC") for name in tensors}
        return {
            "type_name": self.type_name,
            "rows": list(self.rows),
            "levels": list(self.levels),
            **{name: None if tensor is None else tensor.tolist() for name, tensor in found.items()},  # sync: to show
        }


@dataclass(frozen=True, slots=True, eq=False)
class RoundedInputs:
    """Inputs as the kernels round them: 8 bits in groups of 32, four of each group 16.

    Attributes:
        codes_MC: int64.
        scales_MC: float32; the scale of each one's group.
        values_MC: float32; codes * scales.
        errors_MC: float32; the values less the inputs.
    """

    codes_MC: Tensor
    scales_MC: Tensor
    values_MC: Tensor
    errors_MC: Tensor


@torch.no_grad()
def coded_weights(
    linear: nn.Module, rows: Sequence[int], *, quantize: str | None = None, original: Tensor | None = None
) -> CodedWeights:
    """Return some rows of a Linear as codes, scales and what they mean.

    Args:
        linear: A quantized Linear, or a plain one with `quantize`.
        rows: Which; negative ones count from the last.
        quantize: Of a plain one: "NF4", "Q8_0" or "Q4_1".
        original: Of a quantized one: the matrix that it was made of, (out_features, in_features).

    Raises:
        OptionError: For an unknown type, or a shape that it cannot take.
        InputError: For rows that there are not, a Linear whose codes are not known, or a matrix of another shape.
    """
    if isinstance(linear, nn.Linear):
        if quantize is None:
            raise InputError(f"the Linear is not quantized; give quantize: one of {', '.join(METHODS)}")
        original = linear.weight.float()
        linear = QUANTIZED_LINEARS[chosen_type("quantize", quantize, METHODS)].from_weight(original)
    elif quantize is not None:
        raise InputError("the Linear is quantized already; leave quantize out")
    if not isinstance(linear, LinearPacked | Linear4bit | LinearInt4 | Linear8bit):
        raise InputError(f"the codes of a {type(linear).__name__} are not shown; expected NF4, Q4_1, Q8_0 or tiles")
    shape = (linear.out_features, linear.in_features)
    if original is not None and original.shape != shape:
        raise InputError(f"original is {tuple(original.shape)}; expected {shape}")
    kept = indices(rows, linear.out_features, "rows")
    at = torch.tensor(kept, device=linear.weight.device)
    type_name, levels_K, codes_RC, *halves = _parts(linear, at)
    scales_RC, minimums_RC = (None if half is None else _spread(half, linear.in_features) for half in halves)
    assert scales_RC is not None
    values_RC = levels_K.to(at.device)[codes_RC] * scales_RC
    values_RC = values_RC if minimums_RC is None else values_RC + minimums_RC
    before = None if original is None else original[at].float()
    return CodedWeights(type_name, kept, tuple(levels_K.tolist()), codes_RC, scales_RC, minimums_RC, values_RC, before)


def _parts(
    linear: LinearPacked | Linear4bit | LinearInt4 | Linear8bit, at: Tensor
) -> tuple[str, Tensor, Tensor, Tensor, Tensor | None]:
    """Return a type's name, its levels, and of some rows the codes, scales and minimums: (R, C), (R, parts) twice."""
    if isinstance(linear, LinearPacked):
        codes, scale, minimum = linear.parts(at)
        levels = linear.format.levels or range(-linear.format.zero, linear.format.num_levels - linear.format.zero)
        return linear.format.name, torch.tensor(levels).float(), codes.long(), scale, minimum
    if isinstance(linear, Linear8bit):
        return "Q8_0", torch.arange(-128, 128).float(), linear.weight[at].long() + 128, linear.scale[at].float(), None
    if isinstance(linear, LinearInt4):
        pairs = torch.stack((linear.weight[at] & 15, linear.weight[at] >> 4), dim=-1)
        step, minimum = linear.step[at].float(), linear.minimum[at].float()
        return "Q4_1", torch.arange(16).float(), pairs.flatten(1).long(), step, minimum
    places_RC = at.unsqueeze(1) * linear.in_features + torch.arange(linear.in_features, device=at.device)
    bytes_RC = linear.weight.flatten()[places_RC // 2]
    codes_RC = torch.where(places_RC % 2 == 0, bytes_RC >> 4, bytes_RC & 15)  # the first in the high half
    return "NF4", NF4_LEVELS, codes_RC.long(), linear.scales()[places_RC // linear.layout.block_size], None


def _spread(parts: Tensor, num_columns: int) -> Tensor:
    """Give each weight its scale: (R, parts) to (R, C)."""
    return parts.repeat_interleave(num_columns // parts.shape[1], dim=1)


@torch.no_grad()
def rounded_inputs(x: Tensor) -> RoundedInputs:
    """Round inputs as the C kernels do before they multiply them with packed weights.

    Args:
        x: (M, C); an activation of a trace, say.

    Raises:
        InputError: If C is no multiple of 32.
    """
    if x.ndim != 2 or x.shape[1] % GROUP:
        raise InputError(f"the inputs are {tuple(x.shape)}; expected (M, C), with C a multiple of {GROUP}")
    codes, scales_MG = quantize_inputs(x.cpu())
    codes_MC, scales_MC = codes.flatten(1).long(), _spread(scales_MG, x.shape[1])
    values_MC = codes_MC * scales_MC
    return RoundedInputs(codes_MC, scales_MC, values_MC, values_MC - x.cpu().float())
