"""Rank the rows of the embedding table that point the way a word's row does.

Rows can be added and taken away: what is to king as woman is to man?

  llamarium neighbors king
  llamarium neighbors king --minus man --plus woman
"""

import argparse

from llamarium.cli.options import add_json, add_model, load_llama
from llamarium.cli.output import emit, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("word", metavar="WORD", help="a word that is one token, with or without a space before it")
    parser.add_argument("--minus", action="append", default=[], metavar="WORD", help="take away its row (repeatable)")
    parser.add_argument("--plus", action="append", default=[], metavar="WORD", help="add its row (repeatable)")
    parser.add_argument("-k", type=int, default=10, metavar="K", help="how many (default: %(default)s)")
    add_json(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Rank them and print."""
    found = load_llama(args).neighbors(args.word, minus=args.minus, plus=args.plus, k=args.k)
    if args.json:
        emit(found.to_dict())
        return 0
    from llamarium.inspect.views import neighbors_view

    show(neighbors_view(found))
    return 0
