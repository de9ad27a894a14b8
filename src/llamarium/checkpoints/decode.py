"""From stored bytes to numbers: the one place where what a checkpoint holds becomes tensors.

A reader gives bytes and the name of their type (`StoredTensor`). Floats are the same bytes seen through torch, so that
a weight that is used as it is stored stays a view of its file; everything else is decoded.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llamarium.checkpoints.checkpoint import Checkpoint, StoredTensor
from llamarium.checkpoints.storage import TensorFile
from llamarium.errors import CheckpointError, escape
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.ggml.blocks import dequantize
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.packed import LinearPacked

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that a weight is stored in without being quantized, by the name that safetensors and GGUF share."""


def read(checkpoint: Checkpoint, key: str, out: Tensor | None = None) -> Tensor:
    """Return a weight's values, (out, in), rows in the half-split order; quantized ones decoded to float32.

    `out` takes the values, cast to its dtype, and is returned. Without it the result may be a view of the file's
    private mapping: it can be written to, but costs no memory until then.
    """
    entry = checkpoint.entries[key]
    if out is not None and tuple(out.shape) != entry.shape:
        raise CheckpointError(f"{escape(key, 80)} has shape {entry.shape}; the tensor to fill has {tuple(out.shape)}")
    is_float = entry.dtype in FLOAT_DTYPES
    stored = checkpoint.stored(key, copy=out is not None or not (is_float or entry.is_packed))
    return decode(stored, f"{entry.file}: {entry.name}", out)


def decode(stored: StoredTensor, source: str, out: Tensor | None = None) -> Tensor:
    """Return the values of a stored weight; `source` is file and tensor, for messages, and `out` as for `read`."""
    data = as_tensor(stored.data)
    if stored.type_name in FLOAT_DTYPES:
        values = data.view(FLOAT_DTYPES[stored.type_name]).view(stored.shape)
        return values if out is None else out.copy_(values)
    if stored.type_name == "NF4":
        values = nf4_linear(stored, source).dequantize()
        return values if out is None else out.copy_(values)
    out = torch.empty(stored.shape) if out is None else out
    if not stored.is_packed and out.is_contiguous():
        dequantize(data, stored.type_name, out=out.view(len(data), -1))
        return out
    if not stored.is_packed:
        return out.copy_(dequantize(data, stored.type_name).view(stored.shape))
    linear = LinearPacked(data, stored.shape[0], PACKED_FORMATS[stored.type_name])
    for start, stop in linear.chunks():
        out[start:stop] = linear.dequantize_rows(start, stop, torch.float32)
    return out


def nf4_linear(stored: StoredTensor, source: str) -> Linear4bit:
    """Return a weight in NF4 as a Linear over its components, which are not copied."""
    components = {f"weight.{name}": as_tensor(part) for name, part in stored.state.items()}
    return Linear4bit.from_state({"weight": as_tensor(stored.data)} | components, source)


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
