"""From weights to GGUF blocks of the K types: the readable counterpart of `native/encode.c`, with the same bytes.

A block of 256 weights has two levels of scales. Each sub-block has a step and, in Q4_K and Q5_K, an offset; these are
small integers times one or two halves of the block. Which steps and offsets are best is found by a search:

1. Try some steps near the one with which the codes just reach all weights of a sub-block. A smaller one cuts off the
   outermost weights and serves all others better.
2. Round the weights to codes with each, and with these codes solve for the step and the offset of least squared error.
   Of all tries the best is kept. Errors count by the weight's size, since large weights move the output more.
3. Round steps and offsets to small integers. With those, find the codes, and then the halves of least squared error.

Nothing is fused, and sums are taken in one order: the 16 weights of a lane one after the other, then lanes. So PyTorch,
and C with registers of any width, find the same bytes. A lane is a sub-block of Q6_K, or half of one in Q4_K and Q5_K.

Source: ggml-quants.c of llama.cpp has the idea (`make_qkx2_quants`, `make_qx_quants`). Other steps are tried here, and
halves are solved for. The tests hold the error to what llama.cpp's quantizer reaches.
"""

import torch
from torch import Tensor

_LANES, _LANE = 16, 16
_LINE_TRIES = tuple(k / 4 for k in range(-8, 5))  # how many levels more or less than there are reach all weights
_STEP_TRIES = tuple(k / 4 for k in range(-2, 9))
_POLISHES, _REFITS = 2, 2
_LEAST_SPREAD = 1e-5  # of codes, squared and relative: below it no line goes through them


def q4_k(values: Tensor) -> Tensor:
    """Pack (n, 256) float32 into (n, 144) bytes."""
    codes, scales = _encode(values, 0, 15, has_offsets=True)
    return torch.cat((*scales, _nibbles(codes, 32)), dim=-1)


def q5_k(values: Tensor) -> Tensor:
    """Pack (n, 256) float32 into (n, 176) bytes."""
    codes, scales = _encode(values, 0, 31, has_offsets=True)
    return torch.cat((*scales, _joined(codes >> 4, 1, 32), _nibbles(codes, 32)), dim=-1)


def q6_k(values: Tensor) -> Tensor:
    """Pack (n, 256) float32 into (n, 210) bytes."""
    codes, (halves, small) = _encode(values, -32, 31, has_offsets=False)
    return torch.cat((_nibbles(codes, 64), _joined(codes >> 4, 2, 32), small, halves), dim=-1)


def _encode(values: Tensor, low: int, high: int, *, has_offsets: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Find codes, uint8 (n, 256), and the bytes of the halves and of the small integers."""
    x = values.view(-1, _LANES, _LANE)
    power = _sum(x * x)
    power = _both(power) / (2 * _LANE) if has_offsets else power / _LANE
    w = power.double().sqrt().float() + x.abs()  # exact, which float32 is not in all libraries of PyTorch
    if has_offsets:
        step, offset = _fit_lines(x, w, high)
        d, m = step.amax(1, keepdim=True) / 63, offset.amax(1, keepdim=True) / 63
        s, t = _between(_ratio(step, d), 0, 63), _between(_ratio(offset, m), 0, 63)
    else:
        step = _fit_steps(x, w, low, high)
        d = step.gather(1, step.abs().argmax(1, keepdim=True)) / -128
        s, t, m = _between(_ratio(step, d), -128, 127), torch.zeros_like(step), torch.zeros_like(d)
    for _ in range(_REFITS):
        d, m = _refit(x, w, s, t, _codes(x, s, t, d, m, low, high), d, m)
    d, m = ((half + 0.0).half() for half in (d, m))  # + 0.0: no zero has a sign
    codes = (_codes(x, s, t, d.float(), m.float(), low, high) - low).to(torch.uint8).flatten(1)
    if not has_offsets:
        return codes, (d.view(-1, 1).view(torch.uint8), s.to(torch.int8).view(torch.uint8).flatten(1))
    halves = torch.cat((d, m), dim=-1).flatten(1).view(torch.uint8)
    return codes, (halves, _six_bits(*(small[:, ::2, 0].to(torch.uint8) for small in (s, t))))


# --- the search -------------------------------------------------------------------------------------------------------


def _fit_lines(x: Tensor, w: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Find for each sub-block of two lanes a step and an offset, neither below 0: x = step * q - offset.

    Args:
        x: Weights, (n, 16, 16).
        w: How much their errors count.
        high: The largest code.

    Returns:
        Both (n, 16, 1), the same in the two lanes of a sub-block.
    """
    least, most = (
        _pairs(x.amin(-1, keepdim=True)).amin(-1, keepdim=True),
        _pairs(x.amax(-1, keepdim=True)).amax(-1, True),
    )
    least = torch.where(least < 0, least, 0.0)
    sum_w, sum_x = _both(_sum(w)), _both(_sum(w * x))
    step, offset, best = (most - least) / high, -least, torch.full_like(least, -torch.inf)
    inverse = _ratio(torch.ones_like(step), most - least)
    for k in range(len(_LINE_TRIES) + _POLISHES):
        if k < len(_LINE_TRIES):
            q = _between((x - least) * (inverse * (high + _LINE_TRIES[k])), 0, high)
        else:
            q = _between((x + offset) * _ratio(torch.ones_like(step), step), 0, high)
        wq = w * q
        sum_q, sum_qq, sum_qx = _both(_sum(wq)), _both(_sum(wq * q)), _both(_sum(wq * x))
        spread = sum_w * sum_qq - sum_q * sum_q
        slope = (sum_w * sum_qx - sum_x * sum_q) / spread
        start = (sum_qq * sum_x - sum_q * sum_qx) / spread
        above = start > 0  # which a block cannot say; then the line goes through zero
        slope, start = torch.where(above, sum_qx / sum_qq, slope), torch.where(above, 0.0, start)
        gain = slope * sum_qx + start * sum_x  # how much of the sum of squares is no error
        better = (spread > _LEAST_SPREAD * (sum_w * sum_qq)) & (slope > 0) & (gain > best)
        step, offset, best = (torch.where(better, *pair) for pair in ((slope, step), (-start, offset), (gain, best)))
    return step, offset


def _fit_steps(x: Tensor, w: Tensor, low: int, high: int) -> Tensor:
    """Find a step of either sign for each lane, (n, 16, 1): x = step * q; the largest weight is near code `low`."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    step, best = largest / low, torch.zeros_like(largest)
    inverse = _ratio(torch.ones_like(largest), largest)
    for change in _STEP_TRIES:
        q = _between(x * (inverse * (low + change)), low, high)
        wq = w * q
        sum_qq, sum_qx = _sum(wq * q), _sum(wq * x)
        gain = sum_qx * sum_qx / sum_qq
        better = gain > best
        step, best = torch.where(better, sum_qx / sum_qq, step), torch.where(better, gain, best)
    return step


def _codes(x: Tensor, s: Tensor, t: Tensor, d: Tensor, m: Tensor, low: int, high: int) -> Tensor:
    """Round to the nearest codes, (n, 16, 16) float32: x = d * s * q - m * t."""
    return _between(_ratio(x + m * t, d * s), low, high)


def _refit(x: Tensor, w: Tensor, s: Tensor, t: Tensor, q: Tensor, d: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Solve for the d and m of least squared error, (n, 1, 1) each; where there are none, those given stay."""
    a, wt = s * q, w * t
    wa = w * a
    aa, at, tt, ax, tx = (_sum(_sum(p).transpose(1, 2)) for p in (wa * a, wa * t, wt * t, wa * x, wt * x))
    det = aa * tt - at * at
    alone = tt == 0
    new_d = torch.where(alone, ax / aa, (ax * tt - tx * at) / det)
    new_m = torch.where(alone, m, (ax * at - tx * aa) / det)
    solved = (alone | (det > _LEAST_SPREAD * (aa * tt))) & (new_d * d > 0) & (new_m >= 0)
    return torch.where(solved, new_d, d), torch.where(solved, new_m, m)


# --- parts of it ------------------------------------------------------------------------------------------------------


def _sum(values: Tensor) -> Tensor:
    """Add up (..., 16) one after the other: (..., 1)."""
    total = values[..., :1]
    for i in range(1, _LANE):
        total = total + values[..., i : i + 1]
    return total


def _pairs(lanes: Tensor) -> Tensor:
    """Show (n, 16, 1) beside what the other lane of the sub-block has: (n, 16, 2)."""
    other = lanes.view(-1, _LANES // 2, 2).flip(-1).view(-1, _LANES, 1)
    return torch.cat((lanes, other), dim=-1)


def _both(lanes: Tensor) -> Tensor:
    """Add up the two lanes of a sub-block, in both: (n, 16, 1)."""
    return _pairs(lanes).sum(-1, keepdim=True)


def _between(values: Tensor, low: int, high: int) -> Tensor:
    """Round to whole numbers from `low` to `high`, halves to even; what is no number becomes `low`."""
    return torch.where(values > low, values, low).clamp_max(high).round()


def _ratio(values: Tensor, steps: Tensor) -> Tensor:
    """Return values / steps, and 0 where a step is 0."""
    return torch.where(steps == 0, 0.0, values / steps)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _joined(fields: Tensor, num_bits: int, run: int) -> Tensor:
    """Join (n, 256) fields of `num_bits` to bytes: the first `run` are the lowest bits of `run` bytes, and so on."""
    parts = fields.unflatten(-1, (-1, 8 // num_bits, run)) & ((1 << num_bits) - 1)
    joined = parts[:, :, 0]
    for i in range(1, 8 // num_bits):
        joined = joined | (parts[:, :, i] << (num_bits * i))
    return joined.flatten(1)


def _nibbles(codes: Tensor, run: int) -> Tensor:
    return _joined(codes, 4, run)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack 8 scales and 8 minima of 6 bits, uint8 (n, 8) each, into (n, 12) bytes; `_six_bit_pairs` says how."""
    late = scales[:, 4:], minima[:, 4:]
    first, second = (early | (last >> 4 << 6) for early, last in zip((scales[:, :4], minima[:, :4]), late, strict=True))
    return torch.cat((first, second, (late[0] & 15) | ((late[1] & 15) << 4)), dim=-1)
