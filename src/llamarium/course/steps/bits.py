"""A weight in four bits."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from llamarium.course.step import Arguments, Mistake, Step
from llamarium.course.steps.types import Floats, Ints


def unpack_q4_0(block: bytes) -> Floats:
    """Return the 32 weights of a block of Q4_0.

    A block is 18 bytes: the scale, a little-endian float16, and 16 bytes with two codes each. The low four bits of byte
    j are the code of weight j, the high four bits that of weight j + 16. A weight is scale * (code - 8).

    Args:
        block: 18 bytes.

    Returns:
        (32,), float32.
    """
    scale = np.frombuffer(block, "<f2", 1).astype(np.float32)
    codes = np.frombuffer(block, np.uint8, 16, offset=2)
    low, high = codes & 15, codes >> 4
    return scale * (np.concatenate([low, high]).astype(np.float32) - 8)


Cut = Callable[[Ints], Ints]


def _unpack_so(
    block: bytes, *, interleaved: bool = False, swapped: bool = False, middle: float = 8, signed: bool = False,
    scale: str = "<f2", wraps: bool = False, low: Cut = lambda codes: codes & 15, high: Cut = lambda codes: codes >> 4,
) -> Floats:  # fmt: skip
    """Unpack with one thing changed."""
    codes = np.frombuffer(block, np.uint8, 16, offset=2)
    halves = (high(codes), low(codes)) if swapped else (low(codes), high(codes))
    together = np.stack(halves, -1).reshape(-1) if interleaved else np.concatenate(halves)
    numbers = together.astype(np.float32)
    if wraps:
        return _scale(block, scale) * (together - np.uint8(8)).astype(np.float32)
    numbers = np.where(numbers > 7, numbers - 16, numbers) if signed else numbers - np.float32(middle)
    return _scale(block, scale) * numbers


def _scale(block: bytes, how: str) -> np.float32:
    """Return the scale, as it is meant or read in a wrong way."""
    bits = np.frombuffer(block, "<u2", 1).astype(np.uint32)
    if how == "bfloat16":
        return (bits << 16).view(np.float32)[0]
    if how == "integer":
        return np.float32(bits[0])
    return np.float32(np.frombuffer(block, how, 1)[0])


def _cases(rng: np.random.Generator) -> Iterator[Arguments]:
    for scale in (0.013, 1.0, -0.25):
        yield (np.float16(scale).astype("<f2").tobytes() + rng.integers(0, 256, 16, np.uint8).tobytes(),)


STEPS = (
    Step(
        unpack_q4_0,
        "Four bits",
        "A quantized weight is a code of four bits; 32 of them share a scale. Your function unpacks one block.",
        "5-how-a-sentence-grows#A weight in four bits",
        "bits",
        ("w W",),
        (
            "np.frombuffer reads both: the scale with dtype '<f2', the codes with dtype uint8 from offset 2.",
            "codes & 15 are weights 0 to 15, codes >> 4 are weights 16 to 31; subtract 8, multiply by the scale.",
        ),
        _cases,
        (
            Mistake("The two codes of a byte are taken as neighbours; they are 16 weights apart.",
                    partial(_unpack_so, interleaved=True)),
            Mistake("The high bits are taken first; the low bits are weights 0 to 15.",
                    partial(_unpack_so, swapped=True)),
            Mistake("The high bits are taken first, and as neighbours of the low; weights 0 to 15 are the low bits.",
                    partial(_unpack_so, swapped=True, interleaved=True)),
            Mistake("The high bits are not shifted: `codes & 240` is 16 times the code; take codes >> 4.",
                    lambda block: _unpack_so(block, high=lambda codes: codes & 240)),
            Mistake("The low bits are not cut out: a byte holds two codes; take codes & 15.",
                    lambda block: _unpack_so(block, low=lambda codes: codes)),
            Mistake("The codes are read from the first byte on; the first two bytes are the scale.",
                    lambda block: unpack_q4_0(block[:2] + block[:16])),
            Mistake("The scale divides; it multiplies.",
                    lambda block: _unpack_so(block) / _scale(block, "<f2") ** 2),
            Mistake("The scale is left out.", lambda block: _unpack_so(block) / _scale(block, "<f2")),
            Mistake("16 is subtracted; it is 8.", partial(_unpack_so, middle=16)),
            Mistake("8 is subtracted after the scale; it is subtracted from the codes.",
                    lambda block: _unpack_so(block, middle=0) - np.float32(8)),
            Mistake("8 is not subtracted: codes are 0 to 15, numbers -8 to 7.", partial(_unpack_so, middle=0)),
            Mistake("8 is subtracted from bytes (uint8), which wrap around below 0: make numbers of the codes first, "
                    "with astype(np.float32).", partial(_unpack_so, wraps=True)),
            Mistake("7 is subtracted; it is 8.", partial(_unpack_so, middle=7)),
            Mistake("7.5 is subtracted; it is 8.", partial(_unpack_so, middle=7.5)),
            Mistake("The codes are read as signed numbers (two's complement); they count from 0, and 8 is subtracted.",
                    partial(_unpack_so, signed=True)),
            Mistake("The scale is read as bfloat16; it is float16.", partial(_unpack_so, scale="bfloat16")),
            Mistake("The scale's bytes are swapped; it is little-endian.", partial(_unpack_so, scale=">f2")),
            Mistake("The scale is read as an integer; it is a float16.", partial(_unpack_so, scale="integer")),
            Mistake("The scale is read from the end of the block; it is the first two bytes.",
                    lambda block: unpack_q4_0(block[16:] + block[:16])),
        ),
    ),
)  # fmt: skip
