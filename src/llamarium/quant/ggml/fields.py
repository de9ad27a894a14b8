"""Building blocks of all block decoders: copies, half-precision numbers, and bit fields.

`xp` is the module of the arrays, `numpy` or `torch`, as everywhere in this package.
"""

from typing import Any


def copy(xp: Any, part: Any) -> Any:
    """Return a contiguous copy, whose bytes can be viewed as another dtype."""
    return xp.concatenate((part,), 0)


def to_float(xp: Any, values: Any) -> Any:
    """Cast an array of any shape to float32."""
    return xp.asarray(values, dtype=xp.float32)


def half(xp: Any, blocks: Any, start: int) -> Any:
    """Read one half-precision scale of each block: (n, 1), float32."""
    return to_float(xp, copy(xp, blocks[:, start : start + 2]).view(xp.float16))


def fields(xp: Any, packed: Any, num_bits: int, run: int) -> Any:
    """Split bytes into fields of `num_bits`, lowest first.

    Args:
        xp: `numpy` or `torch`.
        packed: uint8, (n, bytes).
        num_bits: 1, 2 or 4.
        run: Number of bytes in a run; within a run, field 0 of all bytes comes first, then field 1, ...

    Returns:
        uint8, (n, bytes * 8 / num_bits).
    """
    mask = (1 << num_bits) - 1
    # A byte operation on contiguous memory is ten times as fast as on a slice of each block.
    runs = copy(xp, packed).reshape(len(packed), packed.shape[1] // run, run)
    split = xp.stack([(runs >> shift) & mask for shift in range(0, 8, num_bits)], 2)
    return split.reshape(len(packed), packed.shape[1] * 8 // num_bits)
