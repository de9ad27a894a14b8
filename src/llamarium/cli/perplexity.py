"""Measure how well a model predicts a text file of any length.

The file is read in windows of --context tokens, each beginning --stride tokens
after the one before, so that every token is scored once, with at least
context - stride tokens before it. Compare perplexities of the same context,
stride and tokenizer only; bits per byte compare across tokenizers.

  llamarium perplexity story.txt
  llamarium perplexity story.txt -m runs/pretrain/best --context 256
  cat story.txt | llamarium perplexity - --json
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, add_model, load_llama, positive
from llamarium.cli.output import emit, percent, show
from llamarium.errors import InputError, escape
from llamarium.inspect.tables import size, table

if TYPE_CHECKING:
    from rich.table import Table

    from llamarium.inspect.perplexity import Perplexity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", metavar="FILE", help="a text file in UTF-8; - is standard input")
    parser.add_argument(
        "--context", type=positive, metavar="N", help="tokens of a window (default: 2048, or what the model can hold)"
    )
    parser.add_argument(
        "--stride", type=positive, metavar="N", help="tokens between windows (default: half of a window)"
    )
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the file and print what was found."""
    text = _read(args.file)
    llama = load_llama(args)
    with percent("reading the text") as progress:
        found = llama.perplexity(text, context=args.context, stride=args.stride, progress=progress)
    if args.json:
        emit({"file": args.file, "model": args.model, **found.to_dict()})
    else:
        show(_view(found))
    return 0


def _read(name: str) -> str:
    """Read a file as it is, line ends and all.

    Raises:
        InputError: If it cannot be read, is empty, or is no UTF-8.
    """
    shown = "standard input" if name == "-" else escape(name)
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown}: no UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}; expected a text file in "
            "UTF-8 (`iconv -t UTF-8` converts others)"
        ) from None
    except OSError as error:
        raise InputError(f"{shown}: cannot be read: {error.strerror}; expected a text file") from None
    if not text:
        raise InputError(f"{shown}: empty; expected text")
    return text


def _view(found: "Perplexity") -> "Table":
    """Show the numbers, and what they were measured with."""
    shown = table("", "")
    shown.show_header = False
    begins = "after BOS, which is not scored" if found.bos else "without BOS, so all but the first"
    shown.add_row("perplexity, e^(nats / token)", f"{found.perplexity:,.4f}")
    shown.add_row("bits per byte", f"{found.bits_per_byte:.4f}")
    shown.add_row("nats per token", f"{found.nats / found.num_tokens:.4f}")
    shown.add_row("tokens scored", f"{found.num_tokens:,} ({begins})")
    shown.add_row("text", size(found.num_bytes))
    shown.add_row("windows", f"{found.num_windows:,} of {found.context:,} tokens, one every {found.stride:,}")
    return shown
