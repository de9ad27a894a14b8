"""Four bits: how a weight is stored, what it means, and its distance from the original.

A quantized weight is a code, and a scale that it shares with its neighbours, in some types a minimum too: it means
levels[code] · scale + minimum. Inputs of packed weights are rounded as well (`quant/packed.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.storage import FLOATS
from llamarium.errors import InputError
from llamarium.inspect.numbers import Floats, JsonView
from llamarium.inspect.shapes import indices, type_of
from llamarium.quant.codes import coded, round_inputs
from llamarium.quant.formats import GROUP, METHODS, chosen_type
from llamarium.runtime.runner import Runner


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeights(JsonView):
    """Some rows of a matrix, weight by weight.

    Attributes:
        type_name: The type, by GGUF's name; NF4 by bitsandbytes'.
        rows: Which rows, R of them.
        levels: What each code stands for before the scale.
        codes_RC: int64; the index of each weight's level.
        scales_RC: float32; the factor of its level.
        minimums_RC: float32; added then; None where the type has none.
        values_RC: float32; what the weights mean: levels[codes] * scales + minimums.
        original_RC: float32; the weights before, or None where unknown.
    """

    type_name: str
    rows: tuple[int, ...]
    levels: tuple[float, ...]
    codes_RC: NDArray[np.int64]
    scales_RC: Floats
    minimums_RC: Floats | None
    values_RC: Floats
    original_RC: Floats | None

    @property
    def errors_RC(self) -> Floats:
        """What the weights mean, less what they were; InputError if that is not there."""
        if self.original_RC is None:
            raise InputError("the unquantized weights are not there; give `quantize`, or `original`")
        return self.values_RC - self.original_RC


@dataclass(frozen=True, slots=True, eq=False)
class RoundedInputs:
    """Inputs as the kernels round them: 8 bits in groups of 32, four of each group 16.

    int64 codes, the float32 scale of each one's group, values (codes * scales), and errors (values less inputs).
    """

    codes_MC: NDArray[np.int64]
    scales_MC: Floats
    values_MC: Floats
    errors_MC: Floats


def coded_weights(
    runner: Runner, key: str, rows: Sequence[int], *, quantize: str | None = None, original: Floats | None = None
) -> CodedWeights:
    """Return some rows of a matrix as codes, scales and what they mean: as stored, or as another type has them.

    Args:
        runner: Holds the matrix.
        key: Its state-dict key, such as "model.layers.0.mlp.up_proj.weight".
        rows: Negative ones count from the last.
        quantize: A type in `METHODS`: code it anew; of a quantized matrix what its codes mean is quantized again.
        original: The matrix before quantization, (out_features, in_features).

    Raises:
        OptionError: For an unknown type, or a shape that it cannot take.
        InputError: For invalid rows or matrices, a type whose codes are not known, or another shape.
    """
    type_name, shape = type_of(runner, key), runner.weights[key].shape
    if original is not None and original.shape != shape:
        raise InputError(f"original is {original.shape}; expected {shape}")
    selected = indices(rows, shape[0], "rows")
    if quantize is not None:
        original = runner.dequantize(key)
        coded_rows = coded(original, chosen_type("quantize", quantize, METHODS)).rows(selected)
    elif type_name in FLOATS:
        raise InputError(f"{key} is not quantized; give quantize: one of {', '.join(METHODS)}")
    else:
        coded_rows = runner.codes(key, selected)
    minimums = None if coded_rows.minimums_RP is None else coded_rows.spread(coded_rows.minimums_RP)
    before = None if original is None else original[list(selected)]
    scales, values = coded_rows.spread(coded_rows.scales_RP), coded_rows.values_RC
    return CodedWeights(
        coded_rows.type_name, selected, coded_rows.levels, coded_rows.codes_RC, scales, minimums, values, before
    )


def rounded_inputs(x: Floats) -> RoundedInputs:
    """Round inputs (M, C) as the C kernels do before they multiply them with packed weights.

    InputError if C is no multiple of 32.
    """
    x_MC = np.asarray(x, np.float32)
    if x_MC.ndim != 2 or x_MC.shape[1] % GROUP:
        raise InputError(f"the inputs are {x_MC.shape}; expected (M, C), with C a multiple of {GROUP}")
    codes_MC, scales_MG = round_inputs(x_MC)
    scales_MC = scales_MG.repeat(GROUP, axis=1)
    values_MC = codes_MC.astype(np.float32) * scales_MC
    return RoundedInputs(codes_MC, scales_MC, values_MC, values_MC - x_MC)
