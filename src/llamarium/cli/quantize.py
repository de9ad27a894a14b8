"""Write a model in 4 or 8 bits, as a packed folder that a CPU runs from where it
lies: nothing is converted when it is loaded.

Without a text, scales are fitted to the weights. With one (--calibration: a few
hundred kB like what the model is for), its inputs are looked at, layer by layer,
and the error of the outputs is made small.

  llamarium quantize -m org/name --out model-q4
  llamarium quantize -m org/name --calibration texts.txt --out model-q4
  llamarium quantize -m org/name --type Q8_0 --out model-q8
  llamarium perplexity test.txt -m model-q4 --against org/name
"""

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.flags import add_type
from llamarium.cli.options import (
    UsageError,
    add_json,
    add_requantize,
    add_source,
    add_threads,
    importing_torch,
    positive,
)
from llamarium.cli.output import draws, emit, note, share_done, size, write_text
from llamarium.cli.text import read_file
from llamarium.cli.threads import set_threads
from llamarium.extras import need_torch
from llamarium.quant.formats import FORMATS

if TYPE_CHECKING:
    from llamarium.calibration.quantize import Quantized

_TYPES = ("Q4_0", "IQ4_NL", "Q4_1", "Q8_0")
_METHODS = ("nearest", "fit", "importance", "gptq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_source(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to make")
    bits = ", ".join(f"{name} {FORMATS[name].bits_per_weight:g}" for name in _TYPES)
    text = f"of the layers; bits per weight: {bits} (default: %(default)s)"
    add_type(parser, "--type", _TYPES, default="IQ4_NL", help=text)
    text = (
        "of the head and the embedding; auto is the smallest type that adds little to the model's KL divergence "
        "(default: auto with --calibration, else Q8_0)"
    )
    add_type(parser, "--head", ("auto", *_TYPES), help=text)
    text = (
        "how scales are found, each better and slower than the one before; the last two need --calibration "
        "(default: gptq with --calibration, else fit)"
    )
    parser.add_argument("--method", choices=_METHODS, help=text)
    parser.add_argument("--calibration", metavar="FILE", help="a text file in UTF-8; - is standard input")
    parser.add_argument("--samples", type=positive, metavar="N", help="windows of it that are used (default: 64)")
    parser.add_argument("--context", type=positive, metavar="N", help="tokens of a window (default: 512)")
    add_requantize(parser)
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    add_threads(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Quantize and say what was written."""
    sampled = {name: value for name in ("samples", "context") if (value := getattr(args, name)) is not None}
    if sampled and args.calibration is None:
        raise UsageError(f"--{next(iter(sampled))} is for --calibration, which is not given")
    if args.calibration is None and args.method in ("importance", "gptq"):
        raise UsageError(f"--method {args.method} looks at a text: give one with --calibration FILE")
    if args.calibration is None and args.head == "auto":
        raise UsageError("--head auto is measured on a text: give one with --calibration FILE, or choose a type")
    if args.calibration is not None:
        need_torch("--calibration")
    text = None if args.calibration is None else read_file(args.calibration)
    with share_done(f"quantizing {args.model}") as progress:
        with importing_torch():
            from llamarium.calibration.quantize import quantize

        set_threads(args.threads)
        quantized = quantize(
            args.model, args.out, type=args.type, head=args.head, method=args.method, calibration=text,
            requantize=args.requantize, force=args.force, progress=progress, layer_done=_layer_lines(), **sampled,
        )  # fmt: skip
    _say(quantized)
    if args.json:
        emit({**dataclasses.asdict(quantized), "path": str(quantized.path), "head_kl": _named(quantized)})
    else:
        write_text(f"{quantized.path}\n")
    return 0


def _layer_lines() -> Callable[[int, int], None] | None:
    """Return what writes a line for each layer, where no moving line can be drawn."""
    begin = time.monotonic()

    def report(done: int, total: int) -> None:
        note(f"quantized layer {done} of {total} after {time.monotonic() - begin:.0f} s")

    return None if draws(sys.stderr) else report


def _say(quantized: "Quantized") -> None:
    for name, kl in _named(quantized).items():
        note(f"KL from the original with a head in {name}: {kl:.5f} nats per token")
    path = shlex.quote(str(quantized.path))
    recipe = f"{quantized.type}, head {quantized.head}, method {quantized.method}"
    note(
        f"wrote {quantized.path}: {quantized.num_weights:,} weights in {quantized.bits_per_weight:.2f} bits each "
        f"({recipe}), {size(quantized.num_bytes)}\n"
        f'run it:     llamarium generate -m {path} "Once upon a time"\n'
        f"measure it: llamarium perplexity FILE -m {path} --against ORIGINAL"
    )


def _named(quantized: "Quantized") -> dict[str, float]:
    return {name or "its own type": kl for name, kl in quantized.head_kl.items()}
