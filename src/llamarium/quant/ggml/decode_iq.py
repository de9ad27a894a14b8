"""Dequantize GGUF's IQ types, whose codes index vectors, bit-identical to ggml.

A code gives the magnitudes of four or eight neighbouring weights: it is the index of a vector in a codebook
(`codebooks.py`). Signs are stored separately as bits. In the smallest types seven sign bits serve eight weights: the
eighth makes the number of minus signs even. In IQ1 the vectors contain signs, and all components are shifted by 1/8.

Blocks have 256 weights, a float16 scale d, and a small integer for each 16 or 32 weights that multiplies it. Each
decoder takes uint8 (n, bytes of a block) and gives float32 (n, 256); `xp` is `numpy` or `torch`.

Source: ggml-quants.c, `dequantize_row_iq*`. The tests compare with `gguf.quants`.
"""

import base64
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.quant.ggml.codebooks import CODEBOOKS
from llamarium.quant.ggml.fields import copy, fields, half, to_float

_SHIFT = 0.125


@functools.cache
def _vectors(type_name: str) -> NDArray[np.float32]:
    """Return a codebook: (vectors, components), float32."""
    book = CODEBOOKS[type_name]
    packed = np.frombuffer(base64.b85decode(book.data), np.uint8)
    places = np.stack((packed & 15, packed >> 4), axis=-1)
    return np.array(book.magnitudes, np.float32)[places].reshape(-1, book.width)


@functools.cache
def _even_signs() -> NDArray[np.float32]:
    """Return the signs of eight weights for each value of seven bits: (128, 8), 1 or -1, an even number of them -1."""
    bits = np.arange(128)[:, None] >> np.arange(7) & 1
    return (1 - 2 * np.concatenate((bits, bits.sum(1, keepdims=True) & 1), axis=1)).astype(np.float32)


def _look_up(xp: Any, table: NDArray[np.float32], index: Any) -> Any:
    """Return rows of a table: index (n, k) of any integer type, to (n, k, components)."""
    rows = xp.asarray(table)
    rows = rows if xp is np else rows.to(index.device)
    return rows[xp.asarray(index, dtype=xp.int64)]


def _wide(xp: Any, values: Any) -> Any:
    return xp.asarray(values, dtype=xp.int32)


def _words(xp: Any, part: Any) -> Any:
    """Return 16-bit words: uint8 (n, 2 k) to int32 (n, k)."""
    return _wide(xp, part[:, ::2]) | (_wide(xp, part[:, 1::2]) << 8)


def _signs(xp: Any, part: Any) -> Any:
    """Convert bits, lowest first, to signs: uint8 (n, k) to float32 (n, k, 8), 1 or -1."""
    return 1 - 2 * to_float(xp, fields(xp, part, 1, 1)).reshape(*part.shape, 8)


def _signs_and_scales(xp: Any, part: Any) -> tuple[Any, Any]:
    """Split 32-bit words into four groups of seven sign bits and a 4-bit scale.

    Returns:
        Signs, (n, 4 words, 8), and scales, (n, words), float32.
    """
    low, high = _words(xp, part)[:, ::2], _words(xp, part)[:, 1::2]
    index = xp.stack((low, (low >> 7) | (high << 9), (low >> 14) | (high << 2), high >> 5), 2) & 127
    return _look_up(xp, _even_signs(), index.reshape(len(part), -1)), to_float(xp, high >> 12)


def _scaled(vectors: Any, signs: Any, scales: Any) -> Any:
    """Multiply vectors (n, k, components) with signs of as many weights, and with scales (n, parts) of equal parts."""
    num_parts = scales.shape[1]
    values = scales[..., None] * vectors.reshape(len(vectors), num_parts, -1)
    return (values * signs.reshape(values.shape)).reshape(len(vectors), -1)


def iq2_xxs(xp: Any, blocks: Any) -> Any:
    """Block: d half; 8 times 4 bytes of codes and a word of signs and a scale, for 32 weights."""
    parts = blocks[:, 2:].reshape(len(blocks), 8, 8)
    signs, scales = _signs_and_scales(xp, copy(xp, parts[..., 4:]).reshape(len(blocks), -1))
    vectors = _look_up(xp, _vectors("IQ2_XXS"), parts[..., :4].reshape(len(blocks), -1))
    return _scaled(vectors, signs, half(xp, blocks, 0) * (scales + 0.5) * 0.25)


def iq2_xs(xp: Any, blocks: Any) -> Any:
    """Block: d half; 32 words of 9 bits of a code and 7 of signs; 8 bytes of 4-bit scales, for 16 weights each."""
    words = _words(xp, blocks[:, 2:66])
    scales = to_float(xp, fields(xp, blocks[:, 66:], 4, 1))
    vectors, signs = _look_up(xp, _vectors("IQ2_XS"), words & 511), _look_up(xp, _even_signs(), words >> 9)
    return _scaled(vectors, signs, half(xp, blocks, 0) * (scales + 0.5) * 0.25)


def iq2_s(xp: Any, blocks: Any) -> Any:
    """Block: d half; 32 bytes of codes, 32 of signs, 8 of the codes' high two bits, 8 of 4-bit scales."""
    codes = _wide(xp, blocks[:, 2:34]) | (_wide(xp, fields(xp, blocks[:, 66:74], 2, 1)) << 8)
    scales = to_float(xp, fields(xp, blocks[:, 74:], 4, 1))
    vectors = _look_up(xp, _vectors("IQ2_S"), codes)
    return _scaled(vectors, _signs(xp, blocks[:, 34:66]), half(xp, blocks, 0) * (scales + 0.5) * 0.25)


def iq3_xxs(xp: Any, blocks: Any) -> Any:
    """Block: d half; 64 bytes of codes; 8 words of signs and a scale, for 32 weights each."""
    signs, scales = _signs_and_scales(xp, blocks[:, 66:])
    vectors = _look_up(xp, _vectors("IQ3_XXS"), blocks[:, 2:66])
    return _scaled(vectors, signs, half(xp, blocks, 0) * (scales + 0.5) * 0.5)


def iq3_s(xp: Any, blocks: Any) -> Any:
    """Block: d half; 64 bytes of codes, 8 of their ninth bits, 32 of signs, 4 of 4-bit scales, for 32 weights each."""
    codes = _wide(xp, blocks[:, 2:66]) | (_wide(xp, fields(xp, blocks[:, 66:74], 1, 1)) << 8)
    scales = to_float(xp, fields(xp, blocks[:, 106:], 4, 1))
    vectors = _look_up(xp, _vectors("IQ3_S"), codes)
    return _scaled(vectors, _signs(xp, blocks[:, 74:106]), half(xp, blocks, 0) * (2 * scales + 1))


def _shifted(xp: Any, codes: Any, is_negative: Any, scales: Any) -> Any:
    """Return scales * (vectors + shift): codes (n, 32), and a bit and a scale for each of some equal parts."""
    vectors = _look_up(xp, _vectors("IQ1_S"), codes)
    shift = _SHIFT - 2 * _SHIFT * to_float(xp, is_negative)
    shifted = vectors.reshape(len(codes), shift.shape[1], -1) + shift[..., None]
    return (scales[..., None] * shifted.reshape(len(codes), scales.shape[1], -1)).reshape(len(codes), -1)


def iq1_s(xp: Any, blocks: Any) -> Any:
    """Block: d half; 32 bytes of codes; 8 words of four times 3 high bits, a scale of 3 bits, and the shift's sign."""
    words = _words(xp, blocks[:, 34:])
    high = xp.stack([words >> shift for shift in (0, 3, 6, 9)], 2).reshape(len(blocks), 32) & 7
    scales = half(xp, blocks, 0) * to_float(xp, 2 * (words >> 12 & 7) + 1)
    return _shifted(xp, _wide(xp, blocks[:, :34][:, 2:]) | (high << 8), words >> 15, scales)


def iq1_m(xp: Any, blocks: Any) -> Any:
    """Block: 32 bytes of codes; 16 of twice 3 high bits and the shift's sign; 4 words of four scales of 3 bits.

    The high four bits of the words are those of d, a half.
    """
    words = _words(xp, blocks[:, 48:])
    top = words >> 12
    bits = top[:, :1] | (top[:, 1:2] << 4) | (top[:, 2:3] << 8) | (top[:, 3:] << 12)
    d = to_float(xp, xp.asarray(bits - (bits >> 15 << 16), dtype=xp.int16).view(xp.float16))
    small = xp.stack([words >> shift for shift in (0, 3, 6, 9)], 2).reshape(len(blocks), 16) & 7
    high = fields(xp, blocks[:, 32:48], 4, 1)
    codes = _wide(xp, blocks[:, :32]) | (_wide(xp, high & 7) << 8)
    return _shifted(xp, codes, high >> 3, d * to_float(xp, 2 * small + 1))
