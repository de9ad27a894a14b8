"""Conversion of Meta's `params.json` to a `ModelConfig`.

`params.json` has no context length, no token ids and, for `use_scaled_rope`, no factor, because they were constants in
Meta's code. Published models are recognized by their shape; other models need a `config.json` in the same folder,
because a wrong factor would only show in the answers.

Source: llama-models, `models/llama3/args.py` (fields) and `model.py` (`FeedForward`: intermediate size); the factors
and contexts are those of the publishers' `config.json` files.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarium.checkpoints.checkpoint import CONFIG_LIMIT_BYTES
from llamarium.config import ModelConfig, RopeScaling, read_json_object
from llamarium.errors import CheckpointError, ConfigError, counted, escape
from llamarium.file_names import CONFIG, META_CONFIG

# (dim, n_layers) of the models published with scaled RoPE, and the factor: 3.2 1B and 3B; 3.1 8B, 70B and 405B.
_SCALING_FACTORS = {(2048, 16): 32.0, (3072, 28): 32.0, (4096, 32): 8.0, (8192, 80): 8.0, (16384, 126): 8.0}
# Llama 1, Llama 2 and Code Llama, whose vocabulary may have 16 more rows; their code had theta 10000 written into it.
_SENTENCEPIECE_VOCABS, _LLAMA3_VOCAB = (32000, 32016), 128256
_LLAMA3_THETA, _LLAMA2_THETA = 500000.0, 10000.0

_NOT_THE_MODEL = frozenset({"max_seq_len", "max_batch_size", "model_parallel_size"})
_FIELDS = frozenset(
    "dim n_layers n_heads n_kv_heads vocab_size ffn_dim_multiplier multiple_of norm_eps rope_theta "
    "use_scaled_rope".split()
)


def meta_config(folder: Path, vocab_size: int, tied: bool) -> ModelConfig:
    """Return the config of the Llama in a folder with `params.json`; a `config.json` there may say what that does not.

    `vocab_size` is the rows of the embedding table; `tied`: the head is missing, or is that table.
    """
    path = folder / META_CONFIG
    raw = read_json_object(path, CONFIG_LIMIT_BYTES)
    source = escape(path)
    unknown = sorted(set(raw) - _FIELDS - _NOT_THE_MODEL)  # such as quantization_args and lora_args of 3.2's QLoRA
    if unknown:
        raise ConfigError(f"{source}: {escape(', '.join(unknown[:10]))} not supported; read are those of Llama 2 and 3")
    params = _read_fields(raw, source)
    if params["vocab_size"] not in (-1, vocab_size):
        raise CheckpointError(
            f"{source}: vocab_size is {params['vocab_size']}, the embedding has {counted(vocab_size, 'row')}"
        )
    params |= {"vocab_size": vocab_size}
    if (folder / CONFIG).exists():
        return _merge(folder / CONFIG, params)
    scaled = raw.get("use_scaled_rope", False)
    if not isinstance(scaled, bool):
        raise ConfigError(f"{source}: use_scaled_rope is {escape(scaled, 40)}; expected true or false")
    fields: dict[str, Any] = {**params, "tie_word_embeddings": tied, **_left_out(params, scaled, source)}
    try:
        return ModelConfig(**fields)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    dim, heads = _positive(raw, "dim", source), _positive(raw, "n_heads", source)
    if dim % heads:
        raise ConfigError(f"{source}: dim {dim} is no multiple of n_heads {heads}")
    vocab_size = raw.get("vocab_size", -1)
    if type(vocab_size) is not int:
        raise ConfigError(f"{source}: vocab_size is {escape(vocab_size, 40)}; expected a whole number")
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": _intermediate_size(raw, dim, source),
        "num_hidden_layers": _positive(raw, "n_layers", source),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if raw.get("n_kv_heads") is None else _positive(raw, "n_kv_heads", source),
        "head_dim": dim // heads,
        "rms_norm_eps": _number(raw, "norm_eps", source),
    }
    return fields | ({"rope_theta": _number(raw, "rope_theta", source)} if raw.get("rope_theta") is not None else {})


def _intermediate_size(raw: Mapping[str, Any], dim: int, source: str) -> int:
    """The width of the SwiGLU: two thirds of 4 D, stretched, rounded up to a multiple."""
    size = 8 * dim // 3
    if raw.get("ffn_dim_multiplier") is not None:
        size = int(_number(raw, "ffn_dim_multiplier", source) * size)
    multiple = _positive(raw, "multiple_of", source)
    return -(-size // multiple) * multiple


def _left_out(params: Mapping[str, Any], scaled: bool, source: str) -> dict[str, Any]:
    """Return what Meta's code knew by heart, for a published shape; anything else is refused."""
    shape, vocab_size = (params["hidden_size"], params["num_hidden_layers"]), params["vocab_size"]
    fields: dict[str, Any] = {"max_position_embeddings": 8192}
    if scaled:
        if shape not in _SCALING_FACTORS:
            raise ConfigError(
                f"{source}: use_scaled_rope is true without a factor, and no published Llama has dim {shape[0]} and "
                f"n_layers {shape[1]}; put a config.json with rope_scaling beside it"
            )
        scaling = RopeScaling(
            factor=_SCALING_FACTORS[shape],
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        fields = {"max_position_embeddings": 131072, "rope_scaling": scaling}
    is_llama2 = vocab_size in _SENTENCEPIECE_VOCABS and not scaled  # or Llama 1, or Code Llama
    notes: list[str] = []
    if "rope_theta" not in params:
        if not is_llama2 and vocab_size != _LLAMA3_VOCAB:
            raise ConfigError(f"{source}: rope_theta is missing; put a config.json beside it that has it")
        fields["rope_theta"] = _LLAMA2_THETA if is_llama2 else _LLAMA3_THETA
        notes.append(f"not in params.json, its code's default: rope_theta {fields['rope_theta']:g}")
    if is_llama2:
        fields["max_position_embeddings"] = _sentencepiece_context(params)
    if vocab_size == _LLAMA3_VOCAB:
        fields |= {"bos_token_id": 128000, "eos_token_id": (128001, 128008, 128009)}
    if is_llama2:
        fields |= {"bos_token_id": 1, "eos_token_id": (2,)}
    notes.append(
        f"not in params.json, that of its release: max_position_embeddings {fields['max_position_embeddings']}"
    )
    return fields | {"notes": tuple(notes)}


def _sentencepiece_context(params: Mapping[str, Any]) -> int:
    """Return the context of a release: 16384 of Code Llama, 2048 of Llama 1, 4096 of Llama 2.

    Code Llama has a theta of its own. Llama 1 has norm_eps 1e-6, except for 65B: that has as many key-value heads as
    query heads where Llama 2 70B, of the same width, has 8.
    """
    if params.get("rope_theta", _LLAMA2_THETA) > _LLAMA2_THETA:
        return 16384
    is_65b = params["hidden_size"] == 8192 and params["num_key_value_heads"] == params["num_attention_heads"]
    return 2048 if params["rms_norm_eps"] < 5e-6 or is_65b else 4096


def _merge(path: Path, params: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json, which must agree with all that params.json says."""
    config = ModelConfig.from_hf(read_json_object(path, CONFIG_LIMIT_BYTES), str(path))
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in params.items():
        if fields[name] != value:
            raise CheckpointError(
                f"{escape(path)}: {name} is {fields[name]}, params.json beside it makes it {value}; "
                "one of them belongs to another model"
            )
    return config


def _positive(raw: Mapping[str, Any], name: str, source: str) -> int:
    value = raw.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        problem = f"is {escape(value, 40)}" if name in raw else "is missing"
        raise ConfigError(f"{source}: {name} {problem}; expected a whole number of at least 1")
    return value


def _number(raw: Mapping[str, Any], name: str, source: str) -> float:
    value: Any = raw.get(name)
    if type(value) not in (int, float) or not 0 < value < 1e9:
        problem = f"is {escape(value, 40)}" if name in raw else "is missing"
        raise ConfigError(f"{source}: {name} {problem}; expected a number above 0")
    return float(value)
