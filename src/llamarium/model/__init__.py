"""The Llama itself: one readable definition that is read, run, trained, served and inspected."""

from llamarium.model.attention import LlamaAttention
from llamarium.model.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from llamarium.model.mlp import LlamaMLP, SiLUActivation
from llamarium.model.norm import LlamaRMSNorm
from llamarium.model.rope import LlamaRotaryEmbedding, Rotary

__all__ = [
    "LlamaAttention",
    "LlamaDecoderLayer",
    "LlamaForCausalLM",
    "LlamaMLP",
    "LlamaModel",
    "LlamaRMSNorm",
    "LlamaRotaryEmbedding",
    "Rotary",
    "SiLUActivation",
]
