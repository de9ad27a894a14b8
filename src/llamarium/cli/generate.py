"""Continue a text, token by token.

The text appears as it grows, on a terminal behind the prompt. Its end: a stop token of the model, a --stop
text, or --max-tokens.

  llamarium generate "Once upon a time" -n 50 --temperature 0
  llamarium generate "The capital of France is" -n 30 --num-answers 3 --seed 1
  cat story.txt | llamarium generate - --min-p 0.05 --prompt-lookup
  llamarium generate "A person: " --json-schema person.json
"""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llamarium.cli.answer import writer
from llamarium.cli.flags import add_flags
from llamarium.cli.options import UsageError, add_json, add_kv_cache, add_model, add_stats, load_llama
from llamarium.cli.output import Stopwatch, emit, note, write_text
from llamarium.cli.sampling import add_grammar, add_sampling, grammar, sampling
from llamarium.cli.speculation import (
    add_speculation,
    check_speculation,
    speculation,
    speculation_counts,
    speculation_details,
)
from llamarium.cli.text import add_text, check_fits, require_text
from llamarium.errors import counted
from llamarium.sampling.params import SamplingParams

if TYPE_CHECKING:
    from llamarium.api import Llama


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_text(parser, "PROMPT", "the text to continue")
    add_flags(parser, SamplingParams, "n", "logprobs")
    parser.add_argument("--no-cache", action="store_true", help="recompute everything for each token, to compare; slow")
    add_speculation(parser)
    add_json(parser)
    add_stats(parser)
    add_sampling(parser)
    add_grammar(parser)
    add_model(parser)
    add_kv_cache(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    if args.logprobs is not None and not args.json:
        raise UsageError("argument --logprobs: needs --json (`llamarium next` shows candidates as a table)")
    if args.no_cache and args.kv_cache_dtype != "auto":
        raise UsageError("argument --kv-cache-dtype: there is no cache with --no-cache; give one of them")
    if args.n > 1 and args.temperature == 0:
        raise UsageError("argument --num-answers: not allowed with --temperature 0, at which answers are all equal")
    options = sampling(args) | grammar(args) | {"n": args.n, "logprobs": args.logprobs}
    prompt = require_text(args, "PROMPT")
    check_speculation(args)
    llama = load_llama(args)
    check_fits(llama, prompt)
    params = llama.sampling_params(**options)
    args.max_tokens = params.max_tokens
    if params.temperature > 0:  # greedy needs no seed, and would say that it has no effect
        options["seed"] = params.seed
    options |= {"use_cache": not args.no_cache, "kv_cache_dtype": args.kv_cache_dtype} | speculation(args, llama)
    if args.json or args.n > 1:
        _at_once(llama, prompt, options, args)
    else:
        _streamed(llama, prompt, options, args)
    return 0


def _streamed(llama: "Llama", prompt: str, options: dict[str, Any], args: argparse.Namespace) -> None:
    ids = llama.encode(prompt)
    watch, out = Stopwatch(args.stats), writer()
    out.write_prompt(prompt)
    reason = None
    try:
        for piece in llama.stream(ids, **options):
            watch.count(len(piece.token_ids))
            out.write(piece.text)
            reason = piece.finish_reason
    finally:
        out.finish()
    write_text("\n")
    if reason == "length":
        _explain_length(watch.num_tokens, llama, args)
    _report(watch, len(ids), options)


def _at_once(llama: "Llama", prompt: str, options: dict[str, Any], args: argparse.Namespace) -> None:
    watch = Stopwatch(args.stats)
    generation = llama.generate(prompt, **options)
    counts = speculation_counts(options)
    for index, answer in enumerate(generation.completions):
        watch.count(len(answer.token_ids))
        if args.json:
            emit({"index": index, "num_prompt_tokens": len(generation.prompt_ids)} | asdict(answer) | counts)
        else:
            out = writer()
            out.write("" if index == 0 else "\n")
            out.write_prompt(prompt)
            out.write(f"{answer.text}\n")
        if answer.finish_reason == "length":
            _explain_length(len(answer.token_ids), llama, args)
    _report(watch, len(generation.prompt_ids), options)


def _explain_length(num_tokens: int, llama: "Llama", args: argparse.Namespace) -> None:
    """Say that an answer ended because the context is full, not where -n would have ended it."""
    if num_tokens < args.max_tokens:
        context = llama.config.max_position_embeddings
        note(f"[cut after {counted(num_tokens, 'token')}: the context of {context:,} is full]")


def _report(watch: Stopwatch, num_prompt_tokens: int, options: dict[str, Any]) -> None:
    seed = [f"seed {options['seed']}"] if "seed" in options else []
    watch.report(counted(num_prompt_tokens, "prompt token"), *seed, *speculation_details(options))
