"""Formats of the quantized KV cache, 8 or 4 bits. Torch-free.

If the head dimension H is a power of two, a vector is first rotated by a Hadamard matrix. Queries are rotated in the
same way, so scores do not change, and the output of attention is rotated back. The rotation spreads outliers over all
elements, which then need a smaller scale. After that:

- int8: codes of -127 to 127 and one float32 scale per vector: 68 bytes for 64 elements.
- int4: codes of -8 to 7 in groups of 32, each with a bfloat16 scale: 36 bytes for 64 elements. Byte i of a group has
  code i, plus 8, in its low half and code 16 + i in its high half. If H is not a multiple of 32, the last group is
  padded with zeros.

The C kernels (`native/attention.h`) and the PyTorch modules (`attention/codes.py`) use the same codes. The functions
here accept numpy arrays or torch tensors, together with the module, numpy or torch.

Source: Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs"; docs/decisions/0058.
"""

import math
from typing import Any, Literal

CacheDtype = Literal["auto", "int8", "int8-k/int4-v", "int4"]
"""KV cache dtype: the model's ("auto"), or 8 or 4 bits for keys and values."""

GROUP = 32
"""Number of 4-bit codes that share a scale."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the KV cache dtypes that are not quantized."""


def kinds_of(dtype: str) -> tuple[str, str]:
    """Return the dtypes of keys and values: ("int8", "int4") for "int8-k/int4-v"."""
    return ("int8", "int4") if dtype == "int8-k/int4-v" else (dtype, dtype)


def is_codes(kind: str) -> bool:
    """Return whether a dtype of keys or values is quantized."""
    return kind in ("int8", "int4")


def num_groups(head_dim: int) -> int:
    """Return how many scales a 4-bit vector has."""
    return math.ceil(head_dim / GROUP)


def vector_bytes(kind: str, head_dim: int) -> int:
    """Return the size of a key or value vector in bytes, scales included."""
    if kind == "int4":
        return num_groups(head_dim) * (GROUP // 2 + 2)
    return head_dim + 4 if kind == "int8" else head_dim * DTYPE_BYTES[kind]


def hadamard(xp: Any, x: Any) -> Any:
    """Multiply vectors (..., H), float32, by the orthonormal Hadamard matrix of H, its own inverse.

    If H is not a power of two of at least 4, x is returned unchanged. The order of additions is that of `spread` in
    native/attention.h.
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
    """Dequantize vectors, without undoing the rotation: (..., H), float32.

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
