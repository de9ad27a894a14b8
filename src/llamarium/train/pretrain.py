"""Pretraining: prepare a run from scratch, or one that continues from a model.

The tokenizer is learned from the data or loaded, the data is tokenized into one stream on disk, and the model is a
preset with the settings' changes. A run that continues from a model takes its tokenizer, architecture and weights; all
weights are trained, in float32. The training loop is in `run`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.huggingface.writer import save_weights
from llamarium.checkpoints.load import load_model
from llamarium.checkpoints.open import open_checkpoint
from llamarium.checkpoints.options import quantized_types
from llamarium.checkpoints.tokenizers import find_tokenizer, fit_tokenizer, load_tokenizer
from llamarium.config import ModelConfig
from llamarium.datasets.sources import BUNDLED
from llamarium.errors import ConfigError, TrainingError, escape, warn_caller
from llamarium.hub.folders import is_adapter
from llamarium.hub.resolve import resolve
from llamarium.model import LlamaForCausalLM
from llamarium.model.init import init_weights
from llamarium.options.loading import LoadOptions
from llamarium.presets import preset
from llamarium.runtime.device import choose_device
from llamarium.tokenizer.backends.words import UNKNOWN, WordBackend
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.config import SHAPE, PretrainConfig
from llamarium.train.data.batch import Rows
from llamarium.train.data.bpe import train_bpe, train_characters, train_words
from llamarium.train.data.corpus import Corpus, Learner, Progress, tokenize_corpus
from llamarium.train.data.packing import MixedRows, PackedRows
from llamarium.train.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from llamarium.train.setup import Setup, with_optimizer, with_precision, with_steps
from llamarium.train.state.checkpoint import latest_checkpoint
from llamarium.train.state.resume import load_resume

_LONGEST_UNASKED = 8192  # tokens per row without an explicit `context`, as in Llama 3's pretraining
_MLP_MULTIPLE = 64  # derived MLP widths are a multiple of it, which keeps matrix products fast


def prepare(
    config: PretrainConfig, out: Path, progress: Progress | None = None, process_group: ProcessGroup = SINGLE_PROCESS
) -> Setup:
    """Prepare a run; the tokenized data is cached in the run's folder.

    LlamariumError if the data cannot be read or is too short, or if the settings conflict.
    """
    data = config.data
    if config.changed(["text_field"]) and (data is None or (data in BUNDLED and not Path(str(data)).exists())):
        raise TrainingError("text_field: of no effect on a text that is built in; leave it out")
    config = with_precision(config, process_group)
    base, learner = _open(config) if config.model else (None, _tokenizer(config))
    whole = (base.config if base else preset(config.preset)).max_position_embeddings
    if config.context is None and whole > _LONGEST_UNASKED:
        name = config.model or config.preset
        raise TrainingError(f"a row would be the whole context of {name}, {whole} tokens; give context")
    corpus = tokenize_corpus(config.data, learner, out / "data", text_field=config.text_field, progress=progress)
    tokenizer = corpus.tokenizer
    _tell_unknown(corpus)
    device = choose_device(config.device)
    if base:
        model = load_whole(base, str(device))
    else:
        model = init_weights(LlamaForCausalLM(resolve_model(config, tokenizer)).to(device), config.seed)
    train, validation = _rows(corpus, config, config.context or whole)
    config = with_steps(config, train)
    save, restore = train_all(model, tokenizer, base.generation_config if base else {}, process_group)
    newest = None if config.optimizer and config.learning_rate else latest_checkpoint(out)
    before = load_resume(newest)[1].get("settings") if newest else None
    before = before if isinstance(before, dict) else {}  # `restore_run` raises for malformed settings
    config, reason = with_optimizer(config, model.config, process_group, before)
    return Setup(
        config, model, tokenizer, train, validation, save, restore, optimizer_reason=reason, process_group=process_group
    )


def _rows(corpus: Corpus, config: PretrainConfig, context: int) -> tuple[Rows, Rows | None]:
    """Return the training rows, and the validation rows: the last share of each source."""
    weights = config.data if isinstance(config.data, Mapping) else None
    parts, share = corpus.by_source(weights) if weights else [corpus], config.validation
    halves = [part.split(share, at_least=context + 1) if share > 0 else (part, part) for part in parts]

    def rows(half: int, seed: int | None) -> Rows:
        packed = [PackedRows(pair[half], context, seed) for pair in halves]
        return MixedRows(packed, weights, seed) if weights else packed[0]

    return rows(0, config.seed), rows(1, None) if share > 0 else None


def _open(config: PretrainConfig) -> tuple[Checkpoint, Tokenizer]:
    if is_adapter(Path(config.model).expanduser()):
        name = escape(config.model)
        raise TrainingError(f"{name}: is a LoRA adapter; make a model of it (llamarium merge), and go on from that")
    path = resolve(config.model)
    checkpoint = open_checkpoint(path)
    return checkpoint, fitting_tokenizer(config.model, path, checkpoint, find_tokenizer(path), config.context)


def fitting_tokenizer(
    name: str, path: Path, checkpoint: Checkpoint, tokenizer: Tokenizer | None, context: int | None
) -> Tokenizer:
    """Return a model's tokenizer; TrainingError if it has none, or if rows are longer than the model's context."""
    if tokenizer is None:
        raise TrainingError(f"{name} has no tokenizer files; put a tokenizer.json beside the weights")
    fit_tokenizer(tokenizer, checkpoint.config, path)
    whole = checkpoint.config.max_position_embeddings
    if context is not None and context > whole:
        raise TrainingError(f"context is {context}, and the model's holds {whole} tokens")
    return tokenizer


def load_whole(checkpoint: Checkpoint, device: str) -> LlamaForCausalLM:
    """Load a model for full training, in float32; a warning lists the quantized types that are dequantized."""
    types = quantized_types(checkpoint)
    if types:
        warn_caller(
            f"{escape(checkpoint.path)}: weights of {', '.join(types)} are dequantized to float32, in which all are "
            "trained and saved"
        )
    # not joined: weights that are views cannot be sharded, or be in different optimizers
    options = LoadOptions(dtype="float32", device=device, dequantize="load" if types else "auto", join=False)
    return load_model(checkpoint, options)[0].requires_grad_(True)


SaveAndRestore = tuple[Callable[[Path], None], Callable[[Path], None]]
"""Functions that write the model into a folder, and load it from there."""


def train_all(
    model: LlamaForCausalLM, tokenizer: Tokenizer, recommended: Mapping[str, Any], process_group: ProcessGroup
) -> SaveAndRestore:
    """Return functions to save and restore a fully trained model; `recommended` is its `generation_config`."""

    def save(folder: Path) -> None:
        weights = process_group.weights(model)
        save_weights(weights, model.config, folder, tokenizer=tokenizer, generation_config=recommended)

    return save, lambda folder: restore_weights(model, folder, process_group)


def _tell_unknown(corpus: Corpus) -> None:
    """Warn if words of the data are missing in a word-level vocabulary."""
    backend = corpus.tokenizer.backend
    if isinstance(backend, WordBackend) and (share := float((corpus.ids == backend.unknown_id).double().mean())):
        warn_caller(
            f"{share:.1%} of the tokens of {corpus.name} are {UNKNOWN}: the vocabulary has "
            f"{corpus.tokenizer.vocab_size} tokens; a larger vocab_size knows more words"
        )


def resolve_model(config: PretrainConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the preset with the settings' changes and the tokenizer's vocabulary; TrainingError if they conflict.

    Unset values follow from the others: as many key-value heads as query heads, `head_dim` as the hidden size divided
    by the number of heads, and `intermediate_size` in the preset's ratio to the hidden size.
    """
    base = preset(config.preset)
    changes = {name: value for name in SHAPE if (value := getattr(config, name)) is not None}
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
            base, **changes, vocab_size=tokenizer.vocab_size, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_ids, pad_token_id=tokenizer.pad_token_id,
            max_position_embeddings=config.context or base.max_position_embeddings,
        )  # fmt: skip
    except ConfigError as error:
        raise TrainingError(f"the model's shape: {error}") from None


@torch.no_grad()
def restore_weights(model: LlamaForCausalLM, folder: Path, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
    """Load a saved model's weights in place; TrainingError if architecture or dtype differ."""
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
    if learn := {"bpe": train_bpe, "words": train_words}.get(config.tokenizer):
        return Learner(f"{config.tokenizer} {config.vocab_size}", partial(learn, vocab_size=config.vocab_size))
    return load_tokenizer(config.tokenizer)
