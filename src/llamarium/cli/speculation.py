"""What guesses tokens ahead, as options that several commands share."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from llamarium.cli.options import Group
from llamarium.cli.output import share_done

if TYPE_CHECKING:
    from llamarium.api import Llama

SPECULATION = "prompt_lookup", "draft_model"
"""The options that `speculation` gives."""


def add_speculation(parser: Group) -> None:
    """Add what guesses tokens: `--prompt-lookup`, or `--draft-model`, which `load_draft` loads."""
    group = parser.add_mutually_exclusive_group()
    text = (
        "a smaller model with the same vocabulary guesses tokens, and the model checks several in one pass: the same "
        "text, sooner where the guesses are right; guessing rests where they are not"
    )
    group.add_argument("--draft-model", metavar="NAME", help=text)
    text = (
        "guess tokens from the text so far, and check several in one pass: the same text, sooner where it repeats the "
        "prompt or itself"
    )
    group.add_argument("--prompt-lookup", action="store_true", help=text)


def speculation(args: argparse.Namespace, llama: "Llama") -> dict[str, Any]:
    """Return what `add_speculation`'s options mean, by the API's names; the object counts what came of it."""
    if args.draft_model is not None:
        from llamarium.generation.options import drafting

        return {"draft_model": drafting(llama, load_draft(args))}
    if not args.prompt_lookup:
        return {}
    from llamarium.engine.proposers.lookup import PromptLookup

    return {"prompt_lookup": PromptLookup()}


def speculation_counts(options: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return what came of `speculation`, by its option's name."""
    return {name: options[name].counts() for name in SPECULATION if name in options}


def speculation_details(options: dict[str, Any]) -> list[str]:
    """Say what came of `speculation`, for a person."""
    return [
        f"{found['accepted']} of {found['drafted']} guesses right in {found['passes']} passes"
        for found in speculation_counts(options).values()
    ]


def load_draft(args: argparse.Namespace, report: Callable[[int, int], None] | None = None) -> "Llama":
    """Load the model that `--draft-model` names, as the model is computed, after `load_llama` and with its `report`."""
    from llamarium.api import load

    shown = share_done(f"loading {args.draft_model}") if report is None else nullcontext(report)
    with shown as progress:
        llama = load(args.draft_path, dtype=args.dtype, device=args.device, progress=progress)
    llama.name = args.draft_model
    return llama
