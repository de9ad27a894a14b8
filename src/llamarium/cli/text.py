"""Text arguments of commands: positional, after `-p`, from standard input or a file."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import UsageError
from llamarium.errors import InputError, escape

if TYPE_CHECKING:
    from llamarium.api import Llama

_MAX_BYTES = 2**28


def add_text(parser: argparse.ArgumentParser, name: str, subject: str) -> None:
    """Add a text option, positional or with `-p`; `read_text` reads it."""
    parser.add_argument("text", nargs="?", metavar=name, help=f"{subject}; - reads it from standard input")
    parser.add_argument("-p", "--prompt", metavar=name, help="the same, as an option")


def read_text(args: argparse.Namespace) -> str | None:
    """Return the text that was given, or None.

    Of standard input one newline at the end is left out: `echo` adds it, and to a model it means something.
    """
    if args.text is not None and args.prompt is not None:
        raise UsageError("the text is given twice, by itself and with -p/--prompt")
    text: str | None = args.prompt if args.text is None else args.text
    return read_standard_input() if text == "-" else text


def read_standard_input() -> str:
    """Read standard input, without the newline that `echo` adds."""
    data = sys.stdin.buffer.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise InputError(f"standard input has more than {_MAX_BYTES:,} bytes; no model's context holds such a text")
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"standard input is no UTF-8 text: byte {error.start} is 0x{byte:02x}") from None


def read_file(name: str) -> str:
    """Read a file without converting line endings."""
    source = "standard input" if name == "-" else escape(name)
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source}: no UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}; expected a text file "
            "in UTF-8 (`iconv -t UTF-8` converts others)"
        ) from None
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror}; expected a text file") from None
    if not text:
        raise InputError(f"{source}: empty; expected text")
    return text


def require_text(args: argparse.Namespace, name: str) -> str:
    """Return the text that was given."""
    text = read_text(args)
    if text is None:
        raise UsageError(f"no {name}; give it in quotation marks, or - to read it from standard input")
    return text


def check_fits(llama: "Llama", text: str) -> str:
    """Return a text, unless it is so long that it would only be refused when much work is done."""
    llama.tokenizer.check_length(text, llama.config.max_position_embeddings)
    return text
