"""Show how probable a text is to a model: each token's log-probability in the
light of those before it, their sum (the product of the chain), and perplexity.

  llamarium score "The cat sat on the mat"
  cat story.txt | llamarium score - --json
"""

import argparse

from llamarium.cli.options import add_json, add_model, load_llama
from llamarium.cli.output import emit_or_show
from llamarium.cli.text import add_text, check_fits, require_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "TEXT", "the text to score")
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Score the text and print its chain."""
    text = require_text(args, "TEXT")
    llama = load_llama(args)
    score = llama.score(check_fits(llama, text))
    from llamarium.cli.views import score_view

    return emit_or_show(args, score, score_view)
