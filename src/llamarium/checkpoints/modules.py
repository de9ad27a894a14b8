"""Conversion between the native runner's weights and PyTorch modules, in both directions, over shared memory."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llamarium.checkpoints.checkpoint import expected_shapes
from llamarium.checkpoints.decode import FLOAT_DTYPES, as_tensor
from llamarium.config import EMBEDDING, HEAD, ModelConfig
from llamarium.kernels.input_bits import INPUT_BITS, InputBits
from llamarium.model import LlamaForCausalLM
from llamarium.quant.base import QuantizedLinear
from llamarium.quant.formats import PACKED_FORMATS
from llamarium.quant.ggml.linear import EmbeddingGGML, LinearGGML
from llamarium.quant.nf4 import Linear4bit
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.quant.stored_linear import LinearStored
from llamarium.quant.stored_types import STORED_TYPES
from llamarium.runtime.native.weights import Weight


def build_model(
    config: ModelConfig, weights: Mapping[str, Weight], input_bits: InputBits = INPUT_BITS
) -> LlamaForCausalLM:
    """Build a frozen model in eval mode whose modules share the memory of `weights`."""
    model = empty_model(config)
    dtype = FLOAT_DTYPES[weights["model.norm.weight"].type_name]
    for weight in weights.values():
        put_weight(model, weight, dtype)
    if config.tie_word_embeddings:
        tie_head(model)
    round_inputs(model, input_bits)
    return model.eval().requires_grad_(False)


def put_weight(
    model: LlamaForCausalLM, weight: Weight, dtype: torch.dtype, device: str = "cpu", *, rounds_inputs: bool = True
) -> None:
    """Set a weight of a model: as a parameter, or as a module of its quantized type.

    Args:
        model: Model whose weight is not set yet.
        weight: Weight on the CPU; the model shares its memory if `device` is "cpu".
        dtype: Dtype of the vectors that a quantized embedding returns.
        device: Device of the model's weight.
        rounds_inputs: Let the C kernels multiply tiles, with quantized inputs; False dequantizes tiles at each use.
    """
    path, _, name = weight.key.rpartition(".")
    module = model.get_submodule(path)
    if weight.type_name in FLOAT_DTYPES:
        values = torch.from_numpy(weight.data).view(FLOAT_DTYPES[weight.type_name]).to(device)
        if name == "bias":
            set_bias(module, values)
        else:
            setattr(module, name, nn.Parameter(values, requires_grad=False))
        return
    quantized = _quantized(weight, is_embedding=isinstance(module, nn.Embedding), dtype=dtype, rounds=rounds_inputs)
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor) and not bias.is_meta:  # set before the weight; keep it
        set_bias(quantized, bias.detach())
    model.set_submodule(path, quantized.to(device))


def round_inputs(model: LlamaForCausalLM, bits: InputBits) -> None:
    """Set the number of bits that a model's packed Linears quantize their inputs to."""
    for module in model.modules():
        if isinstance(module, LinearPacked):
            module.input_bits = bits


def empty_model(config: ModelConfig) -> LlamaForCausalLM:
    """Return a model on the meta device, without memory for weights."""
    with torch.device("meta"), _Undrawn():
        return LlamaForCausalLM(config)


def set_bias(module: nn.Module, values: Tensor) -> None:
    """Set the bias of a Linear, (out_features,): a frozen parameter, or a buffer if the Linear is quantized."""
    is_quantized = isinstance(module, QuantizedLinear)
    module.bias = values if is_quantized else nn.Parameter(values, requires_grad=False)


def tie_head(model: LlamaForCausalLM) -> None:
    """Make the head share the embedding's storage, quantized or not."""
    embedding = cast(nn.Module, model.model.embed_tokens)
    if isinstance(embedding, EmbeddingPacked):
        model.set_submodule("lm_head", embedding.linear)
    elif isinstance(embedding, EmbeddingGGML):
        model.set_submodule("lm_head", LinearGGML(embedding.weight, embedding.type_name))
    else:
        model.tie_weights()


def weights_of(model: LlamaForCausalLM, *, of_bases: bool = False) -> Mapping[str, Weight] | None:
    """Return a model's weights, by key, over the same memory; None if the C kernels cannot multiply all of them.

    `of_bases` returns the frozen base weights of modules with adapters; without it such a model gives None.
    """
    tied = model.config.tie_word_embeddings
    weights: dict[str, Weight] = {}
    for key, shape in expected_shapes(model.config).items():
        name, _, part = key.rpartition(".")
        module = model.get_submodule(name)
        module = getattr(module, "base_layer", module) if of_bases else module
        weight = _weight(key, shape, module) if part == "weight" else _floats(key, shape, getattr(module, part, None))
        if weight is None:
            return None
        weights[key] = weight
    top = cast(nn.Module, getattr(model.lm_head, "base_layer", model.lm_head) if of_bases else model.lm_head)
    head = _weight(HEAD, weights[EMBEDDING].shape, top) if tied else weights[HEAD]
    if head is None or (tied and head.data.ctypes.data != weights[EMBEDDING].data.ctypes.data):
        return None
    floats = {weight.type_name for weight in weights.values() if weight.type_name in FLOAT_DTYPES}
    return weights if len(floats) == 1 else None


class _Undrawn(TorchFunctionMode):
    """A mode that skips `torch.nn.init`, which has no effect on the meta device but takes a tenth of a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def _quantized(weight: Weight, *, is_embedding: bool, dtype: torch.dtype, rounds: bool) -> nn.Module:
    """Return a module for a quantized weight, over the same memory."""
    data = as_tensor(weight.data)
    if weight.type_name == "NF4":
        parts = {f"weight.{name}": as_tensor(part) for name, part in weight.state.items()}
        return Linear4bit.from_state({"weight": data, **parts}, weight.key)
    if weight.type_name in STORED_TYPES:
        parts = {name: as_tensor(part) for name, part in weight.state.items()}
        return LinearStored(weight.type_name, weight.shape, data, parts)
    if weight.data.ndim == 2:
        return EmbeddingGGML(data, weight.type_name, dtype) if is_embedding else LinearGGML(data, weight.type_name)
    linear = LinearPacked(data, weight.shape[0], PACKED_FORMATS[weight.type_name], uses_kernels=rounds)
    return EmbeddingPacked(linear, dtype) if is_embedding else linear


def _weight(key: str, shape: tuple[int, ...], module: nn.Module) -> Weight | None:
    if isinstance(module, LinearPacked | EmbeddingPacked):
        linear = module.linear if isinstance(module, EmbeddingPacked) else module
        fits = linear.uses_kernels and linear.weight.device.type == "cpu"
        return Weight(key, linear.format.name, shape, linear.weight.numpy()) if fits else None
    return _floats(key, shape, getattr(module, "weight", None))


def _floats(key: str, shape: tuple[int, ...], weight: object) -> Weight | None:
    """Return a floating-point tensor as a weight for the kernels; None if they do not support it."""
    if not isinstance(weight, Tensor) or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    if tuple(weight.shape) != shape:
        return None
    if weight.dtype is torch.bfloat16:
        return Weight(key, "BF16", shape, weight.detach().view(torch.int16).numpy().view(np.uint16))
    type_name = {torch.float32: "F32", torch.float16: "F16"}.get(weight.dtype)
    return None if type_name is None else Weight(key, type_name, shape, weight.detach().numpy())
