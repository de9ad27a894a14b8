"""List the activations of one forward pass: names, shapes and sizes.

From the embedding over each layer's queries, keys, attention pattern and MLP
to the logits. --json prints the numbers themselves; restrict them first.

  llamarium trace "The cat sat"
  llamarium trace "The cat sat" --layers 0,1 --names q,q_rot,pattern
  llamarium trace "The cat sat" --layers=-1 --positions=-1 --names resid --json
"""

import argparse
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, add_model, load_llama, names, whole_numbers
from llamarium.cli.output import emit, show
from llamarium.cli.text import add_text, require_text
from llamarium.inspect.tables import table

if TYPE_CHECKING:
    from torch import Tensor

    from llamarium.inspect.trace import Trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "what to run")
    parser.add_argument("--names", type=names, metavar="A,B,…", help="these activations only")
    parser.add_argument("--layers", type=whole_numbers, metavar="N,N,…", help="these layers only; -1 is the last")
    parser.add_argument(
        "--positions", type=whole_numbers, metavar="N,N,…", help="these tokens only; -1 is the last, 0 the first"
    )
    parser.add_argument(
        "--budget-mb", type=float, default=1024.0, metavar="MB", help="refuse a larger trace (default: %(default)s)"
    )
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Run the text and list what was recorded."""
    text = require_text(args, "TEXT")
    llama = load_llama(args)
    trace = llama.trace(text, names=args.names, layers=args.layers, positions=args.positions, budget_mb=args.budget_mb)
    if args.json:
        emit(trace.to_dict())
        return 0
    tokens = [llama.tokenizer.token_text(token_id) for token_id in trace.token_ids]
    print(" | ".join(f"{position} {tokens[position]}" for position in trace.positions) + "\n")
    show_trace(trace)
    return 0


def show_trace(trace: "Trace") -> None:
    """Print one line for each activation."""
    from llamarium.inspect.trace import ACTIVATIONS, split_key

    shown = table("name", "shape", "mean", "std", "largest", right=("mean", "std", "largest"))
    for key, tensor in trace.items():
        axes = ACTIVATIONS[split_key(key)[0]].axes
        shape = " ".join(f"{axis}={size}" for axis, size in zip(axes, tensor.shape, strict=True))
        shown.add_row(key, shape, *_statistics(tensor))
    show(shown)


def _statistics(tensor: "Tensor") -> list[str]:
    """Return mean, standard deviation and largest magnitude; scores are -inf where none may look, which is left out."""
    values = tensor.float()
    values = values[values.isfinite()]
    if values.numel() == 0:
        return ["-", "-", "-"]
    return [f"{number.item():.3g}" for number in (values.mean(), values.std(correction=0), values.abs().max())]
