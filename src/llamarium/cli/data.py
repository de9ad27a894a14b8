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
        surveyed = survey(args.source, tokenizer, purpose=args.purpose, reading=reading, chat=chat, max_rows=args.rows)
    if args.json:
        longer = {} if args.context is None else {"longer": surveyed.num_longer(args.context, max_tokens)}
        emit(surveyed.to_dict() | longer)
    else:
        _show(surveyed, args.context, max_tokens)
        _show_samples(surveyed, tokenizer)
    return 0 if surveyed.num_units and (args.skip_bad or not surveyed.tally.num_skipped) else 1


def _show(surveyed: "Survey", context: int | None, max_tokens: int) -> None:
    tally, lengths = surveyed.tally, surveyed.quantiles
    rows = [("rows", f"{tally.num_rows - tally.num_skipped:,} of {tally.num_rows:,} can be used by {surveyed.purpose}")]
    rows.append(("forms", _counts(surveyed.forms)))
    if surveyed.roles:
        tools = f"; rows with tools {surveyed.num_with_tools:,}" if surveyed.num_with_tools else ""
        rows.append(("messages", _counts(surveyed.roles) + tools))
    if lengths:
        learned = "" if surveyed.purpose == "grpo" else f", {surveyed.num_learned:,} of them learned"
        rows.append(("tokens", f"{sum(surveyed.lengths):,}{learned}"))
        shortest, median, percentile_95, longest = lengths
        rows.append(("lengths", f"{shortest:,} to {longest:,}; median {median:,}, 95 % up to {percentile_95:,}"))
    if context is not None:
        unit = {"dpo": " pairs", "grpo": f" prompts and answers of {max_tokens:,}"}.get(surveyed.purpose, "")
        counts = f"{surveyed.num_longer(context, max_tokens):,} of {surveyed.num_units:,}{unit}"
        last = "" if surveyed.purpose == "grpo" else "; an example's last token takes no room"
        rows.append(("too long", f"{counts} for a row of {context:,}{last}"))
    if tally.missing:
        rows.append(("missing", ", ".join(map(escape, sorted(tally.missing))) + ", which --columns names"))
    if tally.unread:
        rows.append(("not read", _counts(tally.unread)))
    if tally.num_without_weight:
        rows.append(("left out", f"{tally.num_without_weight:,} of weight 0"))
    if tally.num_skipped:
        rows.append(("problems", f"{counted(tally.num_skipped, 'row')}"))
        rows += [("", f"{problem.place}: {problem.problem}") for problem in tally.problems]
        if num_others := tally.num_skipped - len(tally.problems):
            rows.append(("", f"and {num_others:,} more"))
    show(table("", "", rows=rows))


def _counts(counts: "dict[str, int]") -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{escape(name)} {count:,}" for name, count in ordered[:12])
    return listed + (f" and {len(ordered) - 12} more" if len(ordered) > 12 else "")


def _show_samples(surveyed: "Survey", tokenizer: "Tokenizer") -> None:
    from rich.text import Text

    from llamarium.train.data.marked import add_marked

    text = Text()
    for place, example in surveyed.samples:
        add_marked(text, place, example.ids, example.learned, tokenizer, _CHARACTERS)
    if surveyed.samples:
        print()
        text.rstrip()
        show(text)
