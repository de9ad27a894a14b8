"""Configurations of published Llama models, and of small models for training, by name.

Source: the publishers' `config.json` files.
"""

from dataclasses import replace

from llamarium.config import ModelConfig, RopeScaling
from llamarium.errors import ConfigError, show_value

_LLAMA31_SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def _shape(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head: int, context: int, theta: float
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        max_position_embeddings=context,
        tie_word_embeddings=hidden < 4096,  # small models only
    )


def _llama3(hidden: int, mlp: int, layers: int, heads: int, head: int, scaling: RopeScaling | None) -> ModelConfig:
    shape = _shape(128256, hidden, mlp, layers, heads, 8, head, 131072 if scaling else 8192, 500000.0)
    ends = (128001, 128008, 128009) if scaling else (128001,)
    return replace(shape, rope_scaling=scaling, bos_token_id=128000, eos_token_id=ends)


_LLAMA32_SCALING = replace(_LLAMA31_SCALING, factor=32.0)
_LLAMA2 = _shape(32000, 4096, 11008, 32, 32, 32, 128, 4096, 10000.0)
_SMOLLM2 = _shape(49152, 576, 1536, 30, 9, 3, 64, 8192, 100000.0)

PRESETS: dict[str, ModelConfig] = {
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, 64, _LLAMA32_SCALING),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, 128, _LLAMA32_SCALING),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, 128, _LLAMA31_SCALING),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, 128, _LLAMA31_SCALING),
    "llama-3-8b": _llama3(4096, 14336, 32, 32, 128, None),
    "llama-2-7b": replace(_LLAMA2, bos_token_id=1, eos_token_id=(2,)),
    "smollm2-135m": replace(_SMOLLM2, bos_token_id=1, eos_token_id=(2,), pad_token_id=2),
    # For training: about 0.4M, 5.5M and 11M parameters.
    "tiny": _shape(256, 128, 352, 2, 4, 2, 32, 256, 10000.0),
    "small": _shape(4096, 256, 704, 6, 8, 4, 32, 512, 10000.0),
    "nano-gpt": _shape(256, 384, 1024, 6, 6, 6, 64, 256, 10000.0),
}


def preset(name: str) -> ModelConfig:
    """Return a preset by name; ConfigError, which lists the names, if there is none.

    >>> llamarium.preset("llama-3.1-8b").hidden_size
    4096
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {show_value(name)}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
