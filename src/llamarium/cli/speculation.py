"""Options for speculative decoding, shared by several commands."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.cli.disk_cache import size
from llamarium.cli.errors import UsageError
from llamarium.cli.flags import Group, add_flags
from llamarium.cli.output import share_done
from llamarium.errors import InputError, counted, escape
from llamarium.options.serving import DraftOptions

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.engine.proposers.lookup import PromptLookup

SPECULATION = "prompt_lookup", "draft_model"
"""The options that `speculation` gives."""

MAX_CORPUS_BYTES = 64 * 2**20
"""Of the file of `--ngram-corpus`; its tokens take some three times the memory."""


def add_speculation(parser: Group) -> None:
    """Add the options of drafts: `prompt_lookup` and `load_draft` read them."""
    add_flags(parser.add_mutually_exclusive_group(), DraftOptions, "draft_model", "prompt_lookup")
    add_flags(parser, DraftOptions, "ngram_pool", parsers={"ngram_pool": _size_or_none})
    text = "a UTF-8 text to draft from, for all requests (default: none)"
    parser.add_argument("--ngram-corpus", type=Path, metavar="FILE", help=text)


def check_speculation(args: argparse.Namespace) -> None:
    """Raise UsageError for options of n-gram drafts without n-gram drafts, before a model is loaded."""
    without = "--draft-model" if args.draft_model is not None else "--no-prompt-lookup"
    is_off = args.draft_model is not None or args.prompt_lookup is False
    for name in ("ngram_pool", "ngram_corpus"):
        if is_off and getattr(args, name) is not None:
            raise UsageError(f"argument --{name.replace('_', '-')}: not allowed with argument {without}")
    if args.ngram_corpus is not None:
        _read_corpus(args.ngram_corpus)


def prompt_lookup(args: argparse.Namespace, llama: "Llama") -> "PromptLookup | None":
    """Return the n-gram drafts of `add_speculation`'s options, or None."""
    from llamarium.engine.proposers.lookup import POOL_BYTES, PromptLookup

    check_speculation(args)
    if not args.prompt_lookup and args.ngram_pool is None and args.ngram_corpus is None:
        return None
    corpus = () if args.ngram_corpus is None else llama.tokenizer.encode(_read_corpus(args.ngram_corpus))
    return PromptLookup(pool_bytes=POOL_BYTES if args.ngram_pool is None else args.ngram_pool, corpus=corpus)


def speculation(args: argparse.Namespace, llama: "Llama") -> dict[str, Any]:
    """Return what `add_speculation`'s options mean, by the API's names; the object counts what came of it."""
    if args.draft_model is not None:
        from llamarium.generation.options import drafting

        check_speculation(args)
        return {"draft_model": drafting(llama, load_draft(args))}
    lookup = prompt_lookup(args, llama)
    return {} if lookup is None else {"prompt_lookup": lookup}


def speculation_counts(options: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return what came of `speculation`, by its option's name."""
    return {name: options[name].counts() for name in SPECULATION if name in options}


def speculation_details(options: dict[str, Any]) -> list[str]:
    """Say what came of `speculation`, for a person."""
    return [
        f"{counts['accepted']} of {counted(counts['drafted'], 'guess', 'guesses')} right in "
        f"{counted(counts['passes'], 'pass', 'passes')}"
        for counts in speculation_counts(options).values()
    ]


def load_draft(args: argparse.Namespace, report: Callable[[int, int], None] | None = None) -> "Llama":
    """Load the model that `--draft-model` names, as the model is computed, after `load_llama` and with its `report`."""
    from llamarium.api import load

    reporting = share_done(f"loading {args.draft_model}") if report is None else nullcontext(report)
    with reporting as progress:
        llama = load(args.draft_path, dtype=args.dtype, device=args.device, progress=progress)
    llama.name = args.draft_model
    return llama


def _read_corpus(path: Path) -> str:
    """Read a corpus; InputError if it is no text, or too long."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CORPUS_BYTES + 1)
        if len(data) > MAX_CORPUS_BYTES:
            raise InputError(f"{escape(path)}: is longer than {MAX_CORPUS_BYTES >> 20} MiB; use a shorter text")
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{escape(path)}: cannot be read: {error.strerror}; expected a text to draft from") from None
    except UnicodeDecodeError:
        raise InputError(f"{escape(path)}: is not in UTF-8; expected a text to draft from") from None


def _size_or_none(text: str) -> int:
    return 0 if text.strip() == "0" else size(text)
