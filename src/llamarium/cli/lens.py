"""Show what a model would say after each layer: the logit lens.

Every layer adds to one stream, which the head reads at the end. Here the same
norm and head read it after each layer, at the last token or at --positions.
The last layer's line is what the model says.

  llamarium lens "The capital of France is"
  llamarium lens "The capital of France is" --layers 0,10,20,-1 -k 5
  llamarium lens "The cat sat on the" --positions 1,2 --json
"""

import argparse
import shutil
from typing import TYPE_CHECKING

from llamarium.cli.options import add_json, add_model, load_llama, positive, whole_numbers
from llamarium.cli.output import emit, fit, percent, quote, show, table
from llamarium.cli.text import add_text, check_fits, require_text

if TYPE_CHECKING:
    from rich.table import Table

    from llamarium.inspect.lens import Lens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "what to run")
    parser.add_argument("-k", type=positive, default=3, metavar="K", help="candidates after each layer (default: 3)")
    parser.add_argument("--layers", type=whole_numbers, metavar="N,N,…", help="these layers only; -1 is the last")
    text = "at these tokens (default: the last)"
    parser.add_argument("--positions", type=whole_numbers, default=(-1,), metavar="N,N,…", help=text)
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Run the text and read every layer."""
    text = require_text(args, "TEXT")
    llama = load_llama(args)
    from llamarium.inspect.lens import lens

    check_fits(llama, text)
    trace = llama.trace(text, names=["resid"], layers=args.layers, positions=args.positions)
    reading = lens(llama.runner, trace, args.k, llama.tokenizer)
    if args.json:
        emit(reading.to_dict())
        return 0
    tokens = [llama.tokenizer.token_text(token_id) for token_id in reading.token_ids]
    for i, position in enumerate(reading.positions):
        print(f'{"" if i == 0 else chr(10)}after token {position}, "{tokens[position]}"\n')
        _show(reading, i)
    return 0


def _show(reading: "Lens", i: int) -> None:
    """Print candidates by their ranks, in as few tables as the width allows."""
    begin, count, width = 0, len(reading.layers[0].candidates[i]), shutil.get_terminal_size().columns
    while begin < count:
        ends = (n for n in range(count, begin + 1, -1) if fit(_view(reading, i, begin, n), width) <= width)
        end = next(ends, begin + 1)
        print("\n" * (begin > 0), end="")
        show(_view(reading, i, begin, end))
        begin = end


def _view(reading: "Lens", i: int, begin: int, end: int) -> "Table":
    columns = [name for rank in range(begin + 1, end + 1) for name in (f"#{rank}", f"P{rank}")]
    result = table("layer", *columns, right=("layer", *columns[1::2]))
    for layer in reading.layers:
        cells = [cell for c in layer.candidates[i][begin:end] for cell in (quote(c.text), percent(c.probability))]
        result.add_row(str(layer.layer), *cells)
    return result
