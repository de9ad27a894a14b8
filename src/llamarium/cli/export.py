"""Write a model in a format that others read.

  llamarium export -m runs/tiny/best --format gguf --out tiny.gguf
  llamarium export -m smollm2-135m --format gguf --type Q8_0 --out smollm2.gguf
  llamarium export -m org/name --format gguf --type Q4_K_M --out small.gguf
  llamarium export -m model.gguf --format hf --type BF16 --out folder

hf is a Hugging Face folder (transformers, vLLM, ...), gguf a single file
(llama.cpp, Ollama, ...). The tokenizer and the chat template go with the model.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.checkpoints.gguf.mixtures import BLOCKS, FLOATS
from llamarium.cli.options import UsageError, add_json, add_source, add_type, importing_torch
from llamarium.cli.output import emit, note
from llamarium.errors import OptionError

if TYPE_CHECKING:
    import torch

    from llamarium.checkpoints.checkpoint import Checkpoint
    from llamarium.tokenizer.base import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_source(parser)
    parser.add_argument("--format", required=True, choices=("hf", "gguf"), help="a Hugging Face folder, or a GGUF file")
    parser.add_argument("--out", required=True, metavar="PATH", help="the folder, or the file (its name ends in .gguf)")
    add_type(
        parser,
        "--type",
        (*FLOATS, *BLOCKS),
        help=f"what the matrices become; {', '.join(BLOCKS)} for gguf only (default: what they are, if that is a "
        "floating point type)",
    )
    parser.add_argument(
        "--no-tokenizer",
        action="store_true",
        help="write the weights alone; from such a GGUF file llama.cpp computes, but writes no text",
    )
    parser.add_argument("--force", action="store_true", help="replace PATH")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write it."""
    if args.format == "hf" and args.type in BLOCKS:
        raise UsageError(f"--type {args.type} is for --format gguf; a Hugging Face folder takes {', '.join(FLOATS)}")
    out = Path(args.out)
    if args.format == "gguf" and out.suffix != ".gguf":
        raise UsageError("--out of a GGUF file ends in .gguf: readers go by the name")
    from llamarium.checkpoints.open import open_model

    opened = open_model(args.model, with_tokenizer=not args.no_tokenizer)
    checkpoint, tokenizer = opened.checkpoint, opened.optional_tokenizer
    if tokenizer is None and not args.no_tokenizer:
        raise OptionError(f"{opened.why_no_tokenizer}; --no-tokenizer exports the weights alone")
    if args.format == "hf":
        _export_hf(args, checkpoint, tokenizer, out)
    else:
        _export_gguf(args, checkpoint, tokenizer, out)
    size = sum(file.stat().st_size for file in out.iterdir()) if out.is_dir() else out.stat().st_size
    if args.json:
        emit({"path": str(out), "format": args.format, "bytes": size, "tokenizer": tokenizer is not None})
    else:
        note(f"wrote {out} ({size / 1e6:.1f} MB{'' if tokenizer is not None else ', no tokenizer'})")
    return 0


def _stored_dtype(args: argparse.Namespace, checkpoint: "Checkpoint") -> "torch.dtype | None":
    """Return what the weights are read as: None, as they are stored, or float32 where blocks are to be dequantized."""
    with importing_torch():
        import torch

        from llamarium.checkpoints.decode import FLOAT_DTYPES

    quantized = sorted({entry.dtype for entry in checkpoint.entries.values()} - FLOAT_DTYPES.keys())
    if args.type is None and quantized:
        raise OptionError(
            f"the model is quantized ({', '.join(quantized)}); say with --type what it becomes: BF16, say"
        )
    return torch.float32 if quantized else None


def _export_hf(args: argparse.Namespace, checkpoint: "Checkpoint", tokenizer: "Tokenizer | None", out: Path) -> None:
    from llamarium.checkpoints.decode import FLOAT_DTYPES
    from llamarium.checkpoints.save import checkpoint_weights, save_weights
    from llamarium.io import atomic_folder

    stored = _stored_dtype(args, checkpoint)
    weights = checkpoint_weights(checkpoint, stored if args.type is None else FLOAT_DTYPES[args.type])
    with atomic_folder(out, replace=args.force) as folder:
        save_weights(
            weights,
            checkpoint.config,
            folder,
            tokenizer=tokenizer,
            generation_config=checkpoint.generation_config,
        )


def _export_gguf(args: argparse.Namespace, checkpoint: "Checkpoint", tokenizer: "Tokenizer | None", out: Path) -> None:
    from llamarium.checkpoints.checkpoint import EMBEDDING
    from llamarium.checkpoints.gguf.export import export_gguf
    from llamarium.checkpoints.save import checkpoint_weights
    from llamarium.errors import OutputError, escape

    if out.is_dir() or (os.path.lexists(out) and not args.force):  # a link that leads nowhere is there too
        what = "is a folder; choose a file" if out.is_dir() else "is there already; --force replaces it"
        raise OutputError(f"{escape(out)}: {what}")
    weights = checkpoint_weights(checkpoint, _stored_dtype(args, checkpoint))
    type_name = args.type or checkpoint.entries[EMBEDDING].dtype
    export_gguf(out, weights, checkpoint.config, type_name=type_name, name=out.stem, tokenizer=tokenizer)
