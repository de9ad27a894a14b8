"""From a model on disk to a format that others read. Torch is imported when weights are read."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llamarium.checkpoints.gguf.mixtures import BLOCKS, FLOATS
from llamarium.checkpoints.open import OpenedModel, open_model
from llamarium.config import EMBEDDING
from llamarium.errors import OptionError, OutputError, check_choice, escape
from llamarium.io import atomic_folder
from llamarium.quant.formats import chosen_type

if TYPE_CHECKING:
    import torch


def export(
    model: str | Path,
    out: str | Path,
    *,
    format: Literal["hf", "gguf"],
    type: str | None = None,
    with_tokenizer: bool = True,
    force: bool = False,
) -> Path:
    """Write a model in a format that others read, with its tokenizer and chat template.

    Args:
        model: As for `load`: a name, a folder, a file.
        out: The folder for "hf", the file for "gguf", whose name ends in .gguf.
        format: "hf", a Hugging Face folder (transformers, vLLM), or "gguf", a single file (llama.cpp, Ollama).
        type: What the matrices become, in capital letters or not; block types such as "Q8_0" for "gguf" only. None is
            what they are, if that is a floating point type.
        with_tokenizer: False writes the weights alone; from such a GGUF file llama.cpp computes, but writes no text.
        force: Replace what is at `out`.

    Returns:
        `out`.

    Raises:
        LlamariumError: If the model cannot be read, the options do not fit together or the model, or `out` cannot be
            written.
    """
    check_choice("format", format, ("hf", "gguf"))
    type = None if type is None else chosen_type("type", type, FLOATS if format == "hf" else (*FLOATS, *BLOCKS))
    out = Path(out)
    if format == "gguf" and out.suffix != ".gguf":
        raise OptionError(f"out is {escape(out)}; expected a name that ends in .gguf: readers go by it")
    opened = open_model(model, with_tokenizer=with_tokenizer)
    if opened.optional_tokenizer is None and with_tokenizer:
        raise OptionError(
            f"{opened.why_no_tokenizer}; --no-tokenizer (in Python: with_tokenizer=False) exports the weights alone"
        )
    write = _export_hf if format == "hf" else _export_gguf
    write(opened, out, type, force)
    return out


def _stored_dtype(opened: OpenedModel, type: str | None) -> "torch.dtype | None":
    """Return what the weights are read as: None, as they are stored, or float32 where blocks are to be dequantized."""
    import torch

    quantized = sorted({entry.dtype for entry in opened.checkpoint.entries.values()} - set(FLOATS))
    if type is None and quantized:
        raise OptionError(
            f"the model is quantized ({', '.join(quantized)}); say with --type (in Python: type=) what it becomes: "
            "BF16, say"
        )
    return torch.float32 if quantized else None


def _export_hf(opened: OpenedModel, out: Path, type: str | None, force: bool) -> None:
    from llamarium.checkpoints.decode import FLOAT_DTYPES
    from llamarium.checkpoints.save import checkpoint_weights, save_weights

    checkpoint = opened.checkpoint
    stored = _stored_dtype(opened, type)
    weights = checkpoint_weights(checkpoint, stored if type is None else FLOAT_DTYPES[type])
    with atomic_folder(out, replace=force) as folder:
        save_weights(
            weights,
            checkpoint.config,
            folder,
            tokenizer=opened.optional_tokenizer,
            generation_config=checkpoint.generation_config,
        )


def _export_gguf(opened: OpenedModel, out: Path, type: str | None, force: bool) -> None:
    from llamarium.checkpoints.gguf.export import export_gguf
    from llamarium.checkpoints.save import checkpoint_weights

    if out.is_dir() or (os.path.lexists(out) and not force):  # a link that leads nowhere is there too
        what = "is a folder; choose a file" if out.is_dir() else "is there already; --force replaces it"
        raise OutputError(f"{escape(out)}: {what}")
    checkpoint = opened.checkpoint
    weights = checkpoint_weights(checkpoint, _stored_dtype(opened, type))
    type_name = type or checkpoint.entries[EMBEDDING].dtype
    export_gguf(
        out, weights, checkpoint.config, type_name=type_name, name=out.stem, tokenizer=opened.optional_tokenizer
    )
