"""Writing a Hugging Face folder from arrays, which everything in the ecosystem reads.

Nothing here holds more than one tensor beside the model: the shape and dtype of an `OutputTensor` are fixed in advance,
so the header of a safetensors file can be written before the values are cast, unpacked or read from another file. The
folder becomes a model with its last file, `config.json`: without it no reader takes it for one.

bfloat16, which numpy lacks, is the uint16 of its bits.
"""

import contextlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.tokenizers import check_tokenizer
from llamarium.config import EMBEDDING, ModelConfig
from llamarium.errors import CheckpointError, OptionError, OutputError, counted, escape
from llamarium.file_names import (
    CONFIG,
    GENERATION_CONFIG,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    model_files,
    shard_name,
)
from llamarium.io import atomic_file, sync, sync_tree, unwritable, write_json
from llamarium.quant.packing import to_bfloat16, to_float32
from llamarium.tokenizer.base import Tokenizer

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_LONG_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ALIGNMENT = 64  # a line of the processor's cache, in bytes
_PIECE_WEIGHTS = 2**22  # that are checked at once


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor that is about to be written.

    Attributes:
        dtype: Safetensors' name for its dtype, such as "BF16".
        read: Returns the values in that dtype; called once, when they are written.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def data(self) -> memoryview:
        """Return the values' bytes, row-major."""
        values = self.read()
        assert values.nbytes == self.num_bytes and values.shape == self.shape
        return array_bytes(values)


def array_bytes(values: NDArray[Any]) -> memoryview:
    """Return an array's bytes, row-major; a copy only where it is not contiguous."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def cast_array(values: NDArray[Any], dtype: str, key: str) -> NDArray[Any]:
    """Cast a weight, in float32, float16, or bfloat16's bits as uint16, to "F32", "F16" or "BF16".

    CheckpointError, which names the `key`, if a finite value becomes infinite: float16 ends at 65,504.
    """
    if dtype == "F32":
        return to_float32(values)
    if values.dtype == (np.float16 if dtype == "F16" else np.uint16):
        return values
    if dtype == "BF16":
        narrow = to_bfloat16(values)
        num_bad = _num_overflows(values, narrow)
    else:
        with np.errstate(over="ignore"):
            narrow = to_float32(values).astype(np.float16)
        num_bad = _num_overflows(values, narrow)
    if num_bad:
        wider = "float32" if dtype == "BF16" else "bfloat16 or float32"
        raise CheckpointError(
            f"{escape(key)}: {counted(num_bad, 'value does', 'values do')} not fit {_LONG_NAMES[dtype]}; choose {wider}"
        )
    return narrow


def check_fits_float16(values: NDArray[Any], key: str) -> None:
    """Check that values are in float16's range, in which block scales are stored."""
    step = max(1, _PIECE_WEIGHTS // values.shape[-1])
    for start in range(0, len(values), step):
        cast_array(values[start : start + step], "F16", key)


def _num_overflows(values: NDArray[Any], narrow: NDArray[Any]) -> int:
    lost = ~np.isfinite(to_float32(narrow))
    return int(np.isfinite(to_float32(values)[lost]).sum()) if lost.any() else 0


def save_weights(
    weights: Sequence[OutputTensor],
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write weights as a Hugging Face folder, synced to disk.

    Args:
        weights: Exactly those of `config` (`model_weights`, `checkpoint_weights`).
        config: The model's.
        folder: Made if missing; must hold no model.
        tokenizer: Written beside the weights.
        generation_config: The content of `generation_config.json`; the config's BOS and EOS are added to it.
        max_shard_bytes: More than that goes into several files and an index.

    Raises:
        CheckpointError: If the tokenizer is too large for the model, or a value does not fit its dtype.
        OutputError: If the folder holds a model already, or cannot be written.
    """
    name = _LONG_NAMES[next(w.dtype for w in weights if w.key == EMBEDDING)]
    fields = {**config.to_hf(), "dtype": name, "torch_dtype": name}
    with complete_folder(folder, config, fields, tokenizer, generation_config or {}):
        _write_shards(folder, weights, max_shard_bytes)


@contextlib.contextmanager
def complete_folder(
    folder: Path,
    config: ModelConfig,
    fields: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    generation_config: Mapping[str, Any],
) -> Generator[None]:
    """Let the body write tensors into a folder and add the rest, last `fields`, its `config.json`."""
    check_tokenizer(tokenizer, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in model_files(folder):  # would be read beside ours
            name = escape(path.relative_to(folder))
            raise OutputError(f"{escape(folder)}: already holds {name}; choose an empty folder")
        yield
        ids = {name: config.to_hf()[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        special_ids = {name: value for name, value in ids.items() if value is not None}
        write_json(folder / GENERATION_CONFIG, {**special_ids, **generation_config})
        if tokenizer is not None:
            tokenizer.save(folder)
        sync_tree(folder)
        write_json(folder / CONFIG, fields)
        sync(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def write_safetensors(path: Path, weights: Iterable[OutputTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; `path` is complete or untouched. OSError if it cannot be written.

    The package's own writer needs all tensors in memory at once, cast already, and leaves a file that only its owner
    can read.
    """
    # Each lies at a multiple of the largest power of two that divides its size, which is at least its item size's.
    ordered = sorted(weights, key=lambda w: -math.gcd(w.num_bytes, _ALIGNMENT))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for weight in ordered:
        begin, end = end, end + weight.num_bytes
        header[weight.key] = {"dtype": weight.dtype, "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in ordered:
            file.write(weight.data())


def needs_dtype(subject: str, kind: str) -> OptionError:
    """Return the error for a quantized weight that is to be written without a dtype."""
    return OptionError(
        f"{subject} is quantized ({kind}) and can only be written unpacked; choose a dtype (float32, bfloat16, float16)"
    )


def _write_shards(folder: Path, weights: Sequence[OutputTensor], max_bytes: int) -> None:
    shards: list[list[OutputTensor]] = [[]]
    room = max_bytes
    for weight in weights:
        if weight.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(weight)
        room -= weight.num_bytes
    if len(shards) == 1:
        write_safetensors(folder / SAFETENSORS, weights, {"format": "pt"})
        return
    names = [shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, {"format": "pt"})
    weight_map = {weight.key: name for name, shard in zip(names, shards, strict=True) for weight in shard}
    index = {"metadata": {"total_size": sum(w.num_bytes for w in weights)}, "weight_map": weight_map}
    write_json(folder / SAFETENSORS_INDEX, index)
