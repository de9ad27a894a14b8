"""Validation and decoding of an NF4 weight in a bitsandbytes checkpoint. Torch-free.

In addition to the codes (`weight`) there are up to five components: `weight.absmax`, `weight.quant_map`,
`weight.nested_absmax`, `weight.nested_quant_map`, and `weight.quant_state.bitsandbytes__nf4`, a JSON object in bytes
with the logical shape and the block sizes. The sizes of all components are checked against the shape.

Source: bitsandbytes, `functional.py`, `QuantState.as_dict` and `from_dict`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import CheckpointError, UnsupportedFormatError, escape

STATE_KEY = "weight.quant_state.bitsandbytes__nf4"
"""The component that holds the JSON object."""

NESTED_BLOCK_SIZE = 256
"""Number of scales per block of the second quantization; bitsandbytes has no other size."""

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the sixteen codes, before scaling."""

_STATE = STATE_KEY.removeprefix("weight.")
_FLAT_KEYS: frozenset[str] = frozenset(("weight", "weight.absmax", "weight.quant_map", STATE_KEY))
_NESTED_KEYS: frozenset[str] = frozenset(("weight.nested_absmax", "weight.nested_quant_map"))
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DTYPES = ("float32", "float16", "bfloat16")
_STORAGES = ("U8", "I8", "F32", "F16", "BF16", "F64")
_MAX_JSON_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NF4Layout:
    """The shape and block sizes of an NF4 weight.

    Attributes:
        shape: (out_features, in_features).
        dtype: Dtype of the weight before quantization, such as `bfloat16`.
        block_size: Weights per block.
        double_quant: True if the scales are quantized too, in blocks of `NESTED_BLOCK_SIZE`.
        nested_offset: Mean that was subtracted from the scales before they were quantized; None without double
            quantization, or if the weight has not been read from a file.
    """

    shape: tuple[int, int]
    dtype: str
    block_size: int = 64
    double_quant: bool = False
    nested_offset: float | None = None

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, and so of scales; the last block may be short."""
        return -(-self.num_weights // self.block_size)

    @property
    def num_nested_blocks(self) -> int:
        """Number of blocks of scales; 0 without double quantization."""
        return -(-self.num_blocks // NESTED_BLOCK_SIZE) if self.double_quant else 0

    @classmethod
    def from_json(cls, raw: bytes, source: str) -> "NF4Layout":
        """Parse and validate the JSON object.

        Raises:
            CheckpointError: If it is malformed, or a field has an invalid value.
            UnsupportedFormatError: For FP4.
        """
        fields = _parse(raw, source)
        quant_type = fields.get("quant_type")
        if quant_type == "fp4":
            raise UnsupportedFormatError(f"{source}: quant_type is fp4; supported is nf4 only")
        _check(quant_type == "nf4", source, "quant_type", quant_type, '"nf4"')
        nested = "nested_blocksize" in fields
        expected = {"quant_type", "blocksize", "dtype", "shape"}
        if nested:
            expected |= {"nested_blocksize", "nested_dtype", "nested_offset"}
        _check(set(fields) == expected, source, "the list of fields", sorted(fields), str(sorted(expected)))
        shape, block_size, dtype = fields["shape"], fields["blocksize"], fields["dtype"]
        _check(_is_shape(shape), source, "shape", shape, "[out_features, in_features]")
        _check(_is_int(block_size) and block_size in _BLOCK_SIZES, source, "blocksize", block_size, str(_BLOCK_SIZES))
        _check(isinstance(dtype, str) and dtype in _DTYPES, source, "dtype", dtype, f"one of {', '.join(_DTYPES)}")
        if not nested:
            return cls((shape[0], shape[1]), dtype, block_size)
        nested_size, offset = fields["nested_blocksize"], fields["nested_offset"]
        _check(
            _is_int(nested_size) and nested_size == NESTED_BLOCK_SIZE, source, "nested_blocksize", nested_size, "256"
        )
        _check(fields["nested_dtype"] == "float32", source, "nested_dtype", fields["nested_dtype"], '"float32"')
        _check(_is_finite(offset), source, "nested_offset", offset, "a finite number")
        return cls((shape[0], shape[1]), dtype, block_size, True, float(offset))


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a weight, as stored in a file.

    Attributes:
        type_name: Type in the file: `U8`, `F32`, ...
        values: Its array; for codes only the number of bytes matters.
    """

    type_name: str
    values: NDArray[Any]


def check_components(components: Mapping[str, Component], source: str) -> NF4Layout:
    """Check that the components of a weight are complete and have the right types and sizes; return their layout.

    Raises:
        CheckpointError: If a component is missing, unknown or invalid.
        UnsupportedFormatError: For FP4.
    """
    layout = NF4Layout.from_json(_state_bytes(components, source), source)
    expected = _FLAT_KEYS | _NESTED_KEYS if layout.double_quant else _FLAT_KEYS
    _check(
        set(components) == set(expected), source, "the list of components", sorted(components), str(sorted(expected))
    )
    codes, num_bytes = components["weight"], -(-layout.num_weights // 2)
    if codes.type_name not in _STORAGES or codes.values.nbytes != num_bytes:
        actual = f"{codes.values.nbytes} bytes of {codes.type_name}"
        _check(False, source, "weight", actual, f"{num_bytes} of U8, or as many bytes in a dtype of floats")
    _check_values(components, "weight.quant_map", "F32", 16, source)
    _check_values(components, "weight.absmax", "U8" if layout.double_quant else "F32", layout.num_blocks, source)
    if layout.double_quant:
        _check_values(components, "weight.nested_absmax", "F32", layout.num_nested_blocks, source)
        _check_values(components, "weight.nested_quant_map", "F32", 256, source)
    actual = components["weight.quant_map"].values.reshape(-1)
    if not np.allclose(actual, np.array(LEVELS, dtype=np.float32), rtol=0, atol=1e-6):
        _check(False, source, "weight.quant_map", actual.tolist(), "NF4's sixteen levels")
    return layout


def decode_nf4(xp: Any, parts: Mapping[str, Any], shape: tuple[int, ...], start: int, stop: int) -> Any:
    """Dequantize rows `start` to `stop` of an NF4 weight, float32; see `StoredType.decode`.

    `parts` has the validated components without the prefix `weight.`, and the codes as "data".
    """
    layout = NF4Layout.from_json(bytes(parts[_STATE].tolist()), "NF4")
    columns, size = shape[1], layout.block_size
    first, last = start * columns // size, -(-stop * columns // size)  # whole blocks; the last one may be short
    begin, end = first * size, min(last * size, layout.num_weights)

    packed = parts["data"].reshape(-1)[begin // 2 : -(-end // 2)]
    codes = xp.stack((packed >> 4, packed & 15), -1).reshape(-1)[: end - begin]
    values = _look_up(xp, LEVELS, codes) * _spread(xp, _scales(xp, parts, layout, first, last), size)[: end - begin]
    return values[start * columns - begin : stop * columns - begin].reshape(stop - start, columns)


def _scales(xp: Any, parts: Mapping[str, Any], layout: NF4Layout, start: int, stop: int) -> Any:
    """Dequantize the absmax values of blocks `start` to `stop`, float32."""
    absmax = parts["absmax"].reshape(-1)
    if layout.nested_offset is None:
        return absmax[start:stop]
    first, last = start // NESTED_BLOCK_SIZE, -(-stop // NESTED_BLOCK_SIZE)
    begin, end = first * NESTED_BLOCK_SIZE, min(last * NESTED_BLOCK_SIZE, layout.num_blocks)
    values = _look_up(xp, parts["nested_quant_map"].reshape(-1), absmax[begin:end])
    spread = _spread(xp, parts["nested_absmax"].reshape(-1)[first:last], NESTED_BLOCK_SIZE)
    values = values * spread[: end - begin] + xp.asarray(layout.nested_offset, dtype=xp.float32)
    return values[start - begin : stop - begin]


def _look_up(xp: Any, table: Any, places: Any) -> Any:
    table = xp.asarray(table, dtype=xp.float32)
    table = table if xp is np else table.to(places.device)
    return table[xp.asarray(places, dtype=xp.int64)]


def _spread(xp: Any, scales: Any, size: int) -> Any:
    """Repeat each scale `size` times, once for each value of its block."""
    return xp.broadcast_to(scales[:, None], (len(scales), size)).reshape(-1)


def _state_bytes(components: Mapping[str, Component], source: str) -> bytes:
    if STATE_KEY not in components:
        if "weight.quant_state.bitsandbytes__fp4" in components:
            raise UnsupportedFormatError(f"{source}: quant_type is fp4; supported is nf4 only")
        raise CheckpointError(
            f"{source}: {STATE_KEY} is missing; expected it beside weight, with shape and block sizes"
        )
    state = components[STATE_KEY]
    _check(state.type_name == "U8", source, f"the type of {STATE_KEY}", state.type_name, "U8")
    size = state.values.size
    _check(size <= _MAX_JSON_BYTES, source, f"the size of {STATE_KEY}", size, "at most 4096 bytes")
    return state.values.tobytes()


def _parse(raw: bytes, source: str) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: {STATE_KEY} is no JSON: {escape(error)}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{source}: {STATE_KEY} holds {type(fields).__name__}; expected a JSON object")
    return fields


def _check_values(components: Mapping[str, Component], name: str, kind: str, count: int, source: str) -> None:
    component = components[name]
    if component.type_name != kind or component.values.size != count:
        _check(False, source, name, f"{component.values.size} values of {component.type_name}", f"{count} of {kind}")


def _check(ok: bool, source: str, item: str, actual: object, expected: str) -> None:
    if not ok:
        raise CheckpointError(f"{source}: {item} is {escape(actual)}; expected {expected}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**127


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_int(size) and 1 <= size < 2**31 for size in value)
