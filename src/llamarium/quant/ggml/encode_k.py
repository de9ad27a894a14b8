"""Quantize weights to GGUF's K types: the readable counterpart of `native/encode.c`, with identical bytes.

A block of 256 weights has two levels of scales. Each sub-block has a step and, in Q4_K and Q5_K, an offset; these are
small integers times one or two halves of the block. Which steps and offsets are best is found by a search:

1. Try some steps near the one with which the codes just reach all weights of a sub-block. A smaller one cuts off the
   outermost weights and represents all others better.
2. Round the weights to codes with each, and solve for the step and the offset of least squared error given these codes.
   The best try is kept. Errors are weighted by the weight's size, since large weights affect the output more.
3. Round steps and offsets to small integers. With those, find the codes, and then the halves of least squared error.

Nothing is fused, and sums are taken in one order: the 16 weights of a lane one after the other, then lanes. So numpy,
and C with registers of any width, find the same bytes. A lane is a sub-block of Q6_K, or half of one in Q4_K and Q5_K.

Source: the idea is from ggml-quants.c of llama.cpp (`make_qkx2_quants`, `make_qx_quants`). Here other steps are tried,
and the halves are solved for. The tests compare the error with that of llama.cpp's quantizer.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# float32 and uint8, which numpy's types widen in arithmetic with Python's numbers.
Floats = NDArray[Any]
Codes = NDArray[Any]

_LANES, _LANE = 16, 16
_LINE_TRIES = tuple(k / 4 for k in range(-8, 5))  # how many levels more or less than there are reach all weights
_STEP_TRIES = tuple(k / 4 for k in range(-2, 9))
_POLISHES, _REFITS = 2, 2
_LEAST_SPREAD = 1e-5  # of codes, squared and relative: below it no line goes through them


def q4_k(values: Floats) -> Codes:
    """Pack (n, 256) float32 into (n, 144) bytes."""
    codes, scales = _encode(values, 0, 15, has_offsets=True)
    return np.concatenate((*scales, _joined(codes, 4, 32)), axis=-1)


def q5_k(values: Floats) -> Codes:
    """Pack (n, 256) float32 into (n, 176) bytes."""
    codes, scales = _encode(values, 0, 31, has_offsets=True)
    return np.concatenate((*scales, _joined(codes >> 4, 1, 32), _joined(codes, 4, 32)), axis=-1)


def q6_k(values: Floats) -> Codes:
    """Pack (n, 256) float32 into (n, 210) bytes."""
    codes, (halves, small) = _encode(values, -32, 31, has_offsets=False)
    return np.concatenate((_joined(codes, 4, 64), _joined(codes >> 4, 2, 32), small, halves), axis=-1)


def _encode(values: Floats, low: int, high: int, *, has_offsets: bool) -> tuple[Codes, tuple[Codes, Codes]]:
    """Find codes, uint8 (n, 256), and the bytes of the halves and of the small integers."""
    x = values.reshape(-1, _LANES, _LANE)
    power = _sum(x * x)
    power = _both(power) / (2 * _LANE) if has_offsets else power / _LANE
    w = np.sqrt(power) + np.abs(x)
    if has_offsets:
        step, offset = _fit_lines(x, w, high)
        d, m = step.max(1, keepdims=True) / 63, offset.max(1, keepdims=True) / 63
        s, t = _between(_ratio(step, d), 0, 63), _between(_ratio(offset, m), 0, 63)
    else:
        step = _fit_steps(x, w, low, high)
        d = np.take_along_axis(step, np.abs(step).argmax(1, keepdims=True), 1) / -128
        s, t, m = _between(_ratio(step, d), -128, 127), np.zeros_like(step), np.zeros_like(d)
    for _ in range(_REFITS):
        d, m = _refit(x, w, s, t, _codes(x, s, t, d, m, low, high), d, m)
    d, m = ((factor + 0.0).astype(np.float16) for factor in (d, m))  # + 0.0: no zero has a sign
    codes = _codes(x, s, t, d.astype(np.float32), m.astype(np.float32), low, high) - low
    codes = codes.astype(np.uint8).reshape(len(x), -1)
    if not has_offsets:
        return codes, (d.reshape(-1, 1).view(np.uint8), s.astype(np.int8).view(np.uint8).reshape(len(x), -1))
    halves = np.concatenate((d, m), axis=-1).reshape(len(x), -1).view(np.uint8)
    return codes, (halves, _six_bits(*(small[:, ::2, 0].astype(np.uint8) for small in (s, t))))


def _fit_lines(x: Floats, w: Floats, high: int) -> tuple[Floats, Floats]:
    """Find for each sub-block of two lanes a step and an offset, neither below 0: x = step * q - offset.

    Args:
        x: Weights, (n, 16, 16).
        w: Weights of their squared errors.
        high: The largest code.

    Returns:
        Both (n, 16, 1), the same in the two lanes of a sub-block.
    """
    minimum = np.minimum(_pairs(x.min(-1, keepdims=True)).min(-1, keepdims=True), np.float32(0))
    maximum = _pairs(x.max(-1, keepdims=True)).max(-1, keepdims=True)
    sum_w, sum_x = _both(_sum(w)), _both(_sum(w * x))
    step, offset, best = (maximum - minimum) / high, -minimum, np.full_like(minimum, -np.inf)
    inverse = _ratio(np.ones_like(step), maximum - minimum)
    for k in range(len(_LINE_TRIES) + _POLISHES):
        if k < len(_LINE_TRIES):
            q = _between((x - minimum) * (inverse * (high + _LINE_TRIES[k])), 0, high)
        else:
            q = _between((x + offset) * _ratio(np.ones_like(step), step), 0, high)
        wq = w * q
        sum_q, sum_qq, sum_qx = _both(_sum(wq)), _both(_sum(wq * q)), _both(_sum(wq * x))
        spread = sum_w * sum_qq - sum_q * sum_q
        slope = (sum_w * sum_qx - sum_x * sum_q) / spread
        start = (sum_qq * sum_x - sum_q * sum_qx) / spread
        above = start > 0  # which a block cannot say; then the line goes through zero
        slope, start = np.where(above, sum_qx / sum_qq, slope), np.where(above, np.float32(0), start)
        gain = slope * sum_qx + start * sum_x  # how much of the sum of squares is no error
        better = (spread > _LEAST_SPREAD * (sum_w * sum_qq)) & (slope > 0) & (gain > best)
        step, offset, best = (np.where(better, *pair) for pair in ((slope, step), (-start, offset), (gain, best)))
    return step, offset


def _fit_steps(x: Floats, w: Floats, low: int, high: int) -> Floats:
    """Find a step of either sign for each lane, (n, 16, 1): x = step * q; the largest weight is near code `low`."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)
    step, best = largest / low, np.zeros_like(largest)
    inverse = _ratio(np.ones_like(largest), largest)
    for change in _STEP_TRIES:
        q = _between(x * (inverse * (low + change)), low, high)
        wq = w * q
        sum_qq, sum_qx = _sum(wq * q), _sum(wq * x)
        gain = sum_qx * sum_qx / sum_qq
        better = gain > best
        step, best = np.where(better, sum_qx / sum_qq, step), np.where(better, gain, best)
    return step


def _codes(x: Floats, s: Floats, t: Floats, d: Floats, m: Floats, low: int, high: int) -> Floats:
    """Round to the nearest codes, (n, 16, 16) float32: x = d * s * q - m * t."""
    return _between(_ratio(x + m * t, d * s), low, high)


def _refit(x: Floats, w: Floats, s: Floats, t: Floats, q: Floats, d: Floats, m: Floats) -> tuple[Floats, Floats]:
    """Solve for the d and m of least squared error, (n, 1, 1) each; the given ones stay where there is no solution."""
    a, wt = s * q, w * t
    wa = w * a
    aa, at, tt, ax, tx = (_sum(_sum(p).swapaxes(1, 2)) for p in (wa * a, wa * t, wt * t, wa * x, wt * x))
    det = aa * tt - at * at
    alone = tt == 0
    new_d = np.where(alone, ax / aa, (ax * tt - tx * at) / det)
    new_m = np.where(alone, m, (ax * at - tx * aa) / det)
    solved = (alone | (det > _LEAST_SPREAD * (aa * tt))) & (new_d * d > 0) & (new_m >= 0)
    return np.where(solved, new_d, d), np.where(solved, new_m, m)


def _sum(values: Floats) -> Floats:
    """Add up (..., 16) one after the other: (..., 1)."""
    total = values[..., :1]
    for i in range(1, _LANE):
        total = total + values[..., i : i + 1]
    return total


def _pairs(lanes: Floats) -> Floats:
    """Pair each lane's value, (n, 16, 1), with the other lane's of its sub-block: (n, 16, 2)."""
    swapped = lanes.reshape(-1, _LANES // 2, 2)[..., ::-1].reshape(-1, _LANES, 1)
    return np.concatenate((lanes, swapped), axis=-1)


def _both(lanes: Floats) -> Floats:
    """Add up the two lanes of a sub-block, in both: (n, 16, 1)."""
    return _pairs(lanes).sum(-1, keepdims=True)


def _between(values: Floats, low: int, high: int) -> Floats:
    """Round to integers from `low` to `high`, halves to even; NaN becomes `low`."""
    return np.rint(np.minimum(np.where(values > low, values, np.float32(low)), np.float32(high)))


def _ratio(values: Floats, steps: Floats) -> Floats:
    """Return values / steps, and 0 where a step is 0."""
    return np.where(steps == 0, np.float32(0), values / steps)


def _joined(fields: Codes, num_bits: int, run: int) -> Codes:
    """Join (n, 256) fields of `num_bits` to bytes: the first `run` are the lowest bits of `run` bytes, and so on."""
    parts = fields.reshape(len(fields), -1, 8 // num_bits, run) & ((1 << num_bits) - 1)
    joined = parts[:, :, 0]
    for i in range(1, 8 // num_bits):
        joined = joined | (parts[:, :, i] << (num_bits * i))
    return joined.reshape(len(fields), -1)


def _six_bits(scales: Codes, minima: Codes) -> Codes:
    """Pack 8 scales and 8 minima of 6 bits, uint8 (n, 8) each, into (n, 12) bytes; `_six_bit_pairs` says how."""
    late = scales[:, 4:], minima[:, 4:]
    first, second = (early | (last >> 4 << 6) for early, last in zip((scales[:, :4], minima[:, :4]), late, strict=True))
    return np.concatenate((first, second, (late[0] & 15) | ((late[1] & 15) << 4)), axis=-1)
