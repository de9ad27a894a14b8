"""Pairs of one model: ours and transformers', from the same hand-written Hugging Face config and the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from llamarium.config import ModelConfig
from llamarium.model import LlamaForCausalLM

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# The proportions of the published models, small: every way in which one Llama differs from another is in one of them.
HF_CONFIGS: dict[str, dict[str, Any]] = {
    # 3.2 1B: GQA 4:1, tied, factor 32; head_dim 64 as published
    "llama-3.2-1b": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
        "tie_word_embeddings": True,
    },
    # 3.1 8B: GQA 4:1, untied, factor 8, head_dim 128; in the v5 spelling
    "llama-3.1-8b": {
        "hidden_size": 512,
        "intermediate_size": 896,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "rope_parameters": {
            **_LLAMA3,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        "tie_word_embeddings": False,
    },
    # 3.2 3B: three query heads a group, head_dim apart from hidden / heads
    "llama-3.2-3b": {
        "hidden_size": 192,
        "intermediate_size": 352,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rope_scaling": {**_LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
        "tie_word_embeddings": True,
    },
    # Llama 2: plain multi-head attention, no scaling, the config's oldest spelling
    "llama-2": {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_attention_heads": 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    # a context stretched by YaRN, whose attention factor is not 1
    "yarn": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        "tie_word_embeddings": False,
    },
    # one stretched linearly, with the older key
    "linear": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    },
    # biases everywhere; frequencies that depend on the length of texts beyond the context, which are refused
    "biases": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    # one key-value head for all: multi-query
    "mqa": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
    },
}
_COMMON = {
    "model_type": "llama",
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Pair:
    """One model twice, float32, on the CPU."""

    ours: LlamaForCausalLM
    theirs: Any  # transformers.LlamaForCausalLM
    config: ModelConfig


def make_pair(name: str, dtype: torch.dtype = torch.float32) -> Pair:
    """Build both from one config, with weights large enough for a fault to show."""
    raw = _COMMON | HF_CONFIGS[name]
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**raw))
    for parameter_name, parameter in theirs.named_parameters():
        spread = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        torch.nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, spread)
    theirs = theirs.to(dtype).eval()
    config = ModelConfig.from_hf(raw)
    ours = LlamaForCausalLM(config).to(dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours.tie_weights()
    return Pair(ours, theirs, config)


@pytest.fixture(scope="session")
def pair_of() -> Callable[[str], Pair]:
    """Return `make_pair`, remembering what it made."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = make_pair(name)
        return made[name]

    return get
