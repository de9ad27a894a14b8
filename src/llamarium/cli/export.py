"""Write a model in a format that others read.

  llamarium export -m runs/tiny/best --format gguf --out tiny.gguf
  llamarium export -m smollm2-135m --format hf --out smollm2
  llamarium export -m org/name --format gguf --type Q4_K_M --out small.gguf
  llamarium export -m model.gguf --format hf --type F16 --out folder

hf is a Hugging Face folder (transformers, vLLM, ...), gguf a single file
(llama.cpp, Ollama, ...). The tokenizer and the chat template go with the model.
"""

import argparse
from pathlib import Path

from llamarium.checkpoints.gguf.mixtures import BLOCKS, FLOATS
from llamarium.cli.flags import add_type
from llamarium.cli.options import UsageError, add_json, add_requantize, add_source
from llamarium.cli.output import emit, note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_source(parser)
    parser.add_argument("--format", required=True, choices=("hf", "gguf"), help="a Hugging Face folder, or a GGUF file")
    parser.add_argument("--out", required=True, metavar="PATH", help="the folder, or the file (its name ends in .gguf)")
    text = (
        f"what the matrices become: {', '.join(FLOATS)}; for gguf also {', '.join(BLOCKS)} (default: what they are; "
        "BF16 where they are quantized)"
    )
    add_type(parser, "--type", (*FLOATS, *BLOCKS), help=text)
    add_requantize(parser)
    text = "write the weights alone; from such a GGUF file llama.cpp computes, but writes no text"
    parser.add_argument("--no-tokenizer", action="store_true", help=text)
    parser.add_argument("--force", action="store_true", help="replace PATH")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write it."""
    if args.format == "hf" and args.type in BLOCKS:
        raise UsageError(f"--type {args.type} is for --format gguf; a Hugging Face folder takes {', '.join(FLOATS)}")
    out = Path(args.out)
    if args.format == "gguf" and out.suffix != ".gguf":
        raise UsageError("--out of a GGUF file ends in .gguf: readers go by the name")
    from llamarium.checkpoints.export import export

    export(
        args.model, out, format=args.format, type=args.type, requantize=args.requantize,
        with_tokenizer=not args.no_tokenizer, force=args.force,
    )  # fmt: skip
    size = sum(file.stat().st_size for file in out.iterdir()) if out.is_dir() else out.stat().st_size
    if args.json:
        emit({"path": str(out), "format": args.format, "bytes": size, "tokenizer": not args.no_tokenizer})
    else:
        note(f"wrote {out} ({size / 1e6:.1f} MB{', no tokenizer' if args.no_tokenizer else ''})")
    return 0
