"""List the activations of one forward pass: names, shapes and sizes.

From the embedding over each layer's queries, keys, attention pattern and MLP
to the logits. --json prints the numbers themselves, an object for each text;
restrict them first. Of a preset (-m llama-3.2-1b) there are names, shapes and
bytes, and no numbers: nothing is loaded.

  llamarium trace "The cat sat"
  llamarium trace "The cat sat" --layers 0,1 --names q,q_rot,pattern
  llamarium trace "The cat sat" --layers=-1 --positions=-1 --names resid --json
  llamarium trace "The cat sat" "The cat ran" --file story.txt --names logits
"""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.cli.options import (
    UsageError,
    add_json,
    add_model,
    add_repeatable,
    load_llama,
    names,
    positive_number,
    whole_numbers,
)
from llamarium.cli.output import emit, filled, note, ranges, show, size, table
from llamarium.cli.text import check_fits, read_file, read_standard_input
from llamarium.presets import PRESETS

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.numbers import Floats
    from llamarium.inspect.shapes import ActivationShape
    from llamarium.inspect.trace import Trace

_MANY = 40  # lines, which is more than a terminal shows at once
_TOKENIZERS = {128256: "llama3", 49152: "smollm2-135m"}  # of the presets, by the size of their vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="what to run; - reads it from standard input")
    parser.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="the same, as an option")
    add_repeatable(parser, ("--file", Path, "FILE", "a text from a file"))
    parser.add_argument("--names", type=names, metavar="A,B,…", help="these activations only")
    parser.add_argument("--layers", type=whole_numbers, metavar="N,N,…", help="these layers only; -1 is the last")
    text = "these tokens only; -1 is the last, 0 the first"
    parser.add_argument("--positions", type=whole_numbers, metavar="N,N,…", help=text)
    text = "refuse a larger trace (default: 1024)"
    parser.add_argument("--budget-mb", type=positive_number, default=1024.0, metavar="MB", help=text)
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Run each text and list what was recorded."""
    texts = _texts(args)
    if args.model in PRESETS and args.model not in _TOKENIZERS.values():
        for i, text in enumerate(texts):
            _list_shapes(args, text, first=i == 0)
        return 0
    llama = load_llama(args)
    for i, text in enumerate(texts):
        _trace(args, llama, text, first=i == 0)
    return 0


def _texts(args: argparse.Namespace) -> list[str]:
    sources = [*args.texts, *args.prompt]
    if sources.count("-") > 1:
        raise UsageError("standard input is given twice")
    texts = [read_standard_input() if text == "-" else text for text in sources]
    texts += [read_file(str(file)) for file in args.file]
    if not texts:
        raise UsageError("no TEXT; give it in quotation marks, or - to read it from standard input")
    return texts


def _trace(args: argparse.Namespace, llama: "Llama", text: str, *, first: bool) -> None:
    trace = llama.trace(
        check_fits(llama, text), names=args.names, layers=args.layers, positions=args.positions,
        budget_mb=args.budget_mb,
    )  # fmt: skip
    if args.json:
        emit(trace.to_dict())
        return
    tokens = [llama.tokenizer.token_text(token_id) for token_id in trace.token_ids]
    _head(tokens, trace.positions, first=first)
    show_trace(trace)
    fewer = [f"--{name}" for name in ("layers", "names") if getattr(args, name) is None]
    if fewer and len(trace.arrays) > _MANY:
        note(f"{len(trace.arrays)} activations; {' or '.join(fewer)} shows fewer")


def _head(tokens: list[str], positions: tuple[int, ...], *, first: bool) -> None:
    listed = " ".join(f"{position} {tokens[position]} |".replace(" ", "\0") for position in positions)  # one word each
    filled_text = filled(listed.removesuffix("\0|"), shutil.get_terminal_size().columns).replace("\0", " ")
    print(("" if first else "\n") + filled_text + "\n")


def _list_shapes(args: argparse.Namespace, text: str, *, first: bool) -> None:
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.inspect.shapes import parse_key, trace_shapes

    config = PRESETS[args.model]
    name = _TOKENIZERS.get(config.vocab_size)
    if args.adapter is not None or name is None:
        why = "an adapter needs weights" if args.adapter is not None else "no tokenizer of its vocabulary is built in"
        raise UsageError(f"{args.model} is a preset, a shape without weights, and {why}; name a model with -m")
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text)
    shapes = trace_shapes(config, len(ids), names=args.names, layers=args.layers, positions=args.positions)
    if args.json:
        emit({"token_ids": ids, "activations": {activation.key: activation.to_dict() for activation in shapes}})
        return
    _head([tokenizer.token_text(i) for i in ids], tuple(range(len(ids))), first=first)
    alike: dict[str, list[ActivationShape]] = {}  # of the same shape in all layers: one line
    for activation in shapes:
        alike.setdefault(parse_key(activation.key)[0], []).append(activation)
    result = table("name", "shape", "bytes", right=("bytes",))
    for name, group in alike.items():
        layers = ranges(layer for activation in group if (layer := parse_key(activation.key)[1]) is not None)
        shape = _named(group[0].axes, group[0].shape)
        result.add_row(
            f"layers.{layers}.{name}" if layers else name,
            shape,
            size(sum(activation.num_bytes for activation in group)),
        )
    result.add_row("in all", "", size(sum(activation.num_bytes for activation in shapes)))
    show(result)


def show_trace(trace: "Trace") -> None:
    """Print one line for each activation."""
    from llamarium.inspect.shapes import print_key
    from llamarium.runtime.taps import ACTIVATIONS

    result = table("name", "shape", "mean", "std", "largest", right=("mean", "std", "largest"))
    for key, values in trace.arrays.items():
        result.add_row(print_key(key), _named(ACTIVATIONS[key[0]].axes, values.shape), *_statistics(values))
    show(result)


def _named(axes: str, shape: tuple[int, ...]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True))


def _statistics(values: "Floats") -> list[str]:
    """Return mean, standard deviation and largest magnitude; scores are -inf where none may look, which is left out."""
    import numpy as np

    values = values[np.isfinite(values)]
    if values.size == 0:
        return ["-", "-", "-"]
    return [f"{number:.3g}" for number in (values.mean(), values.std(), abs(values).max())]
