"""Conversion of a GGUF file's metadata to a `ModelConfig`.

Two things need care. Numbers are float32, so 1e-5 is read as 0.00000999999975: the shortest decimal with the same
float32 value is used. And the scaling of Llama 3.1's RoPE is not stored as its four parameters, but as one divisor per
frequency in the tensor `rope_freqs.weight`: the parameters are recovered by trying the published ones, which are
accepted only if they give the same divisors.

Source: llama.cpp, `docs/gguf.md` (keys) and `convert_hf_to_gguf.py`, `generate_extra_tensors` (rope_freqs).
"""

import dataclasses
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.gguf.file import GGUFFile
from llamarium.config import ModelConfig, RopeScaling
from llamarium.config.rope_scaling import magnitude
from llamarium.errors import (
    CheckpointError,
    ConfigError,
    UnsupportedFormatError,
    counted,
    escape,
    show_value,
    warn_caller,
)
from llamarium.rope import rope_frequencies

ROPE_FREQS = "rope_freqs.weight"

# Keys of `llama.*` that change the computation, and their only supported values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "logit_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
_READ = frozenset(
    "context_length embedding_length block_count feed_forward_length vocab_size rope.freq_base rope.dimension_count "
    "attention.head_count attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length "
    "attention.value_length attention.sliding_window rope.scale_linear rope.scaling.type rope.scaling.factor "
    "rope.scaling.attn_factor rope.scaling.original_context_length rope.scaling.yarn_beta_fast "
    "rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor rope.scaling.yarn_log_multiplier rope.scaling.finetuned "
    "tensor_data_layout".split()
)
_IS_BIAS = {
    "attention": re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
    "mlp": re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias"),
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_config(file: GGUFFile, rope_factors: NDArray[np.float32] | None) -> ModelConfig:
    """Return the config of a Llama from a header; `rope_factors` is `rope_freqs.weight`, float32 (H/2,), if present."""
    source = escape(file.path)
    _reject_unsupported(file.metadata, source)
    try:
        config = _plain_config(file, source)
        scaling = read_scaling(file.metadata, config.max_position_embeddings, source)
        if rope_factors is None:
            if scaling is None:
                _warn_if_unscaled(config, source)
        elif (divided := _find_scaling(config, rope_factors, file.metadata, source)) is not None:
            if scaling is not None:
                raise UnsupportedFormatError(
                    f"{source}: RoPE is scaled twice, by {ROPE_FREQS} and by {scaling.rope_type}; expected one"
                )
            scaling = divided
        return dataclasses.replace(config, rope_scaling=scaling)
    except ConfigError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _plain_config(file: GGUFFile, source: str) -> ModelConfig:
    data, notes = file.metadata, list[str]()
    hidden = _integer(data, "llama.embedding_length", source)
    heads = _integer(data, "llama.attention.head_count", source)
    theta = 10000.0
    if "llama.rope.freq_base" in data:
        theta = _number(data, "llama.rope.freq_base", source)
    else:
        notes.append(f"not in the file, the format's default: rope.freq_base {theta:g}")
    has_bias = {part: any(_IS_BIAS[part].fullmatch(name) for name in file.tensors) for part in _IS_BIAS}
    return ModelConfig(
        vocab_size=_vocab_size(file, source),
        hidden_size=hidden,
        intermediate_size=_integer(data, "llama.feed_forward_length", source),
        num_hidden_layers=_integer(data, "llama.block_count", source),
        num_attention_heads=heads,
        num_key_value_heads=_integer(data, "llama.attention.head_count_kv", source, default=heads),
        head_dim=_head_dim(data, hidden, heads, source),
        rms_norm_eps=_number(data, "llama.attention.layer_norm_rms_epsilon", source),
        rope_theta=theta,
        max_position_embeddings=_integer(data, "llama.context_length", source),
        sliding_window=_window(data, source),
        attention_bias=has_bias["attention"],
        mlp_bias=has_bias["mlp"],
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=_token_id(data, "bos_token_id", source),
        eos_token_id=tuple(dict.fromkeys(i for name in _END_KEYS if (i := _token_id(data, name, source)) is not None)),
        pad_token_id=_token_id(data, "padding_token_id", source),
        notes=tuple(notes),
    )


def read_scaling(data: Mapping[str, Any], context: int, source: str) -> RopeScaling | None:
    """Return the linear or YaRN scaling of a file, with llama.cpp's interpretation of its keys; None if unscaled.

    Source: llama.cpp, `llama_model::load_hparams` and `llama_context` (`yarn_attn_factor`).
    """
    prefix = "llama.rope.scaling."
    kind = data.get(f"{prefix}type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedFormatError(
            f"{source}: {prefix}type is {escape(kind, 40)}; supported are none, linear and yarn"
        )

    def value(name: str, default: float) -> float:
        key = f"llama.{name}"
        number = _number(data, key, source) if key in data else default
        if not math.isfinite(number):
            raise CheckpointError(f"{source}: {key} is {number}; expected a finite number")
        return number

    old = value("rope.scale_linear", 0.0)  # the older key; 0 is none
    factor = value("rope.scaling.factor", old) or 1.0
    attention = value("rope.scaling.attn_factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        if attention != 1:
            raise UnsupportedFormatError(f"{source}: {prefix}attn_factor is {attention} without yarn; expected 1")
        return None
    if kind == "linear":
        if attention != 1:
            raise UnsupportedFormatError(f"{source}: {prefix}attn_factor is {attention} beside linear; expected 1")
        return RopeScaling(rope_type="linear", factor=factor)
    if value("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise UnsupportedFormatError(f"{source}: {prefix}yarn_ext_factor is given; supported is 1 only")
    original = _integer(data, f"{prefix}original_context_length", source, default=context)
    log_multiplier = value("rope.scaling.yarn_log_multiplier", 0.0)
    shared = magnitude(factor, log_multiplier) if log_multiplier else 1.0
    if shared <= 0:
        raise CheckpointError(f"{source}: {prefix}yarn_log_multiplier is {log_multiplier}; expected a number above 0")
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original or context,
        beta_fast=value("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=value("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention * magnitude(factor) / shared,
    )


def _reject_unsupported(data: Mapping[str, Any], source: str) -> None:
    architecture = data.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedFormatError(f'{source}: architecture {escape(architecture)!r}; supported is "llama" only')
    for name, allowed in _FIXED.items():
        value = data.get(f"llama.{name}", allowed[0])
        if value not in allowed:
            raise UnsupportedFormatError(f"{source}: llama.{name} is {escape(value)}; supported is {allowed[0]} only")
    keys = (key.removeprefix("llama.") for key in data if key.startswith("llama."))
    unknown = sorted(escape(key, 60) for key in keys if key not in _READ and key not in _FIXED)
    if unknown:
        warn_caller(f"{source}: llama.* keys not known and not used: {', '.join(unknown[:10])}")


def _vocab_size(file: GGUFFile, source: str) -> int:
    """Return the rows of the embedding table, after checking them against metadata and vocabulary."""
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{source}: there is no token_embd.weight; this file holds no whole Llama")
    rows = file.tensors["token_embd.weight"].shape[0]
    vocab_size = _integer(file.metadata, "llama.vocab_size", source, default=rows)
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if vocab_size != rows:
        raise CheckpointError(
            f"{source}: llama.vocab_size is {vocab_size}, token_embd.weight has {counted(rows, 'row')}"
        )
    if isinstance(tokens, list) and len(tokens) > rows:
        raise CheckpointError(
            f"{source}: {counted(len(tokens), 'token')}, but token_embd.weight has {counted(rows, 'row')}"
        )
    return rows


def _head_dim(data: Mapping[str, Any], hidden: int, heads: int, source: str) -> int:
    """Return the width of a head, which must be the same for queries, keys, values and the rotation."""
    default = hidden // heads if heads and hidden % heads == 0 else None
    head_dim = _integer(data, "llama.attention.key_length", source, default=default)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        value = _integer(data, key, source, default=head_dim)
        if value != head_dim:
            raise CheckpointError(f"{source}: {key} is {value}, but a head is {head_dim} wide; supported is equal only")
    return head_dim


def _window(data: Mapping[str, Any], source: str) -> int | None:
    """Return the sliding window if it is shorter than the context; llama.cpp ignores it for Llama models."""
    key = "llama.attention.sliding_window"
    window = _integer(data, key, source, default=0)
    if window < 0:
        raise _bad(data, key, source, "0 or more tokens")
    return window if 0 < window < _integer(data, "llama.context_length", source) else None


def _find_scaling(
    config: ModelConfig, factors: NDArray[np.float32], data: Mapping[str, Any], source: str
) -> RopeScaling | None:
    """Return the parameters of the scaling that gives these divisors of the unscaled frequencies."""
    if factors.shape != (config.head_dim // 2,) or not np.isfinite(factors).all():
        raise CheckpointError(
            f"{source}: {ROPE_FREQS} has shape {tuple(factors.shape)}; expected {config.head_dim // 2} finite numbers"
        )
    if bool((factors == 1).all()):
        return None
    plain = rope_frequencies(config)
    original = _integer(data, "llama.rope.scaling.original_context_length", source, default=8192)
    for factor in {float(factors.max()), 8.0, 32.0}:
        if factor < 1:
            continue
        scaling = RopeScaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=original
        )
        divisors = plain / rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
        if np.allclose(divisors, factors, rtol=2e-5, atol=0.0):  # float32 noise in the blend; the next factor is far
            return scaling
    raise UnsupportedFormatError(
        f"{source}: the divisors in {ROPE_FREQS} are not those of Llama 3.1's scaling with low_freq_factor 1, "
        f"high_freq_factor 4 and {original} original positions; use the model's safetensors, whose config has the "
        "parameters"
    )


def _warn_if_unscaled(config: ModelConfig, source: str) -> None:
    """Warn of a Llama 3.1 file without divisors, as early converters wrote it (llama.cpp issue 8650)."""
    like_llama31 = config.vocab_size == 128256 and config.rope_theta == 500000.0
    if like_llama31 and config.max_position_embeddings > 8192:
        warn_caller(
            f"{source}: looks like Llama 3.1 or later but has no {ROPE_FREQS}, so RoPE is not scaled; a file "
            "converted before that was supported is wrong on every text: convert it anew"
        )


def _integer(data: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    value = data.get(key, default)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):  # a list by layer, all alike
        value = value[0]
    if isinstance(value, list):
        raise UnsupportedFormatError(f"{source}: {key} differs by layer; supported is one value for all")
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(data, key, source, "a whole number")
    return value


def _number(data: Mapping[str, Any], key: str, source: str) -> float:
    value = data.get(key)
    if not isinstance(value, float):
        raise _bad(data, key, source, "a float")
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


def _bad(data: Mapping[str, Any], key: str, source: str, expected: str) -> CheckpointError:
    problem = f"is {show_value(data[key])}" if key in data else "is missing"
    return CheckpointError(f"{source}: metadata {key} {problem}; expected {expected}")


def _token_id(data: Mapping[str, Any], name: str, source: str) -> int | None:
    key = f"tokenizer.ggml.{name}"
    return _integer(data, key, source) if key in data else None
