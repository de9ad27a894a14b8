"""Which set of kernels a processor could run, by the names that Linux has for its instructions. Never torch.

The library takes the best set that it holds (`native/dispatch.c`), which may be fewer than the processor could run.
"""

from collections.abc import Collection

from llamarium.kernels.native import KERNELS

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}

INSTRUCTIONS: dict[str, frozenset[str]] = {
    "amx": _AVX512 | {"amx_tile", "amx_int8"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512_vnni": _AVX512,
    "avx2": _AVX2,
    "neon_i8mm": frozenset({"asimddp", "i8mm"}),
    "neon_dotprod": frozenset({"asimddp"}),
}
"""What each set needs, as in `flags` (x86-64) or `Features` (Arm) of /proc/cpuinfo."""


def better_kernels(used: str, instructions: Collection[str]) -> str | None:
    """Return the best set that a processor with these instructions could run, if it is better than the one in use."""
    for name in KERNELS[: KERNELS.index(used)]:
        if name in INSTRUCTIONS and INSTRUCTIONS[name] <= {*instructions}:
            return name
    return None
