"""Which kernels a processor could run, by Linux's names of its instructions. Torch-free.

The library uses the best set it was compiled with (`native/dispatch.c`), which may not be the best for the processor.
"""

from collections.abc import Collection

from llamarium.kernels.native import KERNELS

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}

INSTRUCTIONS: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"amx_tile", "amx_int8"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512_vnni": _AVX512,
    "avx_vnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
    "neon_i8mm": frozenset({"asimddp", "i8mm"}),
    "neon_dotprod": frozenset({"asimddp"}),
}
"""Required instructions of each set, as in `flags` (x86-64) or `Features` (Arm) of /proc/cpuinfo."""


def better_kernels(current: str, instructions: Collection[str]) -> str | None:
    """Return the best kernels for a processor with these instructions, or None if the current ones are as good."""
    for name in KERNELS[: KERNELS.index(current)]:
        if name in INSTRUCTIONS and INSTRUCTIONS[name] <= {*instructions}:
            return name
    return None
