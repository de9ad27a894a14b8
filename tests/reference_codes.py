"""Attention over keys and values in codes of 8 bits, in NumPy: rounded where the C kernels round, summed in float64."""

import numpy as np
from numpy.typing import NDArray

from llamarium.kv_codes import hadamard

CHUNK = 256  # slots whose weights are rounded with one scale

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]


def attend_codes(q_NH: Floats, k_SKH: Codes, k_scales_SK: Floats, v_SKH: Codes, v_scales_SK: Floats) -> Floats:
    """Return what one token's queries, after RoPE, see: (N, H)."""
    heads, head_dim = q_NH.shape
    group = heads // k_SKH.shape[1]
    spread_NH = hadamard(np, q_NH * np.float32(1 / np.sqrt(head_dim)))
    mixed = np.stack(
        [
            _mix(_scores(query, k_SKH[:, n // group], k_scales_SK[:, n // group]), v_SKH[:, n // group],
                 v_scales_SK[:, n // group])
            for n, query in enumerate(spread_NH)
        ]
    )  # fmt: skip
    return hadamard(np, mixed.astype(np.float32))


def _scores(q_H: Floats, k_SH: Codes, scales_S: Floats) -> NDArray[np.float64]:
    """The query is rounded to 16 bits; with more than 127 * 32767 / 2^31 numbers in it to a little less."""
    most = np.float32(min(2**15 - 1, (2**31 - 1) // 127 // len(q_H)))
    scale = np.abs(q_H).max() / most
    codes = np.rint(q_H * (np.float32(1) / scale))
    return k_SH.astype(np.float64) @ codes * scale * scales_S


def _mix(scores_S: NDArray[np.float64], v_SH: Codes, scales_S: Floats) -> NDArray[np.float64]:
    """In each chunk the weights, times the values' scales, are rounded to 16 bits."""
    largest, total, mixture = scores_S.max(), 0.0, np.zeros(v_SH.shape[1])
    for begin in range(0, len(scores_S), CHUNK):
        here = slice(begin, begin + CHUNK)
        weights = np.exp(scores_S[here] - scores_S[here].max())
        scaled = weights * scales_S[here]
        scale = (scaled.max() / (2**15 - 1)) or 1.0
        share = np.exp(scores_S[here].max() - largest)
        total += share * weights.sum()
        mixture += share * scale * (np.rint(scaled / scale) @ v_SH[here].astype(np.float64))
    return mixture / total
