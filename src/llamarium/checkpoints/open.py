"""Opening a model: choice of the checkpoint reader for a path, and of the tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamarium.checkpoints.checkpoint import Checkpoint, list_some
from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.checkpoints.huggingface.reader import WEIGHT_FILES, HuggingFaceCheckpoint
from llamarium.checkpoints.learner_folder import LearnerCheckpoint, model_of_course
from llamarium.checkpoints.packed.folder import PackedCheckpoint, is_packed_folder
from llamarium.checkpoints.tokenizers import find_tokenizer, fit_tokenizer
from llamarium.config import ModelConfig
from llamarium.errors import (
    CheckpointError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedFormatError,
    escape,
    warn_caller,
)
from llamarium.file_names import CONFIG, META_SHARDS
from llamarium.hub.builtin import recommended
from llamarium.hub.folders import is_learner_folder
from llamarium.hub.gguf_names import gguf_models
from llamarium.hub.resolve import resolve
from llamarium.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A validated model on disk with its tokenizer and recommended sampling parameters; weights are not read yet.

    Attributes:
        name: Name that the model was opened by.
        path: File or folder of the model.
        checkpoint: The opened checkpoint.
        generation_config: The publisher's recommended sampling parameters; empty if there are none.
        optional_tokenizer: Its tokenizer, with ids for all rows of the vocabulary; None if there is none, or its kind
            is not supported.
        why_no_tokenizer: Reason why there is no tokenizer, for messages.
    """

    name: str
    path: Path
    checkpoint: Checkpoint
    generation_config: Mapping[str, Any]
    optional_tokenizer: Tokenizer | None
    why_no_tokenizer: str = ""

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's config."""
        return self.checkpoint.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; TokenizerError if there is none, or its kind is not supported."""
        if self.optional_tokenizer is None:
            raise TokenizerError(self.why_no_tokenizer)
        return self.optional_tokenizer


def open_model(name: str | Path, *, with_tokenizer: bool = True) -> OpenedModel:
    """Find a model, downloading it if needed, and open it with its tokenizer.

    Args:
        name: A built-in name, a folder (Hugging Face, Meta, `llamarium build`), a `.gguf` file, or `org/name` on
            the Hugging Face Hub.
        with_tokenizer: Read its tokenizer too.

    Raises:
        LlamariumError: If the model does not exist or is not valid; see `open_checkpoint`.
    """
    path = resolve(name)
    if is_learner_folder(path):
        opened = _open_learner(str(name), path)
    else:
        checkpoint = open_checkpoint(path)
        generation_config = checkpoint.generation_config or recommended(path)
        why_none = "it was opened without its tokenizer"
        opened = OpenedModel(str(name), path, checkpoint, generation_config, None, why_none)
    return read_tokenizer(opened) if with_tokenizer else opened


def read_tokenizer(opened: OpenedModel) -> OpenedModel:
    """Add the tokenizer to a model that was opened without it; raises as `open_model`."""
    name, path, checkpoint = opened.name, opened.path, opened.checkpoint
    if isinstance(checkpoint, LearnerCheckpoint):
        name, path, checkpoint = checkpoint.model, resolve(checkpoint.model), checkpoint.base
    tokenizer, why_none = _find_tokenizer(name, path, checkpoint)
    return replace(opened, optional_tokenizer=tokenizer, why_no_tokenizer=why_none)


def _open_learner(name: str, path: Path) -> OpenedModel:
    """Open a `llamarium build` folder together with the model whose weights and tokenizer it uses."""
    model = model_of_course(path)
    if is_learner_folder(resolve(model)):
        raise CheckpointError(f"{escape(path)}: its course names {escape(model)}, which has no weights of its own")
    base = open_model(model, with_tokenizer=False)
    return replace(base, name=name, path=path, checkpoint=LearnerCheckpoint(path, model, base.checkpoint))


def _find_tokenizer(name: str | Path, path: Path, checkpoint: Checkpoint) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer, or None and the reason: a model without a tokenizer still computes logits."""
    try:
        tokenizer = find_tokenizer(path, checkpoint.metadata if isinstance(checkpoint, GGUFCheckpoint) else None)
    except TokenizerError as error:
        warn_caller(f"the model has no text, only token ids: {error}")
        return None, str(error)
    if tokenizer is None:
        is_gguf = isinstance(checkpoint, GGUFCheckpoint)  # whose vocabulary is in the file itself
        advice = "convert the model again with its vocabulary" if is_gguf else "put tokenizer.json beside the weights"
        return None, (
            f"{escape(name)} has no tokenizer files, so it takes and returns token ids only; {advice}, or call "
            "llama.model(ids)"
        )
    fit_tokenizer(tokenizer, checkpoint.config, path)
    return tokenizer, ""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open and validate a model on disk, without allocating memory for its weights.

    | path                                                         | reader       |
    |--------------------------------------------------------------|--------------|
    | a file that begins with `GGUF`, or one part of a split one   | GGUF         |
    | a folder with safetensors or `pytorch_model*.bin`            | Hugging Face |
    | such a folder, written by `llamarium` with packed weights    | packed       |
    | a folder with `consolidated.*.pth`                           | Meta         |
    | a folder with one `.gguf` file, or the parts of a split one  | GGUF         |

    Raises:
        ModelNotFoundError: If the path does not exist, or a folder holds no weights.
        ConfigError: For a config that is malformed or not supported.
        CheckpointError: For a checkpoint that is malformed, incomplete or contradictory.
        UnsupportedFormatError: For a format, version or architecture that is not supported.
    """
    try:
        return _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {escape(error)}") from None
    except RecursionError:
        raise CheckpointError(f"{escape(path)}: something in it is nested too deeply") from None


def _open_file(path: Path) -> Checkpoint:
    folder = f"open its folder, {escape(path.parent)}, which has the config beside it"
    if path.suffix == ".safetensors" or path.name.endswith((".pth", ".bin", ".index.json")):
        raise UnsupportedFormatError(f"{escape(path)}: one file of a model; {folder}")
    return GGUFCheckpoint(path)


def _open_folder(path: Path) -> Checkpoint:
    names = sorted(p.name for p in path.iterdir())
    ggufs = gguf_models(names)
    if any(name in names for name in WEIGHT_FILES):
        return PackedCheckpoint(path) if is_packed_folder(path) else HuggingFaceCheckpoint(path)
    if any(path.glob(META_SHARDS)):
        from llamarium.checkpoints.meta.reader import MetaCheckpoint

        return MetaCheckpoint(path)
    if len(ggufs) == 1:
        return GGUFCheckpoint(path / ggufs[0])
    if len(ggufs) > 1:
        raise ModelNotFoundError(f"{escape(path)}: holds {list_some(ggufs)}; name one of them")
    if CONFIG in names:
        if is_packed_folder(path):
            raise CheckpointError(f"{escape(path)}: model.safetensors is missing; copy the packed folder anew, whole")
        return HuggingFaceCheckpoint(path)  # whose error says what is missing
    if is_learner_folder(path):
        raise ModelNotFoundError(
            f"{escape(path)}: holds functions of `llamarium build`, and no weights; name the model in its course.json"
        )
    contents = f"found {list_some(names)}" if names else "it is empty"
    raise ModelNotFoundError(
        f"{escape(path)}: no model; expected config.json with safetensors or pytorch_model.bin, consolidated.00.pth "
        f"with params.json, or one .gguf file; {contents}"
    )
