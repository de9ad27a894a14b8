"""Which reader a path needs."""

from pathlib import Path

from llamarium.checkpoints.checkpoint import Checkpoint, list_some
from llamarium.checkpoints.gguf.reader import GGUFCheckpoint
from llamarium.checkpoints.huggingface.reader import INDEX, SINGLE, HuggingFaceCheckpoint
from llamarium.checkpoints.packed.folder import PackedCheckpoint, is_packed_folder
from llamarium.errors import CheckpointError, ModelNotFoundError, UnsupportedFormatError, escape


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model on disk and check it, without taking memory for its weights.

    | what lies there                                   | reader      |
    |---------------------------------------------------|-------------|
    | a file that begins with `GGUF`                    | GGUF        |
    | a folder with safetensors and `config.json`       | Hugging Face|
    | the same, where the config says `llamarium`       | packed      |
    | a folder with `consolidated.*.pth`                | Meta        |
    | a folder with one `.gguf` file                    | GGUF        |

    Raises:
        ModelNotFoundError: If nothing is there, or a folder holds no weights.
        ConfigError: For a config that is malformed or not supported.
        CheckpointError: For anything malformed, incomplete or contradictory.
        UnsupportedFormatError: For a format, version or architecture that is not read.
    """
    try:
        return _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {escape(error)}") from None
    except RecursionError:
        raise CheckpointError(f"{escape(path)}: something in it is nested too deeply") from None


def _open_file(path: Path) -> Checkpoint:
    folder = f"open its folder, {escape(path.parent)}, which has the config beside it"
    if path.suffix == ".safetensors" or path.name.endswith((".pth", ".index.json")):
        raise UnsupportedFormatError(f"{escape(path)}: one file of a model; {folder}")
    return GGUFCheckpoint(path)


def _open_folder(path: Path) -> Checkpoint:
    names = sorted(p.name for p in path.iterdir())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if SINGLE in names or INDEX in names:
        return PackedCheckpoint(path) if is_packed_folder(path) else HuggingFaceCheckpoint(path)
    if any(name.startswith("consolidated.") and name.endswith(".pth") for name in names):
        from llamarium.checkpoints.meta.reader import MetaCheckpoint  # its pickles are torch's to read

        return MetaCheckpoint(path)
    if len(ggufs) == 1:
        return GGUFCheckpoint(path / ggufs[0])
    if len(ggufs) > 1:
        raise ModelNotFoundError(f"{escape(path)}: holds {list_some(ggufs)}; name one of them")
    if "config.json" in names:
        if is_packed_folder(path):
            raise CheckpointError(f"{escape(path)}: model.safetensors is missing; copy the packed folder anew, whole")
        return HuggingFaceCheckpoint(path)  # whose error says what is missing
    shown = f"holds {list_some(names)}" if names else "is empty"
    raise ModelNotFoundError(
        f"{escape(path)}: {shown}; expected config.json with safetensors, consolidated.00.pth with params.json, or one "
        ".gguf file"
    )
