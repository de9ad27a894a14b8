"""The codes of quantized Linears, of every kind, as `Runner.codes` returns them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from llamarium.errors import InputError
from llamarium.quant.codes import Codes, unpack_rows
from llamarium.quant.linears import LinearIntegers
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.nf4_state import LEVELS
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.shell import on_host


@torch.no_grad()
def codes_of(linear: nn.Module, rows: Sequence[int]) -> Codes:
    """Return some rows of a Linear as codes and scales.

    InputError if it is not quantized, or its codes are not known.
    """
    if isinstance(linear, LinearPacked):
        return unpack_rows(linear.weight.cpu().numpy(), np.array(rows, np.int64), linear.format)
    at = list(rows)
    if isinstance(linear, LinearIntegers):
        codes, zero = linear.codes()[at].cpu().numpy().astype(np.int64), 128 if linear.minimum is None else 0
        levels = tuple(range(-128, 128)) if linear.minimum is None else tuple(range(16))
        minimum = None if linear.minimum is None else on_host(linear.minimum[at])
        return Codes(linear.type_name, levels, codes + zero, on_host(linear.scale[at]), minimum)
    if isinstance(linear, Linear4bit):
        places_RC = np.array(at)[:, None] * linear.in_features + np.arange(linear.in_features)
        bytes_RC = linear.weight.cpu().numpy().reshape(-1)[places_RC // 2].astype(np.int64)
        codes = np.where(places_RC % 2 == 0, bytes_RC >> 4, bytes_RC & 15)  # the first in the high half
        return Codes("NF4", LEVELS, codes, on_host(linear.scales())[places_RC // linear.layout.block_size])
    if isinstance(linear, nn.Linear | nn.Embedding):
        raise InputError("the weight is not quantized, so that it has no codes; give quantize")
    raise InputError(f"the codes of a {type(linear).__name__} are not shown; expected NF4, Q4_1, Q8_0 or tiles")
