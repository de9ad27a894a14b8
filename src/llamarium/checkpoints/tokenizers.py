"""Finding and loading a model's tokenizer, for `llamarium tokenize` and `load_tokenizer`. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamarium.checkpoints.gguf.split import read_gguf_metadata
from llamarium.collector import collector_paused
from llamarium.config import ModelConfig
from llamarium.errors import CheckpointError, TokenizerError
from llamarium.file_names import CONFIG, VOCABULARIES
from llamarium.hub.folders import is_learner_folder
from llamarium.hub.gguf_names import gguf_models
from llamarium.hub.resolve import resolve
from llamarium.tokenizer.base import Tokenizer


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer without a model.

    >>> llamarium.load_tokenizer("smollm2-135m").decode([19556, 28, 905, 17])
    'Hello, world!'

    Args:
        name: A built-in name ("llama3", "smollm2-135m"), a folder, a `tokenizer.json`, a `tokenizer.model`, a `.gguf`
            file (any part of a split one), or `org/name` on the Hugging Face Hub.

    Raises:
        TokenizerError: If the files cannot be read or do not exist.
        ModelNotFoundError: If the name does not exist.
    """
    path = resolve(name, kind="tokenizer")
    if is_learner_folder(path):
        from llamarium.checkpoints.learner_folder import model_of_course

        return load_tokenizer(model_of_course(path))
    tokenizer = find_tokenizer(path)
    if tokenizer is None:
        raise TokenizerError(f"{path}: no tokenizer; expected one of {', '.join(VOCABULARIES)}")
    return tokenizer


@collector_paused()
def find_tokenizer(path: Path, metadata: Mapping[str, Any] | None = None) -> Tokenizer | None:
    """Return the tokenizer of a folder or file; None if it has none.

    `metadata` is a GGUF file's metadata, if it has been read already.
    """
    if (gguf := _gguf_of(path)) is not None:
        path = gguf
        metadata = read_gguf_metadata(path) if metadata is None else metadata
        if metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):  # llama.cpp: a file without vocabulary
            return None
        from llamarium.tokenizer.backends.gguf import from_gguf_metadata

        return from_gguf_metadata(metadata, str(path))
    if path.is_dir() and not any((path / name).exists() for name in VOCABULARIES):
        return None
    from llamarium.tokenizer.load import load_tokenizer_file

    return load_tokenizer_file(path)


def fit_tokenizer(tokenizer: Tokenizer, config: ModelConfig, path: Path) -> None:
    """Check a tokenizer against its model, and let it accept the model's unused ids beyond its vocabulary."""
    check_tokenizer(tokenizer, config, path)
    tokenizer.allow_unused_ids(config.vocab_size)


def check_tokenizer(tokenizer: Tokenizer | None, config: ModelConfig, path: Path | str = "") -> None:
    """Check that a tokenizer's ids are within the model's vocabulary; CheckpointError if not.

    Control tokens may be beyond it (such as a padding token added for training), because no text is encoded to one.
    The exception is a BOS token that is added to every text.
    """
    if tokenizer is None or tokenizer.vocab_size <= config.vocab_size:
        return
    special = tokenizer.special
    harmless = set(special.ids.values()) - ({special.bos} if special.add_bos else set())
    if any(i not in harmless and tokenizer.has_token(i) for i in range(config.vocab_size, tokenizer.vocab_size)):
        raise CheckpointError(
            f"{path or tokenizer.source}: the tokenizer has {tokenizer.vocab_size} ids and the model "
            f"{config.vocab_size} rows; they do not belong together"
        )


def _gguf_of(path: Path) -> Path | None:
    """Return `path` if it is a GGUF file (by content), or the only GGUF file of a folder; else None.

    None for a folder that also has a config or other tokenizer files.
    """
    if path.is_dir():
        models = gguf_models(file.name for file in path.iterdir())
        alone = len(models) == 1 and not any((path / name).exists() for name in (*VOCABULARIES, CONFIG))
        return path / models[0] if alone else None
    if path.suffix in (".json", ".model") or not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(4) == b"GGUF" else None
