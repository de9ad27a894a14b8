"""Show how training data is understood: forms, counts, lengths in tokens, three
examples with what is learned of them in ⟦ ⟧, and problems by line.

The data is what finetune, dpo and grpo take: a .jsonl, .json, .csv, .tsv or
.parquet file (all but .parquet also as .gz or .zst), a folder of them, or
org/name on the hub. Nothing is trained, and PyTorch is not needed. The exit
code is 1 if a row cannot be used, or there is none.

  llamarium data examples.jsonl
  llamarium data pairs.csv --for dpo --columns prompt=question
  llamarium data chats.jsonl.gz -m llama3 --context 2048 --json
"""

import argparse
from typing import TYPE_CHECKING, get_args

from llamarium.cli.options import DEFAULT_MODEL, UsageError, add_json, positive
from llamarium.cli.output import emit, show, status, table
from llamarium.errors import counted, escape
from llamarium.train.choices import ChatFormatName
from llamarium.train.config import GRPOConfig

if TYPE_CHECKING:
    from llamarium.tokenizer.base import Tokenizer
    from llamarium.train.data.survey import Survey

_MAX_TOKENS = GRPOConfig.default("max_tokens")
_CHARACTERS = 600  # of a part of an example that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="DATA", help="a file, a folder, or org/name on the hub")
    text = "the model or tokenizer whose tokens and dialog format count (default: %(default)s)"
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL, metavar="NAME", help=text)
    text = "the command that is to read it (default: the one that fits the first row)"
    parser.add_argument("--for", dest="purpose", default="auto", choices=("auto", "finetune", "dpo", "grpo"), help=text)
    text = "fields by the data's names, such as prompt=question,completion=answer"
    parser.add_argument("--columns", default="", metavar="NAMES", help=text)
    text = "roles of messages by the data's names, such as human=user,gpt=assistant"
    parser.add_argument("--roles", default="", metavar="NAMES", help=text)
    text = "the dialog format; none: prompts go on as text (default: the model's own)"
    parser.add_argument("--chat-format", default="auto", choices=get_args(ChatFormatName), metavar="NAME", help=text)
    text = "count the examples, pairs (both answers) or prompts (with an answer) that are longer than N tokens"
    parser.add_argument("--context", type=positive, metavar="N", help=text)
    text = f"room for an answer to a prompt, which --context counts with --for grpo (default: {_MAX_TOKENS})"
    parser.add_argument("--max-tokens", type=positive, metavar="N", help=text)
    parser.add_argument("--rows", type=positive, metavar="N", help="look at the first N rows only")
    parser.add_argument("--skip-bad", action="store_true", help="exit with 0 although rows cannot be used")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read, count and show."""
    from llamarium.checkpoints.tokenizers import load_tokenizer
    from llamarium.datasets.rows import Reading
    from llamarium.tokenizer.chat.choose import with_format
    from llamarium.train.data.survey import survey

    if args.max_tokens is not None and args.purpose != "grpo":
        raise UsageError("--max-tokens is the room for an answer, which only --for grpo counts")
    max_tokens = args.max_tokens or _MAX_TOKENS
    tokenizer, chat = load_tokenizer(args.model), args.chat_format != "none"
    if chat:
        tokenizer = with_format(tokenizer, args.chat_format)
    reading = Reading.parse(args.columns, args.roles, skip_bad=args.skip_bad)
    with status(f"reading {args.source}"):
        found = survey(args.source, tokenizer, purpose=args.purpose, reading=reading, chat=chat, max_rows=args.rows)
    if args.json:
        longer = {} if args.context is None else {"longer": found.num_longer(args.context, max_tokens)}
        emit(found.to_dict() | longer)
    else:
        _show(found, args.context, max_tokens)
        _show_samples(found, tokenizer)
    return 0 if found.num_units and (args.skip_bad or not found.tally.num_skipped) else 1


def _show(found: "Survey", context: int | None, max_tokens: int) -> None:
    tally, lengths = found.tally, found.quantiles
    rows = [("rows", f"{tally.num_rows - tally.num_skipped:,} of {tally.num_rows:,} can be used by {found.purpose}")]
    rows.append(("forms", _counts(found.forms)))
    if found.roles:
        tools = f"; rows with tools {found.num_with_tools:,}" if found.num_with_tools else ""
        rows.append(("messages", _counts(found.roles) + tools))
    if lengths:
        learned = "" if found.purpose == "grpo" else f", {found.num_learned:,} of them learned"
        rows.append(("tokens", f"{sum(found.lengths):,}{learned}"))
        shortest, median, most, longest = lengths
        rows.append(("lengths", f"{shortest:,} to {longest:,}; median {median:,}, 95 % up to {most:,}"))
    if context is not None:
        what = {"dpo": " pairs", "grpo": f" prompts and answers of {max_tokens:,}"}.get(found.purpose, "")
        counts = f"{found.num_longer(context, max_tokens):,} of {found.num_units:,}{what}"
        last = "" if found.purpose == "grpo" else "; an example's last token takes no room"
        rows.append(("too long", f"{counts} for a row of {context:,}{last}"))
    if tally.missing:
        rows.append(("missing", ", ".join(map(escape, sorted(tally.missing))) + ", which --columns names"))
    if tally.unread:
        rows.append(("not read", _counts(tally.unread)))
    if tally.num_without_weight:
        rows.append(("left out", f"{tally.num_without_weight:,} of weight 0"))
    if tally.num_skipped:
        rows.append(("problems", f"{counted(tally.num_skipped, 'row')}"))
        rows += [("", f"{bad.place}: {bad.problem}") for bad in tally.problems]
        if more := tally.num_skipped - len(tally.problems):
            rows.append(("", f"and {more:,} more"))
    show(table("", "", rows=rows))


def _counts(counts: "dict[str, int]") -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    named = ", ".join(f"{escape(name)} {count:,}" for name, count in most[:12])
    return named + (f" and {len(most) - 12} more" if len(most) > 12 else "")


def _show_samples(found: "Survey", tokenizer: "Tokenizer") -> None:
    from rich.text import Text

    from llamarium.train.data.marked import add_marked

    shown = Text()
    for place, example in found.samples:
        add_marked(shown, place, example.ids, example.learned, tokenizer, _CHARACTERS)
    if found.samples:
        print()
        shown.rstrip()
        show(shown)
