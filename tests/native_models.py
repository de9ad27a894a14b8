"""Small models for the C kernels: the weights of modules as a native runner takes them, over the same memory."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from llamarium.checkpoints import modules
from llamarium.config import ModelConfig, RopeScaling
from llamarium.kernels import native, structs
from llamarium.kernels.native import INPUT_BITS, InputBits
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.quant.packed import EmbeddingPacked, LinearPacked
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.native.weights import Weight
from reference_tiles import pack_ggml, quantize
from swapping import swap_linears

CONFIG = replace(
    preset("tiny"),
    vocab_size=300,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=131072,
    rope_scaling=RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)


def build(
    type_name: str | None, dtype: torch.dtype = torch.float32, head_dim: int = 32, config: ModelConfig = CONFIG
) -> LlamaForCausalLM:
    """A random model; with a type name all of its Linears are packed, its head too, whose weight is the embedding."""
    config = replace(config, head_dim=head_dim, num_attention_heads=config.num_attention_heads * 32 // head_dim)
    model = init_weights(LlamaForCausalLM(config), seed=1).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.mul_(2)
    if type_name is not None:
        swap_linears(model, lambda _, linear: pack_ggml(quantize(linear.weight, type_name), type_name), skip=())
    model = model.to(dtype).eval()
    if type_name is not None:
        assert isinstance(model.lm_head, LinearPacked)
        model.model.embed_tokens = EmbeddingPacked(model.lm_head, dtype)
    return model


def weights_of(model: LlamaForCausalLM) -> Mapping[str, Weight]:
    """The weights of a model whose matrices the kernels multiply, over the memory of its modules."""
    found = modules.weights_of(model)
    assert found is not None, "the kernels cannot multiply all of it"
    return found


def native_runner(model: LlamaForCausalLM) -> NativeRunner:
    """A runner over the memory of a model's modules."""
    return NativeRunner(model.config, weights_of(model))


def product(matrix: structs.CMatrix, x: Tensor, input_bits: InputBits = INPUT_BITS) -> Tensor:
    """`native.product` of tensors."""
    return torch.from_numpy(native.product(matrix, x.numpy(), input_bits))
