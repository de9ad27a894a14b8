"""Conversion of a Hugging Face `config.json` to the fields of a `ModelConfig`.

A missing field gets the default of transformers for its architecture, and `notes` records it. Unsupported values that
change what the model computes are errors that name the field. Fields without effect are ignored.

Source: transformers' `LlamaConfig` and `MistralConfig`, in the v4 spelling (`rope_theta`, `rope_scaling`) and the v5
spelling (`rope_parameters`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamarium.config.fields import optional, require, token_id, token_ids
from llamarium.config.rope_scaling import read_rope
from llamarium.errors import ConfigError, escape, show_value, warn_caller


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Defaults of transformers for missing fields; `num_key_value_heads` None means as many as query heads."""

    max_position_embeddings: int
    num_key_value_heads: int | None
    sliding_window: int | None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


_DEFAULTS = {
    "llama": _Defaults(max_position_embeddings=2048, num_key_value_heads=None, sliding_window=None),
    "mistral": _Defaults(max_position_embeddings=131072, num_key_value_heads=8, sliding_window=4096),
}
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "LLaMAForCausalLM": "llama", "MistralForCausalLM": "mistral"}

# Fields and their only supported values; others change the computation.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "embedding_multiplier": (1.0, None),
    "attention_multiplier": (None,),
    "residual_multiplier": (1.0, None),
    "logits_scaling": (1.0, None),
}

# Fields that are read.
_READ = frozenset(
    "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rms_norm_eps rope_theta "
    "rope_scaling rope_parameters tie_word_embeddings initializer_range bos_token_id eos_token_id pad_token_id "
    "attention_bias mlp_bias sliding_window layer_types pretraining_tp".split()
)

# Fields without effect on the computation: training, serving, bookkeeping, defaults of `generate`.
_IGNORED = frozenset(
    "attention_dropout use_cache torch_dtype dtype transformers_version quantization_config auto_map "
    "_name_or_path is_llama_config transformers.js_config _attn_implementation_autoset _attn_implementation "
    "attn_implementation _flash_attn_2_enabled unsloth_fixed unsloth_version unsloth_optimized max_length return_dict "
    "output_attentions output_hidden_states chunk_size_feed_forward id2label label2id problem_type is_encoder_decoder "
    "is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder pruned_heads prefix "
    "task_specific_params finetuning_task torchscript use_bfloat16 tf_legacy_loss return_dict_in_generate vocab_file "
    "name max_sequence_length hidden_dropout resid_pdrop embd_pdrop tokenizer_class bos_token eos_token pad_token "
    "unk_token unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id temperature "
    "top_k top_p typical_p do_sample num_beams num_beam_groups num_return_sequences min_length early_stopping "
    "repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size length_penalty diversity_penalty "
    "bad_words_ids suppress_tokens begin_suppress_tokens exponential_decay_length_penalty output_scores "
    "remove_invalid_values max_new_tokens sliding_window_pattern use_sliding_window max_window_layers".split()
)


def read_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Convert the contents of a `config.json` to `ModelConfig` fields, checking types; ConfigError if invalid."""
    kind = _kind(raw, source)
    _reject_unsupported(raw, source)
    defaults, notes = _DEFAULTS[kind], list[str]()

    def default(name: str, field_type: type) -> Any:
        """Return a field, or its default, which is added to the notes."""
        if raw.get(name) is None:
            notes.append(f"{name} {getattr(defaults, name):g}")
        return optional(raw, name, field_type, getattr(defaults, name), source)

    heads = require(raw, "num_attention_heads", int, source)
    hidden = require(raw, "hidden_size", int, source)
    context = default("max_position_embeddings", int)
    theta, scaling, rope_notes = read_rope(raw, context, defaults.rope_theta, source)
    fields = {
        "vocab_size": require(raw, "vocab_size", int, source),
        "hidden_size": hidden,
        "intermediate_size": require(raw, "intermediate_size", int, source),
        "num_hidden_layers": require(raw, "num_hidden_layers", int, source),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(raw, heads, defaults, notes, source),
        "head_dim": _head_dim(raw, hidden, heads, source),
        "rms_norm_eps": default("rms_norm_eps", float),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": context,
        "sliding_window": _sliding_window(raw, kind, context, notes, source),
        "attention_bias": _bias(raw, "attention_bias", kind, source),
        "mlp_bias": _bias(raw, "mlp_bias", kind, source),
        "tie_word_embeddings": optional(raw, "tie_word_embeddings", bool, False, source),
        "initializer_range": optional(raw, "initializer_range", float, 0.02, source),
        "bos_token_id": token_id(raw, "bos_token_id", source),
        "eos_token_id": token_ids(raw, "eos_token_id", source),
        "pad_token_id": token_id(raw, "pad_token_id", source),
    }
    return fields | {"notes": _notes([*notes, *rope_notes], raw)}


def _notes(defaults: list[str], raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the notes on defaults and on fields without effect, for a model's summary."""
    notes = [f"not in the config, the format's default: {item}" for item in defaults]
    if raw.get("pretraining_tp") not in (1, None):
        notes.append(f"without effect: pretraining_tp {escape(raw['pretraining_tp'], 40)}")
    return tuple(notes)


def _kind(raw: Mapping[str, Any], source: str) -> str:
    """Return "llama" or "mistral", from `model_type`, or else from the architecture."""
    architectures: list[Any] = optional(raw, "architectures", list, [], source)
    kinds = {_ARCHITECTURES[name] for name in architectures if isinstance(name, str) and name in _ARCHITECTURES}
    if architectures and not kinds:
        expected = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{source}: architectures is {show_value(architectures)}; supported are {expected}")
    kind = raw.get("model_type")
    if kind is None:
        if len(kinds) != 1:
            raise ConfigError(f'{source}: model_type is missing; expected "llama" or "mistral"')
        return kinds.pop()
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ConfigError(f'{source}: model_type is {show_value(kind)}; supported are "llama" and "mistral"')
    if kinds and kind not in kinds and raw.get("sliding_window") is not None:
        raise ConfigError(
            f"{source}: model_type is {show_value(kind)}, architectures is {show_value(architectures)} and "
            f"sliding_window {show_value(raw['sliding_window'])}: whether attention is windowed is not clear; "
            "make model_type and architectures agree"
        )
    return kind


def _reject_unsupported(raw: Mapping[str, Any], source: str) -> None:
    for name, allowed in _FIXED.items():
        if name in raw and raw[name] not in allowed:
            raise ConfigError(
                f"{source}: {name} is {escape(json.dumps(raw[name]))}; supported is {json.dumps(allowed[0])} only"
            )
    kinds: list[Any] = optional(raw, "layer_types", list, [], source)
    if any(kind != kinds[0] for kind in kinds):
        raise ConfigError(f"{source}: layer_types differ; supported is one kind of attention for all layers")
    unknown = sorted(escape(name, 60) for name in raw if name not in _READ | _IGNORED | set(_FIXED))
    if unknown:
        warn_caller(f"{source}: fields not known and not used: {', '.join(unknown[:10])}")


def _kv_heads(raw: Mapping[str, Any], heads: int, defaults: _Defaults, notes: list[str], source: str) -> int:
    """Return the number of key-value heads; null means as many as query heads, also for Mistral."""
    if "num_key_value_heads" in raw or defaults.num_key_value_heads is None:
        return optional(raw, "num_key_value_heads", int, heads, source)
    notes.append(f"num_key_value_heads {defaults.num_key_value_heads}")
    return defaults.num_key_value_heads


def _head_dim(raw: Mapping[str, Any], hidden: int, heads: int, source: str) -> int:
    if raw.get("head_dim") is not None:
        return optional(raw, "head_dim", int, 0, source)
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is "
            "not given; add head_dim"
        )
    return hidden // heads


def _sliding_window(raw: Mapping[str, Any], kind: str, context: int, notes: list[str], source: str) -> int | None:
    """Return the sliding window of attention, or None for full causal attention.

    transformers ignores the field for Llama models. A window of at least the context length has no effect.
    """
    window = optional(raw, "sliding_window", int, None, source)
    if window is not None and window < 1:
        raise ConfigError(f"{source}: sliding_window is {window}; expected at least 1, or null for none")
    if kind == "llama":
        if window is not None:
            warn_caller(f"{source}: sliding_window {window} is not used: a Llama has none (model_type mistral has)")
        return None
    if "sliding_window" not in raw:
        window = _DEFAULTS[kind].sliding_window
        notes.append(f"sliding_window {window}")
    return None if window is None or window >= context else window


def _bias(raw: Mapping[str, Any], name: str, kind: str, source: str) -> bool:
    has_bias = optional(raw, name, bool, False, source)
    if has_bias and kind == "mistral":
        warn_caller(f"{source}: {name} is not used: a Mistral has none (model_type llama has)")
        return False
    return has_bias
