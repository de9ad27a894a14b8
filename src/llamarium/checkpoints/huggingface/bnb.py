"""Weights that bitsandbytes quantized to NF4, in a Hugging Face folder: six tensors where there was one.

    X.weight                                 two 4-bit codes in a byte; uint8, or the same bytes in a dtype of floats
                                             (`bnb_4bit_quant_storage`)
    X.weight.absmax                          the scale of each block of 64: float32, or 8-bit codes if they are
                                             quantized once more ("double quantization")
    X.weight.quant_map                       float32, the 16 values that codes stand for
    X.weight.nested_absmax, .nested_quant_map    scales and values of the second quantization
    X.weight.quant_state.bitsandbytes__nf4   JSON in uint8: shape, block sizes, dtype

Source: bitsandbytes, `functional.py`, `QuantState.as_dict` and `from_dict`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamarium.checkpoints.checkpoint import StoredTensor
from llamarium.checkpoints.huggingface.safetensors_file import Located, SafetensorsTensor
from llamarium.checkpoints.storage import TensorFile
from llamarium.errors import escape
from llamarium.quant.nf4_state import Component, check_components

_DTYPES: dict[str, DTypeLike] = {"F32": np.float32, "U8": np.uint8}
"""What scales and levels are kept in, by the file's name for it."""


def is_nf4(fields: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` is NF4's."""
    is_4bit = fields.get("quant_method", "bitsandbytes") == "bitsandbytes" and fields.get("load_in_4bit") is True
    return is_4bit and fields.get("bnb_4bit_quant_type") == "nf4"


@dataclass(frozen=True)
class NF4Group:
    """One quantized weight.

    Attributes:
        source: File and weight, for messages.
        shape: The logical shape, (out, in).
        names: The components' names in the files, the codes' among them.
        components: Views of the files by the names that `quant.nf4_state` uses: `weight`, `weight.absmax`, ...
    """

    type_name = "NF4"

    source: str
    shape: tuple[int, int]
    names: tuple[str, ...]
    components: Mapping[str, NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """What all components take."""
        return sum(part.nbytes for part in self.components.values())

    def stored(self, *, copy: bool = False) -> StoredTensor:
        """Return the components as they are stored, as views of the file; see `WeightGroup`."""
        state = {name.removeprefix("weight."): part for name, part in self.components.items() if name != "weight"}
        return StoredTensor("NF4", self.shape, self.components["weight"].reshape(-1, 1), state)


def group_components(tensors: Mapping[str, Located]) -> dict[str, NF4Group]:
    """Find the quantized weights among a checkpoint's tensors and check that each has its components."""
    parts: dict[str, dict[str, str]] = {}
    for name in tensors:
        prefix, dot, part = name.partition(".weight.")
        if dot:
            parts.setdefault(f"{prefix}.weight", {})[f"weight.{part}"] = name
    return {key: _group(key, tensors, names) for key, names in parts.items()}


def _group(key: str, tensors: Mapping[str, Located], names: dict[str, str]) -> NF4Group:
    file = tensors[next(iter(names.values()))][0]
    source = f"{escape(file.path)}: {escape(key, 80)}"
    names = ({"weight": key} if key in tensors else {}) | names
    components = {part: _view(*tensors[name], as_bytes=part == "weight") for part, name in names.items()}
    typed = {part: Component(tensors[name][1].dtype, components[part]) for part, name in names.items()}
    layout = check_components(typed, source)
    return NF4Group(source, layout.shape, tuple(names.values()), components)


def _view(file: TensorFile, tensor: SafetensorsTensor, *, as_bytes: bool) -> NDArray[Any]:
    """Return a component's values in one row; codes, and what has another dtype than components have, as bytes."""
    dtype = np.dtype(np.uint8 if as_bytes else _DTYPES.get(tensor.dtype, np.uint8))
    return file.array(tensor.offset, (tensor.num_bytes // dtype.itemsize,), dtype)
