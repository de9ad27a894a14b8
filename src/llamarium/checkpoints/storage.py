"""The bytes of tensors in a file: looked at in place, or read into memory of their own.

A tensor that is used as it lies in the file is a view of a private mapping: nothing is copied, pages come from the
page cache when they are first touched, and writing to the tensor does not reach the file. A tensor that is changed on
its way (rows moved, blocks decoded, dtype cast, put into a larger tensor) is read instead, so that the file's pages
are not counted beside the copy.
"""

import mmap
from pathlib import Path

import torch
from torch import Tensor

from llamarium.errors import CheckpointError, escape
from llamarium.io import regular_size

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that a weight is stored in without being quantized, by the name that safetensors and GGUF share."""


class TensorFile:
    """One file full of tensors. Offsets and lengths are the caller's to check, against `size`, in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = regular_size(path)
        self._mapped: Tensor | None = None

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 of the private mapping."""
        if self._mapped is None:
            with self.path.open("rb") as file:
                data = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
            self._mapped = torch.frombuffer(data, dtype=torch.uint8)
        return self._mapped[offset : offset + num_bytes]

    def load(self, offset: int, num_bytes: int) -> Tensor:
        """Return (num_bytes,) uint8 in fresh memory."""
        out = torch.empty(num_bytes, dtype=torch.uint8)
        self.load_into(out, offset)
        return out

    def load_into(self, out: Tensor, offset: int) -> None:
        """Fill `out`, a contiguous tensor on the CPU, with the bytes at `offset`.

        Raises:
            CheckpointError: If the file has become shorter since it was opened.
        """
        left = out.detach().view(-1).view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            while left:
                count = file.readinto(left)
                if not count:
                    raise CheckpointError(f"{escape(self.path)}: ended early; it changed while it was being read")
                left = left[count:]

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, *, copy: bool = False) -> Tensor:
        """Return a tensor of `shape` and `dtype`: in place, or in fresh memory if `copy` or badly aligned."""
        num_bytes = dtype.itemsize
        for dim in shape:
            num_bytes *= dim
        in_place = not copy and offset % dtype.itemsize == 0
        raw = self.view(offset, num_bytes) if in_place else self.load(offset, num_bytes)
        return raw.view(dtype).view(shape)

    def tensor_into(self, out: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
        """Fill `out` with the tensor of its shape and of `dtype` at `offset`, cast to `out`'s dtype; return `out`."""
        if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self.load_into(out, offset)
        else:
            out.copy_(self.tensor(offset, tuple(out.shape), dtype, copy=True))
        return out


def check_out(out: Tensor | None, key: str, shape: tuple[int, ...]) -> None:
    """Check that the caller's tensor can take the value.

    Raises:
        CheckpointError: With both shapes.
    """
    if out is not None and tuple(out.shape) != shape:
        raise CheckpointError(f"{escape(key, 80)} has shape {shape}; the tensor to fill has {tuple(out.shape)}")


def unpermute(rows: Tensor, num_heads: int) -> Tensor:
    """Move q's or k's rows from the interleaved order of RoPE pairs to the half-split order.

    Within a head, Meta and GGUF keep the two features of pair i in rows 2i and 2i + 1; here they are in rows i and
    i + H/2. Rows move whole, so packed rows can be moved just as well.

    Args:
        rows: (heads * H, anything), any dtype.
        num_heads: N for q, K for k.

    Source: transformers' `convert_llama_weights_to_hf.py`, `permute`.
    """
    num_rows, width = rows.shape
    pairs = rows.view(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(num_rows, width)


def equal_by_pieces(left: Tensor, right: Tensor) -> bool:
    """Compare two contiguous tensors byte by byte, stopping at the first piece that differs."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    pieces = (t.view(-1).view(torch.uint8).split(_PIECE_BYTES) for t in (left, right))
    return all(torch.equal(a, b) for a, b in zip(*pieces, strict=True))


_PIECE_BYTES = 2**24
