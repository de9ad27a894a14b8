"""From a model to a Hugging Face folder, which everything in the ecosystem reads.

Nothing here holds more than one tensor beside the model: a `Weight` knows its shape and dtype in advance, so the
header of a safetensors file can be written before the values are cast, unpacked or read from another file. The folder
becomes a model with its last file, `config.json`: without it no reader takes it for one.
"""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llamarium.checkpoints.checkpoint import Checkpoint, expected_shapes, list_some
from llamarium.checkpoints.decode import FLOAT_DTYPES, read
from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.errors import CheckpointError, OptionError, OutputError, escape, show_value
from llamarium.io import (
    MODEL_FILES,
    atomic_file,
    sync,
    sync_tree,
    unwritable,
    write_json,
)
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.tokenizer.base import Tokenizer

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""What is written, by its name in the file."""

_ALIGNMENT = 64  # a line of the processor's cache, in bytes
_NAME_OF_DTYPE = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_SAVED_DTYPES = tuple(FLOAT_DTYPES.values())


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is about to be written.

    Attributes:
        key: Its name in the file.
        shape: Its shape.
        dtype: What `read` returns.
        read: Makes the values, on any device; called once, when it is their turn.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> "Weight":
        """Take a tensor as it is."""
        return cls(key, tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def num_bytes(self) -> int:
        """What it takes in the file."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def data(self) -> memoryview:
        """Return the values' bytes, row-major."""
        values = self.read()
        assert values.dtype == self.dtype and tuple(values.shape) == self.shape
        return tensor_bytes(values)


def tensor_bytes(values: Tensor) -> memoryview:
    """Return a tensor's bytes, row-major; a copy only where it is not contiguous or not on the CPU."""
    # A leaf on the CPU shares its memory with the view, so nothing may write to it before the bytes are used.
    return values.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


def save_model(
    model: LlamaForCausalLM,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model as a Hugging Face folder, synced to disk.

    Args:
        model: Its Linears may be plain, joined, of half precision or (with `dtype`) quantized.
        folder: Made if missing; must hold no model.
        tokenizer: Written beside the weights.
        generation_config: The content of `generation_config.json`; the config's BOS and EOS are added to it.
        dtype: Cast to this; None writes each weight as the model holds it.
        max_shard_bytes: More than that goes into several files and an index.

    Raises:
        OptionError: For a quantized model without `dtype`, or a dtype that is no floating point of 16 or 32 bits.
        CheckpointError: If the model is no plain Llama of its config (adapters are to be merged first), the
            tokenizer is too large for it, or a value does not fit `dtype`.
        OutputError: If the folder holds a model already, or cannot be written.
    """
    weights = model_weights(model, dtype)
    save_weights(
        weights,
        model.config,
        folder,
        tokenizer=tokenizer,
        generation_config=generation_config,
        max_shard_bytes=max_shard_bytes,
    )


def save_weights(
    weights: Sequence[Weight],
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write weights as a Hugging Face folder; see `save_model`.

    Args:
        weights: Exactly those that `config` asks for (`model_weights`, `checkpoint_weights`).
        config: The model's.
        folder: See `save_model`, as for all that follow.
        tokenizer: Written beside the weights.
        generation_config: The content of `generation_config.json`.
        max_shard_bytes: More than that goes into several files.
    """
    name = str(next(w.dtype for w in weights if w.key == EMBEDDING)).removeprefix("torch.")
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
    """Let the body write tensors into a folder and add the rest, last `fields`, its `config.json`; see `save_model`."""
    check_tokenizer(tokenizer, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_vacant(folder)
        yield
        write_json(folder / "generation_config.json", _generation_config(config, generation_config))
        if tokenizer is not None:
            tokenizer.save(folder)
        sync_tree(folder)
        write_json(folder / "config.json", fields)
        sync(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def model_weights(model: LlamaForCausalLM, dtype: torch.dtype | None = None) -> list[Weight]:
    """Return a model's weights under Hugging Face's keys, without a tied head.

    Raises:
        OptionError: As for `save_model`.
        CheckpointError: As for `save_model`.
    """
    _check_dtype(dtype)
    _check_tree(model)
    shapes = expected_shapes(model.config).items()
    return [
        _module_weight(key, shape, model.get_submodule(key.removesuffix(".weight")), dtype) for key, shape in shapes
    ]


def checkpoint_weights(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> list[Weight]:
    """Return the weights of a model on disk, read when it is their turn; quantized ones need a `dtype`.

    Where some are NaN or infinite, reading them warns.

    Raises:
        OptionError: As for `save_model`.
    """
    _check_dtype(dtype)
    weights: list[Weight] = []
    for key, entry in checkpoint.entries.items():
        target = dtype or FLOAT_DTYPES.get(entry.dtype)
        if target is None:
            raise _needs_dtype(f"{escape(checkpoint.path)}: {key}", entry.dtype)
        weights.append(_casting(key, entry.shape, target, lambda key=key: _read_finite(checkpoint, key)))
    return weights


def _read_finite(checkpoint: Checkpoint, key: str) -> Tensor:
    values = read(checkpoint, key)
    if not values.sum(dtype=torch.float32).isfinite() and (num_bad := int((~values.isfinite()).sum())):
        warnings.warn(f"{escape(checkpoint.path)}: {key} has {num_bad} weights that are NaN or infinite", stacklevel=2)
    return values


def write_safetensors(path: Path, weights: Iterable[Weight], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; `path` is complete or untouched.

    The package's own writer wants all tensors in memory at once, cast already, and leaves a file that only its owner
    can read.

    Raises:
        OSError: If the file cannot be written.
    """
    # Each lies at a multiple of the largest power of two that divides its size, which is at least its item size's.
    ordered = sorted(weights, key=lambda w: -math.gcd(w.num_bytes, _ALIGNMENT))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for weight in ordered:
        begin, end = end, end + weight.num_bytes
        header[weight.key] = {
            "dtype": _NAME_OF_DTYPE[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in ordered:
            file.write(weight.data())


def check_tokenizer(tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Check that a tokenizer's ids fit a model.

    Raises:
        CheckpointError: If there are more of them than rows.
    """
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{tokenizer.source}: the tokenizer has {tokenizer.vocab_size} ids and the model {config.vocab_size} rows; "
            "they do not belong together"
        )


# --- weights ----------------------------------------------------------------------------------------------------------


def _check_dtype(dtype: object) -> None:
    if dtype is not None and dtype not in _SAVED_DTYPES:
        raise OptionError(f"dtype is {show_value(dtype)}; expected one of {', '.join(map(str, _SAVED_DTYPES))}")


def _check_tree(model: LlamaForCausalLM) -> None:
    """Check that tensors lie where a plain Llama has them, and that a tied head is tied."""
    expected = {key.removesuffix(".weight") for key in (*expected_shapes(model.config), HEAD)}
    found = {name for name, module in model.named_modules() if _has_tensors(module)}
    if wrong := sorted(found ^ expected):
        raise CheckpointError(
            f"the model is no plain Llama: {len(wrong)} modules are extra or missing: {list_some(wrong)}; merge its "
            "adapters first, or save the adapters alone"
        )
    if model.config.tie_word_embeddings and _storage(model.lm_head) != _storage(model.model.embed_tokens):
        raise CheckpointError(
            "the config says tie_word_embeddings true, but the head's weight is not the embedding's; tie them "
            "(model.tie_weights()), or set tie_word_embeddings to false"
        )


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))


def _storage(module: nn.Module) -> int:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.data_ptr()


def _module_weight(key: str, shape: tuple[int, ...], module: nn.Module, dtype: torch.dtype | None) -> Weight:
    if isinstance(module, (QuantizedLinear, QuantizedEmbedding)):
        if dtype is None:
            raise _needs_dtype(key, module._get_name())  # pyright: ignore[reportPrivateUsage] - torch has no public one
        target, read = dtype, lambda: module.dequantize(torch.float32)
    else:
        weight = module.get_parameter("weight")
        target, read = dtype or weight.dtype, lambda: weight
        if tuple(weight.shape) != shape:
            raise CheckpointError(f"{key} has shape {tuple(weight.shape)}; by the model's config it is {shape}")
    return _casting(key, shape, target, read)


def _casting(key: str, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Weight:
    return Weight(key, shape, dtype, lambda: cast(read(), dtype, key))


def cast(values: Tensor, dtype: torch.dtype, key: str) -> Tensor:
    """Cast a weight, on the CPU.

    Raises:
        CheckpointError: If a finite value becomes infinite: float16 ends at 65,504.
    """
    values = values.detach().cpu()
    narrow = values.to(dtype)
    if dtype == values.dtype or narrow.sum(dtype=torch.float32).isfinite():  # the usual case, in one pass
        return narrow
    num_bad = int((values.isfinite() & ~narrow.isfinite()).sum())
    if num_bad:
        name = str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{escape(key)}: {num_bad} values do not fit {name}; choose bfloat16 or float32")
    return narrow


def _needs_dtype(what: str, kind: str) -> OptionError:
    return OptionError(
        f"{what} is quantized ({kind}) and is written unpacked only: say into which dtype (float32, bfloat16, float16)"
    )


# --- files ------------------------------------------------------------------------------------------------------------


def _check_vacant(folder: Path) -> None:
    """Refuse a folder with files of a model: what is not overwritten would be read beside what is."""
    for pattern in MODEL_FILES:
        for path in folder.glob(pattern):
            raise OutputError(f"{escape(folder)}: holds {escape(path.name)} already; choose an empty folder")


def _write_shards(folder: Path, weights: Sequence[Weight], max_bytes: int) -> None:
    shards: list[list[Weight]] = [[]]
    room = max_bytes
    for weight in weights:
        if weight.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(weight)
        room -= weight.num_bytes
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, {"format": "pt"})
    weight_map = {weight.key: name for name, shard in zip(names, shards, strict=True) for weight in shard}
    index = {"metadata": {"total_size": sum(w.num_bytes for w in weights)}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _generation_config(config: ModelConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    fields = config.to_hf()
    ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: value for name, value in ids.items() if value is not None} | dict(given)
