"""Talk with a model.

Without a question it asks for one, again and again, and remembers the dialog;
/help lists what else can be typed. Ctrl-C stops an answer, Ctrl-D leaves.
Lines that are pasted together are one question.

An answer that only repeats itself (the same tokens four times, and 64 of them)
is stopped, and a line says so; --allow-repetition lets it go on.

  llamarium chat
  llamarium chat "Why is the sky blue?" --temperature 0
  llamarium chat --system "Answer in rhymes." -m org/name
  llamarium chat "Is 91 a prime?" --choice yes --choice no
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llamarium.cli.answer import say
from llamarium.cli.disk_cache import add_disk_cache, disk_cache
from llamarium.cli.options import (
    UsageError,
    add_chat_template,
    add_json,
    add_kv_cache,
    add_model,
    add_stats,
    load_llama,
)
from llamarium.cli.output import emit
from llamarium.cli.repl import Repl
from llamarium.cli.sampling import add_grammar, add_sampling, grammar, sampling
from llamarium.cli.speculation import add_speculation, check_speculation, speculation, speculation_counts
from llamarium.cli.text import add_text, check_fits, read_text

if TYPE_CHECKING:
    from llamarium.api import Llama


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "QUESTION", "ask this one question and leave")
    parser.add_argument("--system", metavar="TEXT", help="system prompt, before the dialog")
    parser.add_argument("--allow-repetition", action="store_true", help="let an answer that repeats itself go on")
    add_speculation(parser)
    add_json(parser)
    add_stats(parser)
    add_sampling(parser, max_tokens=1024)
    add_grammar(parser)
    add_chat_template(parser)
    add_model(parser)
    add_kv_cache(parser)
    add_disk_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Answer one question, or talk."""
    question, options = read_text(args), sampling(args) | grammar(args)
    if args.json and question is None:
        raise UsageError("argument --json: needs a QUESTION")
    if args.json and args.allow_repetition:
        raise UsageError("argument --allow-repetition: with --json no answer is stopped; leave it out")
    if args.json and args.cache_dir is not None:
        raise UsageError("argument --cache-dir: with --json there is one question and no dialog to go on with")
    disk = disk_cache(args)
    check_speculation(args)
    llama = load_llama(args, falls_back=False)  # the packaged model has no dialog format
    llama.chat_params(**options)  # raises for a value out of range, before a question is typed
    options |= {"kv_cache_dtype": args.kv_cache_dtype} | speculation(args, llama)
    if llama.tokenizer.chat_format is None:
        llama.tokenizer.chat([])  # raises what there is to say about it
    if question is None:
        repeats, on = args.allow_repetition, args.adapter
        repl = Repl(llama, args.system, options, args.stats, adapter=on, may_repeat=repeats, disk_cache=disk)
        is_fine = repl.run()
        return 0 if is_fine or repl.interactive else 1
    elif args.json:
        _answer_as_json(llama, args.system, question, options)
    else:
        say(llama.conversation(args.system, disk), question, options, args.stats, may_repeat=args.allow_repetition)
    return 0


def _answer_as_json(llama: "Llama", system: str | None, question: str, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": check_fits(llama, question)}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    generation = llama.chat(messages, **options)
    counts = speculation_counts(options)
    emit({"num_prompt_tokens": len(generation.prompt_ids)} | asdict(generation.completions[0]) | counts)
