"""Stored weights as torch tensors; `checkpoints/values.py` dequantizes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.storage import TensorFile
from llamarium.checkpoints.values import read_array

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The floating-point dtypes of stored weights, by their name in safetensors and GGUF files."""


def read(checkpoint: Checkpoint, key: str) -> Tensor:
    """Return a weight's values, (out, in), with rows in half-split order; quantized weights are decoded to float32.

    The result may be a view of the file's private mapping (copy-on-write), which takes no memory until it is written
    to.
    """
    values = read_array(checkpoint, key)
    dtype = FLOAT_DTYPES.get(checkpoint.entries[key].dtype, torch.float32)
    return as_tensor(values).view(dtype)


def as_tensor(data: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the array's memory; a non-contiguous array is copied."""
    return torch.from_numpy(np.ascontiguousarray(data))


def tensor_in(
    file: TensorFile, offset: int, shape: tuple[int, ...], dtype: torch.dtype, *, copy: bool = False
) -> Tensor:
    """Return a tensor of a file: a view of the mapping, or a copy if `copy` is set or the offset is not aligned."""
    raw = file.array(
        offset, (torch.Size(shape).numel(), dtype.itemsize), np.uint8, copy=copy or offset % dtype.itemsize != 0
    )
    return as_tensor(raw).view(dtype).view(shape)
