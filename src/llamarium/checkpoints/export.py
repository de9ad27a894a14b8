"""Export of a model on disk to an exchange format. Torch-free."""

import os
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from llamarium.checkpoints.checkpoint import Checkpoint
from llamarium.checkpoints.gguf.mixtures import BLOCKS, FLOATS
from llamarium.checkpoints.huggingface.writer import OutputTensor, cast_array, needs_dtype, save_weights
from llamarium.checkpoints.open import OpenedModel, open_model
from llamarium.checkpoints.options import REQUANTIZE, check_requantizing, quantized_types
from llamarium.checkpoints.values import read_array
from llamarium.config import EMBEDDING
from llamarium.errors import OptionError, OutputError, check_choice, escape, warn_caller
from llamarium.io import atomic_folder
from llamarium.keywords import shows_options
from llamarium.quant.formats import chosen_type
from llamarium.quant.packing import count_nonfinite


@shows_options()
def export(
    model: str | Path,
    out: str | Path,
    *,
    format: Literal["hf", "gguf"],
    type: str | None = None,
    requantize: bool = False,
    with_tokenizer: bool = True,
    force: bool = False,
) -> Path:
    """Write a model in an exchange format, with its tokenizer and chat template.

    >>> llamarium.export("shakespeare-char", "plain", format="hf").name
    'plain'

    Args:
        model: As for `load`: a name, a folder or a file.
        out: Folder for "hf", or file with a name that ends in .gguf for "gguf".
        format: "hf", a Hugging Face folder (transformers, vLLM), or "gguf", a single file (llama.cpp, Ollama).
        type: Type of the matrices, in upper or lower case; block types such as "Q8_0" only for "gguf". None keeps
            their type, and writes BF16 for quantized ones.
        requantize: Allow a block type for a model that is already quantized; the errors add up.
        with_tokenizer: False writes only the weights; llama.cpp can run such a GGUF file, but not generate text.
        force: Replace an existing `out`.

    Returns:
        `out`.

    Raises:
        LlamariumError: If the model cannot be read, the options do not fit the model or each other, or `out` cannot
            be written.
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
    if type in BLOCKS:
        check_requantizing(opened.checkpoint, None if requantize else REQUANTIZE)
    write = _export_hf if format == "hf" else _export_gguf
    write(opened, out, type, force)
    return out


def checkpoint_weights(checkpoint: Checkpoint, dtype: str | None = None) -> list[OutputTensor]:
    """Return the weights of a checkpoint for writing; each is read when it is written, with a warning if not finite.

    `dtype` is "F32", "F16" or "BF16"; None keeps each weight's stored dtype, which is not possible for quantized
    weights.
    """
    weights: list[OutputTensor] = []
    for key, entry in checkpoint.entries.items():
        target = dtype or (entry.dtype if entry.dtype in FLOATS else None)
        if target is None:
            raise needs_dtype(f"{escape(checkpoint.path)}: {key}", entry.dtype)
        values = lambda key=key, target=target: cast_array(_read_finite(checkpoint, key), target, key)  # noqa: E731
        weights.append(OutputTensor(key, entry.shape, target, values))
    return weights


def _read_finite(checkpoint: Checkpoint, key: str) -> NDArray[Any]:
    values = read_array(checkpoint, key)
    if num_bad := count_nonfinite(values):
        warn_caller(f"{escape(checkpoint.path)}: {key} has {num_bad} weights that are NaN or infinite")
    return values


def _export_hf(opened: OpenedModel, out: Path, type: str | None, force: bool) -> None:
    checkpoint = opened.checkpoint
    weights = checkpoint_weights(checkpoint, type or ("BF16" if quantized_types(checkpoint) else None))
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

    if out.is_dir() or (os.path.lexists(out) and not force):  # lexists: a dangling link exists too
        problem = "is a folder; choose a file" if out.is_dir() else "is there already; --force replaces it"
        raise OutputError(f"{escape(out)}: {problem}")
    checkpoint = opened.checkpoint
    is_quantized = bool(quantized_types(checkpoint))
    weights = checkpoint_weights(checkpoint, "F32" if is_quantized else None)
    type_name = type or ("BF16" if is_quantized else checkpoint.entries[EMBEDDING].dtype)
    export_gguf(
        out, weights, checkpoint.config, type_name=type_name, name=out.stem, tokenizer=opened.optional_tokenizer
    )
