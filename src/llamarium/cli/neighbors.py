"""Rank the rows of the embedding table that point the way a word's row does.

Rows can be added and taken away, as they stand in the table: what is to king
as woman is to man? The sum of rows is compared with every row by the cosine
of their angle; 1 is the same direction, 0 a right angle. --with compares two
words alone.

  llamarium neighbors king
  llamarium neighbors king --minus man --plus woman
  llamarium neighbors king --with queen
"""

import argparse

from llamarium.cli.options import UsageError, add_json, add_model, load_llama, positive
from llamarium.cli.output import emit_or_show, quote

_DEFAULT_K = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("word", metavar="WORD", help="a word that is one token, with or without a space before it")
    parser.add_argument("--minus", action="append", default=[], metavar="WORD", help="take away its row (repeatable)")
    parser.add_argument("--plus", action="append", default=[], metavar="WORD", help="add its row (repeatable)")
    parser.add_argument("-k", type=positive, metavar="K", help=f"how many (default: {_DEFAULT_K})")
    parser.add_argument("--with", dest="other", metavar="WORD", help="compare the two words' rows, and rank nothing")
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Rank them and print."""
    if args.other is not None:
        return _compare(args)
    ranked = load_llama(args).neighbors(args.word, minus=args.minus, plus=args.plus, k=args.k or _DEFAULT_K)
    from llamarium.cli.views import neighbors_view

    return emit_or_show(args, ranked, neighbors_view)


def _compare(args: argparse.Namespace) -> int:
    if args.minus or args.plus or args.k is not None:
        raise UsageError("argument --with: compares two words alone; leave out --minus, --plus and -k")
    llama = load_llama(args)
    from llamarium.inspect.neighbors import similarity

    compared = similarity(llama.runner, llama.tokenizer, args.word, args.other)
    words = " and ".join(f"{quote(word.text)} ({word.token_id})" for word in (compared.word, compared.other))
    return emit_or_show(args, compared, lambda compared: f"{words}: cosine {compared.cosine:.4f}")
