"""How tokens are chosen, as options that several commands share, and what is made of them."""

import argparse
from typing import Any

from llamarium.cli.options import UsageError
from llamarium.sampling.params import parameters_of


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """Add what decides how tokens are chosen and when an answer ends; help names the default of `--max-tokens`."""
    group = parser.add_argument_group(
        "sampling (what is left out is what the model's generation_config.json says, else the default named here)"
    )
    group.add_argument(
        "-n", "--max-tokens", type=int, metavar="N", help=f"tokens of an answer at most (default: {max_tokens:,})"
    )
    add_choosing(group)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--stop-id", type=int, action="append", metavar="ID", help="end at this token (repeatable)")


def add_choosing(group: "argparse._ActionsContainer", temperature: str = "1") -> None:  # pyright: ignore[reportPrivateUsage]
    """Add what decides which token is chosen; help names the default `temperature`."""
    for one in parameters_of("cli"):
        flag, text = f"--{one.name.replace('_', '-')}", one.help.format(temperature=temperature)
        group.add_argument(flag, type=one.kind, metavar=one.metavar, help=text)
    group.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=BIAS", help="added to a token's logit (repeatable)"
    )


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = choosing(args)
    if args.max_tokens is not None:
        given["max_new_tokens"] = args.max_tokens
    if args.stop is not None:
        given["stop"] = tuple(args.stop)
    if args.stop_id is not None:
        given["stop_token_ids"] = tuple(args.stop_id)
    return given


def choosing(args: argparse.Namespace) -> dict[str, Any]:
    given = {one.name: value for one in parameters_of("cli") if (value := getattr(args, one.name)) is not None}
    if args.logit_bias is not None:
        given["logit_bias"] = dict(args.logit_bias)
        if len(given["logit_bias"]) < len(args.logit_bias):
            raise UsageError("argument --logit-bias: the same token is given twice")
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, equals, bias = text.partition("=")
    try:
        return int(token_id), float(bias if equals else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ID=BIAS, as in 50256=-100, found {text!r}") from None
