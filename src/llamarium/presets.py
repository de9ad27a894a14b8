"""The shapes of published Llamas and of small ones to train, by name.

Source: the publishers' `config.json` files.
"""

from dataclasses import replace

from llamarium.config import ModelConfig, RopeScaling
from llamarium.errors import ConfigError, show_value

_LLAMA31_SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
_LLAMA32_SCALING = replace(_LLAMA31_SCALING, factor=32.0)

_LLAMA3_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    bos_token_id=128000,
    eos_token_id=(128001,),
)
_LLAMA31_8B = replace(
    _LLAMA3_8B,
    rope_scaling=_LLAMA31_SCALING,
    max_position_embeddings=131072,
    eos_token_id=(128001, 128008, 128009),
)
_LLAMA32_1B = replace(
    _LLAMA31_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    head_dim=64,
    rope_scaling=_LLAMA32_SCALING,
    tie_word_embeddings=True,
)
_SMALL = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)

PRESETS: dict[str, ModelConfig] = {
    "llama-3.2-1b": _LLAMA32_1B,
    "llama-3.2-3b": replace(
        _LLAMA32_1B,
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        head_dim=128,
    ),
    "llama-3.1-8b": _LLAMA31_8B,
    "llama-3.1-70b": replace(
        _LLAMA31_8B,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
    ),
    "llama-3-8b": _LLAMA3_8B,
    "llama-2-7b": ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=(2,),
    ),
    "smollm2-135m": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=(2,),
        pad_token_id=2,
    ),
    # To train: about 0.4M, 5.5M and 11M parameters.
    "tiny": replace(
        _SMALL, vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    ),
    "small": _SMALL,
    "nano-gpt": replace(
        _SMALL, vocab_size=256, hidden_size=384, intermediate_size=1024, num_attention_heads=6,
        num_key_value_heads=6, head_dim=64, max_position_embeddings=256,
    ),
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """Return the preset called `name`.

    Raises:
        ConfigError: If there is none, with the names that there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {show_value(name)}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]
