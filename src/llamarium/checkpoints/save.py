"""Saving PyTorch modules as a Hugging Face folder; `huggingface/writer.py` writes the files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llamarium.checkpoints.checkpoint import expected_shapes, list_some
from llamarium.checkpoints.decode import FLOAT_DTYPES
from llamarium.checkpoints.huggingface.writer import OutputTensor, cast_array, needs_dtype, save_weights
from llamarium.config import HEAD
from llamarium.errors import CheckpointError, OptionError, show_value
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedEmbedding, QuantizedLinear
from llamarium.tokenizer.base import Tokenizer

SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The torch dtypes that can be saved, by their safetensors names."""

_NAME_OF_DTYPE = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_SAVED_DTYPES = tuple(FLOAT_DTYPES.values())


def tensor_weight(
    key: str, tensor: Tensor, read: Callable[[], Tensor] | None = None, dtype: torch.dtype | None = None
) -> OutputTensor:
    """Return a tensor as a weight to write.

    `read` returns other values of the same shape, on any device, in `dtype`; without it the tensor's values are
    written.
    """
    name = _NAME_OF_DTYPE[dtype or tensor.dtype]
    return OutputTensor(key, tuple(tensor.shape), name, lambda: array_of(tensor if read is None else read()))


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array, sharing memory if it is on the CPU; bfloat16 is returned as its bits in uint16."""
    values = tensor.detach().cpu().contiguous()
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


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

    Its Linears may be plain, joined, in half precision or quantized. Weights are cast to `dtype`; without one each
    weight keeps its dtype, which is not possible for quantized ones. For other arguments and errors see `save_weights`.

    Raises:
        OptionError: For a quantized model without `dtype`, or a dtype other than float32, float16 and bfloat16.
        CheckpointError: If the modules are not those of a Llama with its config; merge adapters first.
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


def model_weights(model: LlamaForCausalLM, dtype: torch.dtype | None = None) -> list[OutputTensor]:
    """Return a model's weights for writing, by Hugging Face's keys, without a tied head; raises as `save_model`."""
    if dtype is not None and dtype not in _SAVED_DTYPES:
        raise OptionError(f"dtype is {show_value(dtype)}; expected one of {', '.join(map(str, _SAVED_DTYPES))}")
    _check_tree(model)
    shapes = expected_shapes(model.config).items()
    return [_module_weight(key, shape, model.get_submodule(key.rpartition(".")[0]), dtype) for key, shape in shapes]


def _check_tree(model: LlamaForCausalLM) -> None:
    """Check that the model has exactly the tensors of a Llama with its config, and that a tied head is tied."""
    keys = *expected_shapes(model.config), HEAD
    expected = {key.removesuffix(".weight") for key in keys if key.endswith(".weight")}
    names = {
        name
        for name, module in model.named_modules()
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    }
    if unexpected := sorted(names ^ expected):
        raise CheckpointError(
            f"the model is no plain Llama: {len(unexpected)} modules are extra or missing: {list_some(unexpected)}; "
            "merge its adapters first, or save the adapters alone"
        )
    biases = {f"{name}.bias" for name, module in model.named_modules() if getattr(module, "bias", None) is not None}
    if unexpected := sorted(biases ^ {key for key in keys if key.endswith(".bias")}):
        raise CheckpointError(
            f"{len(unexpected)} biases are extra or missing: {list_some(unexpected)}; expected those that the config's "
            "attention_bias and mlp_bias say"
        )
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    if model.config.tie_word_embeddings and head.data_ptr() != embedding.data_ptr():
        raise CheckpointError(
            "the config says tie_word_embeddings true, but the head's weight is not the embedding's; tie them "
            "(model.tie_weights()), or set tie_word_embeddings to false"
        )


def _module_weight(key: str, shape: tuple[int, ...], module: nn.Module, dtype: torch.dtype | None) -> OutputTensor:
    is_weight = key.endswith(".weight")
    if isinstance(module, (QuantizedLinear, QuantizedEmbedding)) and is_weight:
        if dtype is None:
            raise needs_dtype(key, module._get_name())  # pyright: ignore[reportPrivateUsage] - torch has no public one
        name = _NAME_OF_DTYPE[dtype]
        return OutputTensor(key, shape, name, lambda: cast_array(array_of(module.dequantize(torch.float32)), name, key))
    weight = cast(Tensor, getattr(module, "weight" if is_weight else "bias"))
    if tuple(weight.shape) != shape:
        raise CheckpointError(f"{key} has shape {tuple(weight.shape)}; by the model's config it is {shape}")
    if dtype in (None, weight.dtype):
        return tensor_weight(key, weight)
    name = _NAME_OF_DTYPE[dtype]
    return OutputTensor(key, shape, name, lambda: cast_array(array_of(weight), name, key))
