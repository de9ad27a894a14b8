"""Pretraining: prepare a run from scratch.

The tokenizer is learned from the data or loaded, the data becomes one stream of ids on disk, the model is a preset with
the settings' changes, and `run` does the rest.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from llamarium.checkpoints.decode import read
from llamarium.checkpoints.huggingface.writer import save_weights
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.tokenizers import load_tokenizer
from llamarium.config import ModelConfig
from llamarium.errors import ConfigError, TrainingError, warn_caller
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.presets import preset
from llamarium.runtime.device import choose_device
from llamarium.tokenizer.backends.words import UNKNOWN, WordBackend
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.config import PretrainConfig
from llamarium.train.data.bpe import train_bpe, train_characters, train_words
from llamarium.train.data.corpus import Corpus, Learner, tokenize_corpus
from llamarium.train.data.packing import PackedRows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.setup import Setup, with_precision

_CHANGES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings", "rope_theta", "initializer_range",
)  # fmt: skip
_LONGEST_UNASKED = 8192  # tokens a row, as in Llama 3's pretraining
_MLP_MULTIPLE = 64  # of widths that are not given: matrix products like them


def prepare(
    config: PretrainConfig,
    out: Path,
    progress: Callable[[int, int], None] | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Setup:
    """Prepare a run from scratch; its folder also keeps the data's ids.

    `progress` is called with (documents, tokens) read so far. LlamariumError if the data cannot be read or is too
    short, or the settings do not fit together.
    """
    config = with_precision(config, process_group)
    _check_context(config)
    corpus = tokenize_corpus(
        config.data, _tokenizer(config), out / "data", text_field=config.text_field, progress=progress
    )
    tokenizer = corpus.tokenizer
    _tell_unknown(corpus)
    model_config = resolve_model(config, tokenizer)
    context = model_config.max_position_embeddings
    validation = None
    if config.validation > 0:
        corpus, held_out = corpus.split(config.validation, at_least=context + 1)
        validation = PackedRows(held_out, context, None)
    device = choose_device(config.device)
    model = init_weights(LlamaForCausalLM(model_config).to(device), config.seed)
    return Setup(
        config=config,
        model=model,
        tokenizer=tokenizer,
        train=PackedRows(corpus, context, config.seed),
        validation=validation,
        save=lambda folder: save_weights(process_group.weights(model), model_config, folder, tokenizer=tokenizer),
        restore=lambda folder: restore_weights(model, folder, process_group),
        process_group=process_group,
    )


def _check_context(config: PretrainConfig) -> None:
    """Refuse rows of a preset's 131,072 tokens unless `context` is given."""
    whole = preset(config.preset).max_position_embeddings
    if config.context is None and whole > _LONGEST_UNASKED:
        raise TrainingError(f"a row would be the whole context of {config.preset}, {whole} tokens; give context")


def _tell_unknown(corpus: Corpus) -> None:
    """Warn of words that a vocabulary of words lacks."""
    backend = corpus.tokenizer.backend
    if isinstance(backend, WordBackend) and (share := float((corpus.ids == backend.unknown_id).double().mean())):
        warn_caller(
            f"{share:.1%} of the tokens of {corpus.name} are {UNKNOWN}: the vocabulary has "
            f"{corpus.tokenizer.vocab_size} tokens; a larger vocab_size knows more words"
        )


def resolve_model(config: PretrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the preset with the settings' changes and the tokenizer's vocabulary; TrainingError if they do not fit.

    Unset values follow from the others: as many key-value heads as query heads, heads that share the hidden size, and
    a SwiGLU in the preset's proportion.
    """
    base = preset(config.preset)
    changes = {name: value for name in _CHANGES if (value := getattr(config, name)) is not None}
    if config.num_attention_heads is not None and config.num_key_value_heads is None:
        changes.setdefault("num_key_value_heads", config.num_attention_heads)
    shape = {"hidden_size": base.hidden_size, "num_attention_heads": base.num_attention_heads, **changes}
    if "head_dim" not in changes and shape.keys() & changes.keys() & {"hidden_size", "num_attention_heads"}:
        if shape["hidden_size"] % shape["num_attention_heads"]:
            raise TrainingError(
                f"hidden_size {shape['hidden_size']} is no multiple of num_attention_heads "
                f"{shape['num_attention_heads']}; change one of them, or give head_dim"
            )
        changes["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    if config.intermediate_size is None and shape["hidden_size"] != base.hidden_size:
        parts = math.ceil(base.intermediate_size * shape["hidden_size"] / base.hidden_size / _MLP_MULTIPLE)
        changes["intermediate_size"] = _MLP_MULTIPLE * parts
    try:
        return replace(
            base,
            **changes,
            vocab_size=tokenizer.vocab_size,
            max_position_embeddings=config.context or base.max_position_embeddings,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_ids,
            pad_token_id=tokenizer.pad_token_id,
        )
    except ConfigError as error:
        raise TrainingError(f"the model's shape: {error}") from None


@torch.no_grad()
def restore_weights(model: LlamaForCausalLM, folder: Path, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
    """Load a saved model's weights in place; TrainingError if shape or dtype differ."""
    saved = open_checkpoint(folder)
    if saved.config != model.config:
        raise TrainingError(f"{folder}: holds a model of another shape than this run's; expected {model.config}")
    for key in saved.entries:
        parameter, values = model.get_parameter(key), read(saved, key)
        if values.dtype != parameter.dtype:
            raise TrainingError(f"{folder}: {key} is {values.dtype}; this run's is {parameter.dtype}")
        parameter.copy_(process_group.distribute(values, parameter))


def _tokenizer(config: PretrainConfig) -> Tokenizer | Learner:
    if config.tokenizer == "characters":
        return Learner("characters", train_characters)
    if config.tokenizer == "bpe":
        return Learner(f"bpe {config.vocab_size}", partial(train_bpe, vocab_size=config.vocab_size))
    if config.tokenizer == "words":
        return Learner(f"words {config.vocab_size}", partial(train_words, vocab_size=config.vocab_size))
    return load_tokenizer(config.tokenizer)
