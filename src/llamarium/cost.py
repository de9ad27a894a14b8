"""The cost of a model, from its config: parameters, operations, bytes.

A multiply-add counts as two operations. Softmax, norms and RoPE are not counted, as they are below one percent.
"""

import re
from dataclasses import dataclass
from typing import Literal

from llamarium.config import ModelConfig
from llamarium.kv_codes import kinds_of, vector_bytes


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters by part; a tied head is counted once, as the embedding.

    Attributes:
        embedding: V·D.
        attention: q, k, v and o of all layers, with their biases.
        mlp: gate, up and down of all layers, with their biases.
        norms: 2·L + 1 vectors of D.
        head: V·D, or 0 when tied.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """Total number of parameters."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Return the number of parameters of a model by part."""
    c = config
    attention, mlp = _biases(c)
    return ParameterCount(
        embedding=c.vocab_size * c.hidden_size,
        attention=_attention_weights(c) + attention,
        mlp=_mlp_weights(c) + mlp,
        norms=(2 * c.num_hidden_layers + 1) * c.hidden_size,
        head=0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size,
    )


def _attention_weights(c: ModelConfig) -> int:
    heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads  # q and o, k and v
    return c.num_hidden_layers * c.hidden_size * c.head_dim * heads


def _mlp_weights(c: ModelConfig) -> int:
    return c.num_hidden_layers * 3 * c.hidden_size * c.intermediate_size


def _biases(c: ModelConfig) -> tuple[int, int]:
    """Return the sizes of the biases of attention and of the MLP, over all layers."""
    of_attention = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim + c.hidden_size
    of_mlp = 2 * c.intermediate_size + c.hidden_size
    return c.num_hidden_layers * of_attention * c.attention_bias, c.num_hidden_layers * of_mlp * c.mlp_bias


def flops(config: ModelConfig, num_new: int, num_cached: int = 0, *, num_logits: int = 1) -> int:
    """Return the operations of a pass over `num_new` tokens after `num_cached` ones, with `num_logits` logits."""
    matmuls = 2 * num_new * (_attention_weights(config) + _mlp_weights(config))
    head = 2 * num_logits * config.vocab_size * config.hidden_size
    num_pairs = _pairs(num_cached + num_new, config.sliding_window) - _pairs(num_cached, config.sliding_window)
    attention = 4 * num_pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return matmuls + head + attention


def _pairs(num_tokens: int, window: int | None) -> int:
    """Return the number of query-key pairs of a text under the causal mask, with or without a sliding window."""
    reach = num_tokens if window is None else min(window, num_tokens)
    return reach * (reach + 1) // 2 + (num_tokens - reach) * reach


def kv_bytes_per_token(config: ModelConfig, kv_dtype: str = "bfloat16") -> int:
    """Return the KV cache's bytes per token, including scales.

    `kv_dtype` is a floating-point dtype or a quantized `CacheDtype`.
    """
    bytes_per_pair = sum(vector_bytes(kind, config.head_dim) for kind in kinds_of(kv_dtype))
    return config.num_hidden_layers * config.num_key_value_heads * bytes_per_pair


_PEAK_FLOPS: dict[str, tuple[float, float]] = {  # part of the GPU's name: (bfloat16, float32 without TF32), dense
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
}


def peak_flops(gpu: str, precision: Literal["float32", "bfloat16"]) -> float | None:
    """Return a GPU's peak FLOP/s in matrix products by NVIDIA's data sheets, or None if it is unknown."""
    if re.search(r"PCIe|NVL", gpu):  # their clocks differ from the data sheet's main column
        return None
    found = (peaks for name, peaks in _PEAK_FLOPS.items() if re.search(rf"\b{name}\b", gpu))
    return next((peaks[precision == "float32"] for peaks in found), None)
