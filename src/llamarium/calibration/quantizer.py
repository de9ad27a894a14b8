"""Quantization of a model on disk to packed types, weight by weight.

There are four methods, each more accurate and slower than the one before:

| method     | scales                                                      | needs a text |
|------------|-------------------------------------------------------------|--------------|
| nearest    | from the largest weight of a group; rounding to nearest     |              |
| fit        | minimize the squared error (`calibration/fit.py`)           |              |
| importance | minimize the error weighted by the inputs' mean squares     | yes          |
| gptq       | compensate errors of earlier columns (`calibration/gptq.py`) | yes         |

Methods that need no text quantize each weight when it is written, without PyTorch; `calibration/calibrated.py`
implements the others.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from llamarium.calibration.fit import FITTED_FORMATS, Bytes, Floats, fit
from llamarium.calibration.gptq import gptq
from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.huggingface.writer import check_fits_float16
from llamarium.checkpoints.options import REQUANTIZE, check_requantizing
from llamarium.checkpoints.packed.save import PackedWeight
from llamarium.checkpoints.values import read_array
from llamarium.config import EMBEDDING, HEAD
from llamarium.errors import CheckpointError, OptionError, counted, escape, show_value, warn_caller
from llamarium.quant.formats import GROUP, PACKED_FORMATS
from llamarium.quant.packing import count_nonfinite, to_float32

QuantizeMethod = Literal["nearest", "fit", "importance", "gptq"]
METHODS: tuple[QuantizeMethod, ...] = get_args(QuantizeMethod)
CALIBRATED: tuple[QuantizeMethod, ...] = ("importance", "gptq")
"""The methods that need a calibration text."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings of a quantization.

    Attributes:
        type: Type of the layers' Linears, one of `FITTED_FORMATS`.
        method: One of `METHODS`.
        requantize: Accept weights that are already quantized.
    """

    type: str
    method: QuantizeMethod
    requantize: bool = False


class Quantizer:
    """A quantizer of a checkpoint, for methods that need no text.

    Args:
        checkpoint: The model.
        recipe: Type and method.
        progress: Called with (weights done, total weights).
        layer_done: Called with (layers done, total layers).

    Raises:
        OptionError: If the recipe is invalid, or the model is quantized already.
        CheckpointError: If a norm or bias has NaN or infinite values.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        *,
        progress: Callable[[int, int], None] | None = None,
        layer_done: Callable[[int, int], None] | None = None,
    ) -> None:
        check_recipe(checkpoint, recipe)
        self.checkpoint, self.recipe = checkpoint, recipe
        self._progress, self._layer_done = progress, layer_done
        fitting = [entry for entry in checkpoint.entries.values() if len(entry.shape) == 2 and self.fits(entry.key)]
        self._num_done, self._total = 0, sum(math.prod(entry.shape) for entry in fitting)
        self._left = Counter(entry.key.split(".")[2] for entry in fitting if entry.key.startswith("model.layers."))
        self._num_layers = len(self._left)
        for key, entry in checkpoint.entries.items():  # norms and biases are small: check them first
            if len(entry.shape) == 1 and (num_bad := count_nonfinite(read_array(checkpoint, key))):
                where = f"{escape(checkpoint.path)}: {key}"
                raise CheckpointError(f"{where}: {num_bad} weights are NaN or infinite; mend the model")

    def fits(self, key: str) -> bool:
        """Return whether a matrix can be packed, i.e. its columns are a multiple of 32; others are written in F16."""
        return self.checkpoint.entries[key].shape[1] % GROUP == 0

    def weights(self, head_type: str) -> list[PackedWeight]:
        """Return the weights to write, with a type for head and embedding; each is quantized when it is written."""
        entries = self.checkpoint.entries

        def weight(key: str) -> PackedWeight:
            shape = cast("tuple[int, int] | tuple[int]", entries[key].shape)
            if len(shape) == 1:
                return PackedWeight(key, shape, None, partial(read_array, self.checkpoint, key))
            if not self.fits(key):
                return PackedWeight(key, shape, None, partial(self.float16, key))
            if key in (EMBEDDING, HEAD):
                return PackedWeight(key, shape, head_type, partial(self.table, key, head_type))
            return PackedWeight(key, shape, self.recipe.type, partial(self.linear, key))

        return [weight(key) for key in sorted(entries, key=lambda key: key in (EMBEDDING, HEAD))]  # these last

    def linear(self, key: str) -> Bytes:
        """Quantize a layer's Linear to tiles."""
        return self.quantize(key, self.read(key), self.recipe.type)

    def table(self, key: str, type_name: str) -> Bytes:
        """Quantize the embedding or the head to tiles."""
        return self.quantize(key, self.read(key), type_name)

    def quantize(self, key: str, weight: Floats, type_name: str, statistics: Floats | None = None) -> Bytes:
        """Quantize a weight to tiles; errors name its key.

        `statistics` of the inputs are the mean squares, (in,), or the mean of x x^T, (in, in).
        """
        format = PACKED_FORMATS[type_name]
        try:
            if statistics is not None and statistics.ndim == 2:
                tiles = gptq(weight, statistics, format)
            else:
                tiles = fit(weight, format, importance=statistics, search=self.recipe.method != "nearest")
        except (CheckpointError, OptionError) as error:
            raise type(error)(f"{escape(self.checkpoint.path)}: {key}: {error}") from None
        self._tell(key, weight.size)
        return tiles

    def _tell(self, key: str, num_weights: int) -> None:
        self._num_done += num_weights
        if self._progress is not None:
            self._progress(min(self._num_done, self._total), self._total)
        layer = key.split(".")[2] if key.startswith("model.layers.") else None
        if layer is None or self._left[layer] == 0:
            return
        self._left[layer] -= 1
        if self._left[layer] == 0 and self._layer_done is not None:
            self._layer_done(sum(num_left == 0 for num_left in self._left.values()), self._num_layers)

    def float16(self, key: str) -> NDArray[np.float16]:
        """Read a matrix in float16; CheckpointError if values are beyond its range."""
        values = self.read(key)
        check_fits_float16(values, f"{escape(self.checkpoint.path)}: {key}")
        return values.astype(np.float16)

    def read(self, key: str) -> NDArray[np.float32]:
        """Read a weight in float32."""
        return to_float32(read_array(self.checkpoint, key))


def check_recipe(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Check that a model can be quantized with a recipe; OptionError if not. Warns of matrices that stay in F16."""
    for name, value, choices in (("type", recipe.type, FITTED_FORMATS), ("method", recipe.method, METHODS)):
        if value not in choices:
            raise OptionError(f"{name} is {show_value(value)}; expected one of {', '.join(choices)}")
    where = escape(checkpoint.path)
    check_requantizing(checkpoint, None if recipe.requantize else REQUANTIZE)
    unfit = [entry for entry in checkpoint.entries.values() if len(entry.shape) == 2 and entry.shape[1] % GROUP]
    if unfit:
        warn_caller(
            f"{where}: {counted(len(unfit), 'matrix stays', 'matrices stay')} in F16, such as {unfit[0].key} with "
            f"{unfit[0].shape[1]} columns: packed types need a multiple of {GROUP}"
        )
