"""Half-precision products on CPUs that cannot multiply half-precision numbers.

Most x86 machines store bf16 and fp16 but have no instructions to multiply them (only AVX512-BF16 and AMX do), so
PyTorch's bf16 matrix product spends its time on conversions. Two observations help:

- One row (decode) is bound by memory: `torch.mv` reads a large weight at 20 GB/s, `F.linear` at 12. A small weight
  (576 x 576) is mostly in the processor's cache, where `F.linear` starts faster: 82 instead of 109 microseconds.
- Many rows (prefill) are bound by arithmetic: float32 multiplies at 220 GFLOP/s, bf16 at 57, and converting a weight to
  float32 costs as much as multiplying it by a few rows. So the weight is converted once per call, in chunks of rows.

Numerics: every path accumulates in float32 and rounds once, at the end.
"""

import functools
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

_MIN_WEIGHTS_FOR_MV = 2**20  # from this size on, one row is multiplied with `torch.mv`
_MIN_ROWS_TO_CONVERT = 16  # from this number of rows on, converting the weight pays off
_CHUNK_WEIGHTS = 2**20  # converted at a time: 4 MiB of float32, which mostly fit into the processor's cache


@functools.cache
def cpu_has_native_bf16() -> bool:
    """Return whether this CPU multiplies bf16 in hardware.

    Machines other than x86 count as native: the measurements above are from x86, so PyTorch decides elsewhere.
    """
    return not _is_x86() or _has("_is_avx512_bf16_supported") or _has("_is_amx_tile_supported")


@functools.cache
def cpu_has_native_fp16() -> bool:
    """Return whether this CPU multiplies fp16 in hardware; machines other than x86 count as native."""
    return not _is_x86() or _has("_is_amx_fp16_supported")


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _has(probe: str) -> bool:
    """Return the result of one of torch's probes; False, which costs only speed, if torch does not have it."""
    supports = getattr(torch.cpu, probe, None)
    return bool(supports()) if callable(supports) else False


def dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the dtype in which `x` is multiplied fastest: its own, or float32 on a CPU without instructions for it."""
    return x.dtype if x.device.type != "cpu" or _is_native(x.dtype) else torch.float32


def linear_half(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as `F.linear` for bf16 or fp16: x (..., in) by weight (out, in), of x's dtype, to (..., out).

    Uses `F.linear` on other devices, on CPUs with native instructions, and if a gradient is needed, because autograd
    would keep the float32 copy of the weight until the backward pass.
    """
    wants_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if wants_grad or dtype_of_products(x) is x.dtype:
        return F.linear(x, weight)
    num_rows = x.numel() // x.shape[-1]
    if num_rows == 1 and weight.numel() >= _MIN_WEIGHTS_FOR_MV:
        return torch.mv(weight, x.flatten()).view(*x.shape[:-1], -1)
    if num_rows < _MIN_ROWS_TO_CONVERT:
        return F.linear(x, weight)
    return _linear_converted(x, weight)


def _is_native(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return cpu_has_native_bf16()
    return dtype is not torch.float16 or cpu_has_native_fp16()


def _linear_converted(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in float32, converting a chunk of the weight's rows at a time."""
    x32 = x.float()
    out = x.new_empty(*x.shape[:-1], len(weight))
    step = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        out[..., rows] = F.linear(x32, weight[rows].float())
    return out
