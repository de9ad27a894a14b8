"""The Llama model: one readable definition for running, training, serving and inspecting."""

from types import FunctionType

from torch import nn

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

_KINDS = nn.Linear, LlamaAttention, LlamaMLP, SiLUActivation, LlamaRMSNorm, Rotary
METHODS = [(kind, name, f) for kind in _KINDS for name, f in vars(kind).items() if isinstance(f, FunctionType)]
"""The methods of a layer's classes at import, to detect whether a caller has patched one."""
