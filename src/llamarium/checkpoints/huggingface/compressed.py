"""Weights as compressed-tensors (llm-compressor, vLLM) saves them: packed integers, or 8-bit floating point.

`pack-quantized`, integers of 2 to 8 bits (W4A16, W8A16):

    X.weight_packed      int32 (out, in * bits / 32), codes with 2^(bits - 1) added
    X.weight_scale       (out, groups); (out, 1) for channels; (1,) for the tensor
    X.weight_zero_point  int32 (out * bits / 32, groups), packed downwards, in asymmetric weights
    X.weight_shape       int64 (2,): out and in
    X.weight_g_idx       int32 (in,): the group of each column, with `actorder`

`float-quantized` and `naive-quantized`, float8_e4m3fn: `X.weight` and `X.weight_scale` for the tensor, channels, groups
or blocks. `X.input_scale`, `X.k_scale`, ... are about activations, which are not quantized here.

Bits, groups and symmetry follow from the tensors' shapes; one of the config's groups must say the same.

Source: compressed-tensors 0.20, `compressors/pack_quantized`, `compressors/naive_quantized`,
`quantization/quant_args.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.huggingface.components import (
    SCALE_DTYPES,
    ComponentGroup,
    Components,
    ConfigFields,
    Scheme,
    groups_of_columns,
)
from llamarium.checkpoints.huggingface.fp8 import block_shape, float8_group
from llamarium.errors import CheckpointError, UnsupportedFormatError, escape
from llamarium.quant.grouped import unpack_down

_WORDS = ("I32", "U32")
_FORMATS = ("pack-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_RIGHT_NAMES = {
    "int-quantized": "int-quantized, which is INT8 for weights and activations (W8A8)",
    "marlin-24": "marlin-24, which is sparse",
    "sparse-24-bitmask": "sparse-24-bitmask, which is sparse",
    "sparse-bitmask": "sparse-bitmask, which is sparse",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "mxfp6-pack-quantized": "MXFP6",
    "mxfp8-quantized": "MXFP8",
}


@dataclass(frozen=True, slots=True)
class _Weights:
    """What one of the config's groups says about weights."""

    num_bits: int
    is_float: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """What a `quantization_config` of compressed-tensors says.

    Attributes:
        schemes: What its groups say about weights.
        has_activations: Activations, or the KV cache, were meant to be quantized too.
    """

    marker = "weight_packed"
    marker_dtype = "F8_E4M3"
    parts = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    hints = frozenset(
        (
            *("input_scale", "input_zero_point", "input_global_scale", "input_g_idx"),
            *("output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale"),
        )
    )

    schemes: tuple[_Weights, ...]
    has_activations: bool

    @property
    def rounds_inputs(self) -> bool:
        """See `Scheme`."""
        return self.has_activations

    @classmethod
    def from_config(cls, fields: ConfigFields) -> "CompressedTensors":
        """Read the config."""
        _refuse_others(fields)
        groups = [
            _object(fields, f"config_groups.{name}", group) for name, group in fields.mapping("config_groups").items()
        ]
        if not groups:
            raise fields.fault("config_groups", fields.fields.get("config_groups"), "at least one group")
        activations = [group.get("input_activations") for group in groups]
        kv_cache = fields.fields.get("kv_cache_scheme")
        schemes = tuple(_weights(fields, group.get("weights")) for group in groups if group.get("weights") is not None)
        return cls(schemes, any(scheme is not None for scheme in (*activations, kv_cache)))

    def group(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        """Check the components of one weight against its shape (out, in)."""
        if "weight_packed" in components:
            return self._integers(components, shape)
        schemes = [scheme for scheme in self.schemes if scheme.is_float and scheme.num_bits == 8]
        if not schemes:
            raise CheckpointError(
                f"{components.where('weight')} is F8_E4M3, but no group of the config has 8-bit floating point"
            )
        for scheme in schemes[:-1]:  # which of several groups a weight is in, its scales tell
            try:
                return _floats(components, shape, scheme)
            except CheckpointError:
                continue
        return _floats(components, shape, schemes[-1])

    def _integers(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        num_rows, num_columns = shape
        components.need("weight_scale", "beside weight_packed")
        scheme = self._scheme_of(components, shape)
        bits, size = scheme.num_bits, scheme.group_size or num_columns
        groups = -(-num_columns // size)
        why = f"{bits}-bit codes of a weight {shape}, {scheme.strategy} {size}"
        components.check("weight_packed", _WORDS, [(num_rows, -(-num_columns * bits // 32))], why)
        alone = [(1,), (), (1, 1)] if groups == 1 else []
        components.check("weight_scale", SCALE_DTYPES, [(num_rows, groups), *alone], why)
        _check_shape(components, shape)
        if "weight_zero_point" in components:
            is_packed = components.tensors["weight_zero_point"][1].dtype != "I8"
            shapes = [(-(-num_rows * bits // 32), groups)] if is_packed else [(num_rows, groups), *alone]
            components.check("weight_zero_point", (*_WORDS, "I8"), shapes, why)
        order = _order(components, num_columns, size, groups)

        def read() -> Mapping[str, NDArray[Any]]:
            zeros = _zeros(components, bits, (num_rows, groups))
            scales = _spread(components.floats("weight_scale"), (num_rows, groups))
            return {"scales": scales, "zeros": zeros, **order}

        return ComponentGroup(f"INT{bits}", shape, components, "weight_packed", read)

    def _scheme_of(self, components: Components, shape: tuple[int, int]) -> _Weights:
        """Return the scheme that fits a weight's codes and scales, or else the first, for the error."""
        integers = [scheme for scheme in self.schemes if not scheme.is_float]
        if not integers:
            raise CheckpointError(f"{components.where('weight_packed')}: no group of the config has integers")

        def fits(scheme: _Weights) -> bool:
            words, scales = components.shape("weight_packed")[-1:], components.shape("weight_scale")[-1:]
            groups = -(-shape[1] // (scheme.group_size or shape[1]))
            return words == (-(-shape[1] * scheme.num_bits // 32),) and scales in ((groups,), ())

        return next((scheme for scheme in integers if fits(scheme)), integers[0])


def _refuse_others(fields: ConfigFields) -> None:
    """Refuse the format's other layouts by name: only packed integers and 8-bit floats are read."""
    advice = "take the model's unquantized weights and quantize on load"
    groups = fields.mapping("config_groups").values()
    layouts = [group.get("format") for group in groups if isinstance(group, dict)]
    for layout in (fields.text("format", "pack-quantized"), *(text for text in layouts if isinstance(text, str))):
        if layout not in _FORMATS:
            raise UnsupportedFormatError(
                f"{escape(fields.source)}: weights are quantized with compressed-tensors "
                f"{escape(_RIGHT_NAMES.get(layout, layout), 80)}; read are pack-quantized and float-quantized; {advice}"
            )
    sparsity = fields.mapping("sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedFormatError(
            f"{escape(fields.source)}: weights are sparse ({escape(sparsity, 40)}), which is not read; {advice}"
        )
    if fields.mapping("transform_config").get("config_groups"):
        raise UnsupportedFormatError(
            f"{escape(fields.source)}: transform_config rotates activations while the model runs, which is not done "
            f"here, and the weights are wrong without it; {advice}"
        )


def _object(fields: ConfigFields, name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise fields.fault(name, value, "an object")
    return cast(Mapping[str, Any], value)


def _weights(fields: ConfigFields, value: object) -> _Weights:
    """Read `weights` of one of the config's groups."""
    inner = ConfigFields(_object(fields, "weights", value), fields.source)
    is_float = inner.text("type", "int") == "float"
    bits = inner.integer("num_bits", 8, lambda bits: 2 <= bits <= 8, "2 to 8")
    if is_float and bits != 8:
        raise UnsupportedFormatError(
            f"{escape(fields.source)}: weights are {bits}-bit floating point in compressed-tensors; read are 8 bits. "
            "Take the model's unquantized weights and quantize on load"
        )
    size, block = inner.fields.get("group_size"), inner.fields.get("block_structure")
    strategy = inner.text("strategy", "tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise fields.fault("strategy", strategy, "tensor, channel, group or block")
    if strategy == "group":
        size = inner.integer("group_size", 128, lambda size: 1 <= size < 2**31, "a number from 1")
    elif strategy == "block" and not is_float:
        raise fields.fault("strategy", strategy, "tensor, channel or group for integers")
    shape = block_shape(inner, "block_structure", block) if strategy == "block" else None
    return _Weights(bits, is_float, strategy, cast(int, size) if strategy == "group" else None, shape)


def _floats(components: Components, shape: tuple[int, int], scheme: _Weights) -> ComponentGroup:
    return float8_group(components, shape, scheme.block, scheme.group_size)


def _check_shape(components: Components, shape: tuple[int, int]) -> None:
    """Check the shape that is stored beside the codes."""
    if "weight_shape" not in components:
        return
    components.check("weight_shape", ("I64", "I32"), [(2,)], "the weight's shape")
    stored_shape: Sequence[int] = components.array("weight_shape").tolist()
    if tuple(stored_shape) != shape:
        raise CheckpointError(
            f"{components.where('weight_shape')} is {tuple(stored_shape)}; expected {shape}, as the model's config says"
        )


def _order(components: Components, num_columns: int, size: int, groups: int) -> Mapping[str, NDArray[np.int64]]:
    """Return the group of each column, where groups do not follow each other in equal parts."""
    in_order = groups_of_columns(num_columns, size)
    if "weight_g_idx" not in components:
        return in_order
    components.check("weight_g_idx", ("I32", "I64"), [(num_columns,)], "the group of each column")
    order = components.array("weight_g_idx").astype(np.int64)
    if (order == -1).all():  # as the format says that there is no order
        return in_order
    if order.size and not (int(order.min()) >= 0 and int(order.max()) < groups):
        raise CheckpointError(
            f"{components.where('weight_g_idx')} has groups from {order.min()} to {order.max()}; expected 0 to "
            f"{groups - 1}, as there are {groups} groups of {size} columns"
        )
    return in_order if np.array_equal(order, np.arange(num_columns) // size) else {"groups": order}


def _zeros(components: Components, bits: int, shape: tuple[int, int]) -> NDArray[np.int16]:
    """Return the unsigned codes that stand for zero: int16 (out, groups)."""
    num_rows, groups = shape
    middle = np.int16(1 << (bits - 1))
    if "weight_zero_point" not in components:
        return np.full(shape, middle)
    zero_points = components.array("weight_zero_point")
    if zero_points.dtype == np.int8:  # not packed, and signed
        return _spread(zero_points.astype(np.int16) + middle, shape)
    unpacked = unpack_down(bits)(np, components.rows("weight_zero_point"), (groups, num_rows), 0, groups)
    return unpacked.T.astype(np.int16)


def _spread(values: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """Return a number for each group, from those or from one for the whole weight."""
    return values if values.shape == shape else np.broadcast_to(values, shape).copy()
