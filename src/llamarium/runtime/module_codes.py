"""The codes of quantized Linears, of every kind, as `Runner.codes` returns them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from llamarium.errors import InputError
from llamarium.quant.codes import Codes, unpack_rows
from llamarium.quant.int4 import LinearInt4
from llamarium.quant.int8 import Linear8bit
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.nf4_state import LEVELS
from llamarium.quant.packed import LinearPacked
from llamarium.runtime.shell import on_host


@torch.no_grad()
def codes_of(linear: nn.Module, rows: Sequence[int]) -> Codes:
    """Return some rows of a Linear as codes and scales.

    Raises:
        InputError: If it is not quantized, or its codes are not known.
    """
    if isinstance(linear, LinearPacked):
        return unpack_rows(linear.weight.cpu().numpy(), np.array(rows, np.int64), linear.format)
    at = list(rows)
    if isinstance(linear, Linear8bit):
        codes = linear.weight[at].cpu().numpy().astype(np.int64) + 128
        return Codes("Q8_0", tuple(range(-128, 128)), codes, on_host(linear.scale[at]))
    if isinstance(linear, LinearInt4):
        packed = linear.weight[at].cpu().numpy().astype(np.int64)
        codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(at), -1)
        return Codes("Q4_1", tuple(range(16)), codes, on_host(linear.step[at]), on_host(linear.minimum[at]))
    if isinstance(linear, Linear4bit):
        places_RC = np.array(at)[:, None] * linear.in_features + np.arange(linear.in_features)
        bytes_RC = linear.weight.cpu().numpy().reshape(-1)[places_RC // 2].astype(np.int64)
        codes = np.where(places_RC % 2 == 0, bytes_RC >> 4, bytes_RC & 15)  # the first in the high half
        return Codes("NF4", LEVELS, codes, on_host(linear.scales())[places_RC // linear.layout.block_size])
    if isinstance(linear, nn.Linear | nn.Embedding):
        raise InputError("the weight is not quantized, so that it has no codes; give quantize")
    raise InputError(f"the codes of a {type(linear).__name__} are not shown; expected NF4, Q4_1, Q8_0 or tiles")
