"""Cached keys and values as codes of 8 or 4 bits: what is kept of a vector, and what it is read as. Never torch.

A vector of head_dim (H) is rotated by a Hadamard matrix first, where H is a power of two. Scores do not change, since
queries are rotated alike, and what attention mixes is rotated back; but a vector's outliers are spread over all of its
numbers, which then need a smaller scale. After that:

- int8: codes of -127 to 127 and one scale, float32, for the vector: 68 bytes for 64 numbers.
- int4: codes of -8 to 7 in groups of 32, each with a scale in bfloat16: 36 bytes for 64 numbers. Byte i of a group has
  code i, plus 8, in its low half, and code 16 + i in its high one. The last group of another H is padded with zeros.

The C kernels (`native/attention.h`) and the modules (`attention/codes.py`) keep the same codes. The functions here take
arrays of numpy or torch, and the module that they are of.

Source: Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs"; docs/decisions/0058.
"""

import math
from typing import Any, Literal

CacheDtype = Literal["auto", "int8", "int8-k/int4-v", "int4"]
"""KV cache dtype: the model's own, or codes of 8 or 4 bits for keys and values."""

GROUP = 32
"""Codes of 4 bits that share a scale."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of the dtypes that keys and values are kept in, codes apart."""


def kinds_of(dtype: str) -> tuple[str, str]:
    """Return the dtypes of keys and of values in a cache: "int8-k/int4-v" is ("int8", "int4")."""
    return ("int8", "int4") if dtype == "int8-k/int4-v" else (dtype, dtype)


def is_codes(kind: str) -> bool:
    """Return whether a key's or value's dtype is one of codes with scales."""
    return kind in ("int8", "int4")


def num_groups(head_dim: int) -> int:
    """Return how many scales a vector has in 4 bits."""
    return math.ceil(head_dim / GROUP)


def vector_bytes(kind: str, head_dim: int) -> int:
    """Return the bytes of a key or value, its scales included."""
    if kind == "int4":
        return num_groups(head_dim) * (GROUP // 2 + 2)
    return head_dim + 4 if kind == "int8" else head_dim * DTYPE_BYTES[kind]


def hadamard(xp: Any, x: Any) -> Any:
    """Multiply vectors (..., H), float32, by the orthonormal Hadamard matrix of H, its own inverse.

    Sizes that are no power of two from 4 on stay as they are. Sums are in the order of `spread` in native/attention.h.
    """
    size = x.shape[-1]
    if size < 4 or size & (size - 1):
        return x
    for stage in range(size.bit_length() - 1):
        pairs = x.reshape(*x.shape[:-1], size >> stage + 1, 2, 1 << stage)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = xp.stack((a + b, a - b), -2).reshape(x.shape)
    return x * (1 / math.sqrt(size))


def values_of(xp: Any, codes: Any, scales: Any, head_dim: int) -> Any:
    """Return what codes are, still rotated: (..., H), float32.

    Args:
        xp: numpy or torch.
        codes: int8 (..., H), or the bytes of 4-bit codes, uint8 (..., 16 * groups).
        scales: float32, (..., 1) or (..., groups).
        head_dim: H.
    """
    if codes.dtype == xp.int8:
        return codes * scales
    groups = codes.reshape(*codes.shape[:-1], -1, GROUP // 2)
    numbers = xp.concatenate((groups & 15, groups >> 4), -1) - xp.asarray(8.0, dtype=xp.float32)
    numbers = numbers * scales[..., None]
    return numbers.reshape(*codes.shape[:-1], -1)[..., :head_dim]
