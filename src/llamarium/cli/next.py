"""Show the auto-regressive loop: the candidates for the next token with their
probabilities, one of them appended, and again.

The most probable one is appended. Where an option of sampling is given, one is
drawn as `generate` draws it; an arrow shows which. Probabilities are the
model's own, before temperature and the like.

  llamarium next "I love to drink" -k 10 --steps 3
  llamarium next "I love to drink" --steps 3 --temperature 1 --top-p 0.9 --seed 1
  llamarium next "The capital of France is" --json
"""

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llamarium.cli.options import add_json, add_kv_cache, add_model, add_values, load_llama, positive
from llamarium.cli.output import emit, show
from llamarium.cli.sampling import add_choosing, choosing
from llamarium.cli.text import add_text, check_fits, require_text

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.generation.completion import Alternative
    from llamarium.inspect.next_tokens import NextStep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "what to continue")
    add_values(
        parser,
        ("-k", positive, "K", 10, "candidates of each step (default: %(default)s)"),
        ("--steps", positive, "N", 1, "tokens to append (default: %(default)s)"),
    )
    add_json(parser)
    add_choosing(parser.add_argument_group("sampling"), "0, or where another option is given, the model's own")
    add_model(parser)
    add_kv_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Follow the loop and print each step."""
    text, options = require_text(args, "TEXT"), choosing(args)
    llama = load_llama(args)
    check_fits(llama, text)
    from llamarium.cli.views import after_view, step_view
    from llamarium.inspect.next_tokens import follow_next_tokens

    if options:
        steps = _drawn(llama, text, args, options)
    else:
        steps = follow_next_tokens(
            llama.runner, llama.tokenizer, text, k=args.k, steps=args.steps, stop_ids=llama.stop_ids,
            kv_cache_dtype=args.kv_cache_dtype,
        )  # fmt: skip
    last = None
    for last in steps:
        if args.json:
            emit(last.to_dict())
        else:
            show(step_view(last))
    if last is not None and not args.json:
        show(after_view(last))
    return 0


def _drawn(llama: "Llama", text: str, args: argparse.Namespace, options: dict[str, Any]) -> "Iterator[NextStep]":
    """Follow what `generate` would answer with these options, with the candidates of each step."""
    from llamarium.inspect.next_tokens import NextStep
    from llamarium.inspect.tokens import Candidate

    def candidate(alternative: "Alternative") -> Candidate:
        return Candidate(alternative.token_id, math.exp(alternative.logprob), alternative.logprob, alternative.token)

    ids = llama.encode(text)
    options |= {"max_tokens": args.steps, "logprobs": args.k, "kv_cache_dtype": args.kv_cache_dtype}
    for step, piece in enumerate(llama.stream(ids, **options), start=1):
        chosen = piece.logprobs[0]
        context = llama.tokenizer.decode(ids)
        yield NextStep(step, context, tuple(ids), tuple(map(candidate, chosen.top)), candidate(chosen))
        ids = [*ids, chosen.token_id]
