"""Quantized weights that consist of several tensors, validated by their headers before anything is read.

Quantized checkpoints replace `X.weight` by several tensors: `X.qweight`, `X.qzeros`, `X.scales`, ... Each format
(`awq.py`, `gptq.py`, `compressed.py`, `fp8.py`) defines their names and shapes, and combines them into a `WeightGroup`,
which the reader returns as one entry.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import StoredTensor
from llamarium.checkpoints.huggingface.safetensors_file import ITEM_DTYPES, Located
from llamarium.checkpoints.storage import Bytes
from llamarium.errors import CheckpointError, UnsupportedFormatError, escape, show_value
from llamarium.quant.packing import to_float32

Shape = tuple[int, ...]

SCALE_DTYPES = ("F16", "BF16", "F32")


class Components:
    """The tensors of one quantized weight.

    Attributes:
        key: The weight's state-dict key, `X.weight`.
        tensors: By the last part of their names: `qweight`, `weight_scale`, ...
    """

    def __init__(self, key: str, tensors: Mapping[str, Located]) -> None:
        self.key, self.tensors = key, tensors

    def __contains__(self, part: str) -> bool:
        return part in self.tensors

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names in the files."""
        return tuple(tensor.name for _, tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors."""
        return sum(tensor.num_bytes for _, tensor in self.tensors.values())

    def where(self, part: str) -> str:
        """Return file and tensor, for messages."""
        prefix = self.key.removesuffix("weight")
        file = self.tensors[part][0] if part in self.tensors else next(iter(self.tensors.values()))[0]
        return f"{escape(file.path)}: {escape(prefix + part, 120)}"

    def shape(self, part: str) -> Shape:
        """Return the shape of a component in the file."""
        return self.tensors[part][1].shape

    def need(self, part: str, why: str) -> None:
        """Check that a component exists; CheckpointError if not."""
        if part not in self.tensors:
            raise CheckpointError(f"{self.where(part)} is missing; expected it {why}")

    def check(self, part: str, dtypes: Iterable[str], shapes: Iterable[Shape], why: str) -> None:
        """Check that a component exists, with one of the dtypes and one of the shapes; CheckpointError if not."""
        self.need(part, why)
        tensor, dtypes, shapes = self.tensors[part][1], tuple(dtypes), tuple(shapes)
        if tensor.dtype not in dtypes:
            raise CheckpointError(f"{self.where(part)} is {tensor.dtype}; expected {' or '.join(dtypes)} ({why})")
        if tensor.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise CheckpointError(f"{self.where(part)} has shape {tensor.shape}; expected {expected} ({why})")

    def array(self, part: str, *, copy: bool = False) -> NDArray[Any]:
        """Return a component of its shape, in place unless `copy`; bfloat16 as its bits in uint16."""
        file, tensor = self.tensors[part]
        return file.array(tensor.offset, tensor.shape, ITEM_DTYPES[tensor.dtype], copy=copy)

    def rows(self, part: str, *, copy: bool = False) -> Bytes:
        """Return the bytes of a matrix, in place unless `copy`: uint8 (rows, bytes of a row), aligned for its dtype."""
        return self.array(part, copy=copy).view(np.uint8)

    def floats(self, part: str) -> NDArray[Any]:
        """Return scales: float16 in place; bfloat16 and float32 as float32."""
        values = self.array(part)
        return values if values.dtype == np.float16 else to_float32(values)


class WeightGroup(Protocol):
    """One quantized weight of a checkpoint.

    Attributes:
        type_name: Of `quant/stored_types.py`: `NF4`, `GPTQ4`, `FP8`, ...
        shape: The logical shape, (out, in).
        names: The tensors' names in the files, that of the codes first.
        num_bytes: What they take.
    """

    @property
    def type_name(self) -> str: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, int]: ...  # noqa: D102

    @property
    def names(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def num_bytes(self) -> int: ...  # noqa: D102

    def stored(self, *, copy: bool = False) -> StoredTensor:
        """Return the weight as it is stored; without `copy` its codes are a view of the file."""
        ...


@dataclass(frozen=True, slots=True)
class ComponentGroup:
    """A weight of a stored type; see `WeightGroup`.

    Attributes:
        codes: The component that has the codes.
        read: Returns the other arrays that the type is decoded from; called for each `stored`.
    """

    type_name: str
    shape: tuple[int, int]
    components: Components
    codes: str
    read: Callable[[], Mapping[str, NDArray[Any]]]

    @property
    def names(self) -> tuple[str, ...]:
        """See `WeightGroup`."""
        return self.components.names

    @property
    def num_bytes(self) -> int:
        """See `WeightGroup`."""
        return self.components.num_bytes

    def stored(self, *, copy: bool = False) -> StoredTensor:
        """See `WeightGroup`."""
        return StoredTensor(self.type_name, self.shape, self.components.rows(self.codes, copy=copy), self.read())


class Scheme(ABC):
    """The quantization of a folder's weights, read from its config.

    Attributes:
        marker: Last part of the name of a component that every quantized weight has.
        marker_dtype: Dtype that identifies a quantized weight with the plain name `X.weight`; None if there is none.
        parts: Last parts of all components' names, codes first.
        hints: Last parts of the names of tensors about activations, which are ignored.
    """

    marker: ClassVar[str]
    marker_dtype: ClassVar[str | None] = None
    parts: ClassVar[tuple[str, ...]]
    hints: ClassVar[frozenset[str]] = frozenset()

    @property
    def rounds_inputs(self) -> bool:
        """True if the config asks to quantize activations too."""
        return False

    def marks(self, part: str, dtype: str) -> bool:
        """Return whether a tensor, by the last part of its name and its dtype, identifies a quantized weight."""
        return part == self.marker if part != "weight" else dtype == self.marker_dtype

    @abstractmethod
    def group(self, components: Components, shape: tuple[int, int]) -> ComponentGroup:
        """Check the components of one weight against its shape (out, in) and return it."""


class ConfigFields:
    """The `quantization_config` of a folder, with checks; keys that nothing depends on are not looked at."""

    def __init__(self, fields: Mapping[str, Any], source: Path) -> None:
        self.fields, self.source = fields, source

    def fault(self, name: str, value: object, expected: str) -> CheckpointError:
        """Return the error for a field."""
        where = f"{escape(self.source)}: quantization_config"
        return CheckpointError(f"{where}: {name} is {show_value(value)}; expected {expected}")

    def other_layout(self, method: str, layout: str, layouts: tuple[str, ...]) -> UnsupportedFormatError:
        """Return the error for a layout of a method that is none of `layouts`."""
        return UnsupportedFormatError(
            f"{escape(self.source)}: weights are quantized with {method} in the layout {escape(layout, 40)}; read are "
            f"{' and '.join(layouts)}. Take the unquantized weights and quantize on load, or a copy in the "
            f"{layouts[0]} layout"
        )

    def integer(self, name: str, default: int, allowed: Callable[[int], bool], expected: str) -> int:
        """Return a whole number that `allowed` accepts."""
        value = self.fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not allowed(value):
            raise self.fault(name, value, expected)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a text in small letters; null is the default."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fault(name, value, "a text")
        return value.lower()

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object's fields; null is an empty one."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.fault(name, value, "an object")
        return cast(Mapping[str, Any], value or {})


def group_size_of(fields: ConfigFields, name: str = "group_size", default: int = 128) -> int:
    """Return the columns that share a scale; -1 is a whole row."""
    return fields.integer(name, default, lambda size: size == -1 or 1 <= size < 2**31, "-1 or a number from 1")


def groups_of_columns(num_columns: int, group_size: int) -> dict[str, NDArray[np.int64]]:
    """Return the group of each column as a part, if groups do not divide a row equally; else nothing."""
    if num_columns % group_size == 0:
        return {}
    return {"groups": np.arange(num_columns) // group_size}
