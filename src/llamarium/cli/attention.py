"""Show one head's attention pattern: how much each token looks at those before it.

A line is a token that looks, a column one that is looked at, a number the
share of its look in percent; a line adds up to 100. Where the text is too long
for that, each line names the -k tokens that get most.

  llamarium attention "The cat sat on the mat" --layer 3 --head 2
  llamarium attention "The cat sat on the mat" --layer=-1 --head 0 --json
"""

import argparse
from typing import TYPE_CHECKING

from llamarium.cli.options import UsageError, add_json, add_model, load_llama, positive
from llamarium.cli.output import emit, percent, quote, show, table
from llamarium.cli.text import add_text, check_fits, require_text

if TYPE_CHECKING:
    from rich.table import Table

_MOST_COLUMNS = 11  # tokens whose pattern fits 80 columns
_TOKEN_WIDTH = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "what to run")
    parser.add_argument("--layer", type=int, default=0, metavar="N", help="-1 is the last (default: %(default)s)")
    parser.add_argument("--head", type=int, default=0, metavar="N", help="of the queries (default: %(default)s)")
    text = "tokens that a long text's lines name (default: %(default)s)"
    parser.add_argument("-k", type=positive, default=3, metavar="K", help=text)
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Run the text and print the pattern."""
    text = require_text(args, "TEXT")
    llama = load_llama(args)
    num_heads, num_layers = llama.config.num_attention_heads, llama.config.num_hidden_layers
    for flag, index, size in (("layer", args.layer, num_layers), ("head", args.head, num_heads)):
        if not -size <= index < size:
            raise UsageError(f"argument --{flag}: {index} is not within {-size}..{size - 1}")
    trace = llama.trace(check_fits(llama, text), names=["pattern"], layers=[args.layer])
    layer, head = args.layer % num_layers, args.head % num_heads
    pattern: list[list[float]] = trace.arrays["pattern", layer][head].tolist()
    if args.json:
        emit({"token_ids": list(trace.token_ids), "layer": layer, "head": head, "pattern": pattern})
        return 0
    tokens = [llama.tokenizer.token_text(token_id) for token_id in trace.token_ids]
    print(f"layer {layer} of {num_layers}, head {head} of {num_heads}; percent of each line's look\n")
    show(_matrix(tokens, pattern) if len(tokens) <= _MOST_COLUMNS else _most(tokens, pattern, args.k))
    return 0


def _matrix(tokens: list[str], pattern: list[list[float]]) -> "Table":
    columns = [str(i) for i in range(len(tokens))]
    result = table("#", "token", *columns, right=("#", *columns))
    for i, row in enumerate(pattern):
        shares = [f"{100 * share:.0f}" if j <= i else "" for j, share in enumerate(row)]
        result.add_row(str(i), quote(_short(tokens[i])), *shares)
    return result


def _most(tokens: list[str], pattern: list[list[float]], k: int) -> "Table":
    result = table("#", "token", "looks at", right=("#",))
    for i, row in enumerate(pattern):
        best = sorted(range(i + 1), key=lambda j: -row[j])[:k]
        cells = ", ".join(f"{j} {quote(_short(tokens[j]))} {percent(row[j])}" for j in best)
        result.add_row(str(i), quote(_short(tokens[i])), cells)
    return result


def _short(token: str) -> str:
    return token if len(token) <= _TOKEN_WIDTH else token[: _TOKEN_WIDTH - 1] + "…"
