"""Stored weights as tensors of torch; `checkpoints/values.py` makes numbers of what is not stored as numbers."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.storage import TensorFile
from llamarium.checkpoints.values import read_array

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that a weight is stored in without being quantized, by the name that safetensors and GGUF share."""


def read(checkpoint: Checkpoint, key: str) -> Tensor:
    """Return a weight's values, (out, in), rows in the half-split order; quantized ones decoded to float32.

    The result may be a view of the file's private mapping: it can be written to, but costs no memory until then.
    """
    values = read_array(checkpoint, key)
    dtype = FLOAT_DTYPES.get(checkpoint.entries[key].dtype, torch.float32)
    return as_tensor(values).view(dtype)


def as_tensor(data: NDArray[Any]) -> Tensor:
    """Return an array as a tensor over the same memory."""
    return torch.from_numpy(np.ascontiguousarray(data))


def tensor_in(
    file: TensorFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype, *, copy: bool = False
) -> Tensor:
    """Return a tensor of a file: in place, or in fresh memory if `copy` or badly aligned."""
    raw = file.array(
        offset, (torch.Size(shape).numel(), dtype.itemsize), np.uint8, copy=copy or offset % dtype.itemsize != 0
    )
    return as_tensor(raw).view(dtype).view(shape)
