"""Show the auto-regressive loop: the candidates for the next token with their
probabilities, the best one appended, and again.

  llamarium next "I love to drink" -k 10 --steps 3
  llamarium next "The capital of France is" --json
"""

import argparse

from llamarium.cli.options import add_json, add_kv_cache, add_model, load_llama
from llamarium.cli.output import emit, show
from llamarium.cli.text import add_text, require_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "what to continue")
    parser.add_argument("-k", type=int, default=10, metavar="K", help="candidates of each step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="tokens to append (default: %(default)s)")
    add_json(parser)
    add_model(parser)
    add_kv_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Follow the loop and print each step."""
    text = require_text(args, "TEXT")
    llama = load_llama(args)
    from llamarium.inspect.next_tokens import follow_next_tokens
    from llamarium.inspect.views import after_view, step_view

    last = None
    for last in follow_next_tokens(
        llama.model,
        llama.tokenizer,
        text,
        k=args.k,
        steps=args.steps,
        stop_ids=llama.stop_ids,
        kv_cache_dtype=llama.kv_cache_dtype,
    ):
        if args.json:
            emit(last.to_dict())
        else:
            show(step_view(last))
    if last is not None and not args.json:
        show(after_view(last))
    return 0
