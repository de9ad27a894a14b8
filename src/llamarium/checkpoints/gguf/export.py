"""From a model to a GGUF file, which llama.cpp and everything built on it reads.

Three things differ from a Hugging Face folder. Rows of q and k go into Meta's interleaved order, in which RoPE turns
neighbours. The scaling of Llama 3.1's RoPE becomes the tensor `rope_freqs.weight`, one divisor per frequency. And the
tokenizer becomes lists in the metadata, with the name of a pre-tokenizer that llama.cpp has built in.

Which tensor gets which type is in `mixtures.py`.

Source: llama.cpp, `convert_hf_to_gguf.py` (`LlamaModel`).
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import permuted_heads
from llamarium.checkpoints.gguf.config import ROPE_FREQS
from llamarium.checkpoints.gguf.file import GGUFData, write_gguf
from llamarium.checkpoints.gguf.mixtures import FLOATS, MIXTURES, Mixture, type_of, wanted_type
from llamarium.checkpoints.gguf.reader import LAYER_NAMES, NAMES
from llamarium.checkpoints.gguf.vocabulary import tokenizer_metadata
from llamarium.checkpoints.huggingface.writer import OutputTensor, array_bytes, cast_array, check_fits_float16
from llamarium.checkpoints.tokenizers import check_tokenizer
from llamarium.config import ModelConfig, RopeScaling
from llamarium.config.rope_scaling import magnitude
from llamarium.errors import OptionError, show_value, warn_caller
from llamarium.io import unwritable
from llamarium.quant.formats import block_format
from llamarium.quant.ggml.encode import encode
from llamarium.tokenizer.base import Tokenizer

_END_TOKENS = {"eom_token_id": ("<|eom_id|>",), "eot_token_id": ("<|eot_id|>", "<|im_end|>")}
_KEY = "tokenizer.ggml."


def export_gguf(
    path: Path,
    weights: Sequence[OutputTensor],
    config: ModelConfig,
    *,
    type_name: str,
    name: str,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a GGUF file; `path` is complete or untouched.

    Args:
        path: Replaced if it exists.
        weights: Exactly those of `config` (`model_weights`, `checkpoint_weights`).
        config: The model's.
        type_name: A key of `MIXTURES`: what the matrices become, with exceptions.
        name: The model's display name.
        tokenizer: Goes into the file; without one the file has weights only.

    Raises:
        OptionError: For another type.
        UnsupportedTokenizerError: If GGUF's readers could not encode as this tokenizer does.
        CheckpointError: If a value does not fit the type, or the tokenizer is too large for the model.
        OutputError: If the file cannot be written.
    """
    if type_name not in MIXTURES:
        raise OptionError(f"type is {show_value(type_name)}; expected one of {', '.join(MIXTURES)}")
    mixture = MIXTURES[type_name]
    check_tokenizer(tokenizer, config)
    metadata = _model_metadata(config, mixture, name)
    metadata |= {_KEY + "model": "no_vocab"} if tokenizer is None else tokenizer_metadata(tokenizer, config)
    metadata |= _end_ids(config, tokenizer)
    tensors: dict[str, tuple[str, tuple[int, ...], GGUFData]] = {}
    for weight in weights:
        kind = type_of(weight.key, weight.shape, config, mixture)
        tensors[_gguf_name(weight.key)] = kind, weight.shape, partial(_encode, weight, config, kind)
    if config.rope_scaling is not None and config.rope_scaling.rope_type == "llama3":
        factors = rope_factors(config, config.rope_scaling)
        tensors = {ROPE_FREQS: ("F32", tuple(factors.shape), factors.tobytes()), **tensors}
    _warn_of_short_rows(weights, config, mixture)
    try:
        write_gguf(path, metadata, tensors)
    except OSError as error:
        raise unwritable(path, error) from error


def rope_factors(config: ModelConfig, scaling: RopeScaling) -> NDArray[np.float32]:
    """Return what each plain RoPE frequency is divided by in Llama 3.1's scaling: (H/2,) float32.

    Source: llama.cpp, `convert_hf_to_gguf.py`, `LlamaModel.generate_extra_tensors`.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    wavelengths = 2 * math.pi * np.float32(config.rope_theta) ** exponents
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None and scaling.original_max_position_embeddings is not None
    unscaled_share = (scaling.original_max_position_embeddings / wavelengths - low) / (high - low)
    factors = 1 / ((1 - unscaled_share) / scaling.factor + unscaled_share)
    return np.where(unscaled_share <= 0, scaling.factor, np.where(unscaled_share >= 1, 1, factors)).astype(np.float32)


def permute(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Move the rows or the bias of q or k from the half-split order of RoPE pairs to the interleaved one.

    Source: llama.cpp, `convert_hf_to_gguf.py`, `LlamaModel.permute`.
    """
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _gguf_name(key: str) -> str:
    if key in _NAME_OF_KEY:
        return _NAME_OF_KEY[key]
    _, _, layer, rest = key.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAME_OF_KEY[rest]}"


_NAME_OF_KEY = {key: name for name, key in NAMES.items()}
_LAYER_NAME_OF_KEY = {key: name for name, key in LAYER_NAMES.items()}


def _encode(weight: OutputTensor, config: ModelConfig, kind: str) -> memoryview:
    values = weight.read()
    heads = permuted_heads(weight.key, config)
    values = values if heads is None else permute(values, heads)
    if kind in FLOATS:
        return array_bytes(cast_array(values, kind, weight.key))
    check_fits_float16(values, weight.key)
    return array_bytes(encode(values, kind))


def _warn_of_short_rows(weights: Sequence[OutputTensor], config: ModelConfig, mixture: Mixture) -> None:
    """Warn of matrices that do not get the type that was chosen; not of those that get a better one."""
    chosen, short = mixture.type_name, dict[str, list[str]]()
    for weight in weights:
        kind = type_of(weight.key, weight.shape, config, mixture)
        if len(weight.shape) == 2 and kind != chosen == wanted_type(weight.key, config, mixture):
            short.setdefault(kind, []).append(_gguf_name(weight.key))
    for kind, names in short.items():
        warn_caller(
            f"{len(names)} matrices, such as {names[0]}, are written as {kind}: their rows are no whole number of "
            f"{chosen}'s blocks of {block_format(chosen).block_size}"
        )


def _model_metadata(config: ModelConfig, mixture: Mixture, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    if (window := config.sliding_window) is not None:
        fields["attention.sliding_window"] = window
        warn_caller(
            f"attention sees a window of {window} tokens, which llama.cpp does not compute for a Llama: there, "
            "texts of more tokens give other results"
        )
    fields |= {} if config.rope_scaling is None else scaling_fields(config.rope_scaling)
    general = {"architecture": "llama", "name": name, "file_type": mixture.number, "quantization_version": 2}
    return {f"general.{key}": value for key, value in general.items()} | {
        f"llama.{key}": value for key, value in fields.items()
    }


def scaling_fields(scaling: RopeScaling) -> dict[str, Any]:
    """Return the metadata of a RoPE scaling, without `llama.`; OptionError for what GGUF cannot say.

    Llama 3.1's is a tensor beside it. A dynamic one scales nothing within the context, and has no keys.
    """
    fields: dict[str, Any] = {}
    if scaling.original_max_position_embeddings is not None:
        fields["rope.scaling.original_context_length"] = scaling.original_max_position_embeddings
    if scaling.rope_type in ("linear", "yarn"):
        fields |= {"rope.scaling.type": scaling.rope_type, "rope.scaling.factor": float(scaling.factor)}
    if scaling.rope_type != "yarn":
        return fields
    if not scaling.truncate:
        raise OptionError(
            "RoPE's yarn has truncate false, which a GGUF file cannot say; export in Hugging Face's format"
        )
    # llama.cpp multiplies with `magnitude` itself.
    of_attention = (scaling.attention_factor or 1.0) / magnitude(scaling.factor)
    yarn_fields = {"attn_factor": (of_attention, 1.0), "yarn_beta_fast": (scaling.beta_fast, 32.0)}
    yarn_fields["yarn_beta_slow"] = scaling.beta_slow, 1.0
    return fields | {f"rope.scaling.{name}": value for name, (value, usual) in yarn_fields.items() if value != usual}


def _end_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Return the ids of the begin, the ends and the padding; a reader takes up to three ends."""
    bos, pad, ends, spelling = config.bos_token_id, config.pad_token_id, list(config.eos_token_id), dict[int, str]()
    if tokenizer is not None:
        bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else bos
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else pad
        ends = ends or list(tokenizer.eos_token_ids)
        spelling = {i: text for text, i in tokenizer.special_tokens.items()}
    ids: dict[str, int | None] = {"bos_token_id": bos, "padding_token_id": pad, "eos_token_id": (*ends, None)[0]}
    rest = ends[1:]
    for name, spellings in _END_TOKENS.items():
        ids[name] = next((i for i in rest if spelling.get(i) in spellings), None)
    for name in _END_TOKENS:  # of unknown spelling: in the order that they have
        free = [i for i in rest if i not in ids.values()]
        if ids[name] is None and free:
            ids[name] = free[0]
    if lost := [i for i in ends if i not in ids.values()]:
        warn_caller(f"the ids {lost} end a text too, but a GGUF file names three; they are left out")
    return {_KEY + name: i for name, i in ids.items() if i is not None}
