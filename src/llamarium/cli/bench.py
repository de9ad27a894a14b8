"""Measure on this machine: how fast a model is, and how near to what is possible.

  prefill   a prompt of N tokens (--lengths), until the first new token
  decode    one new token after the other, with N in the cache (--depths)
  batch     one new token of N answers side by side (--rows), each with 16
            tokens in the cache, or --depths
  all       these three
  cache     one prompt continued greedily with and without the KV cache, for
            --lengths new tokens: what the cache saves. The tokens must be the
            same; computed in float32, unless --dtype names another
  learn-and-write
            learning a text of -n tokens, all at once, against writing one, a
            token at a time: tokens/s, and why (shakespeare-char, unless -m
            names another)
  serve     a server, under load: `llamarium bench serve --help`

For the first four, numbers are medians of the rounds:

  tokens/s    of all answers in sum
  time        of the prompt, or of one step
  read        weights, keys and values that one step needs, each once
  GB/s        `read` in that time; to decode faster, memory must be faster
  of memory   GB/s against what all threads together can read from memory,
              measured before each round; what stays in the processor's
              caches is read faster
  outside     the part of the time outside the C kernels: Python and PyTorch

Where PyTorch does the work, only tokens/s and time are shown: it may read a
weight more than once.

  llamarium bench all
  llamarium bench decode -m model.gguf --depths 100,1000,8000 --threads 4
  llamarium bench cache --lengths 32,64,128,256 --json
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from llamarium.cli import bench_cache, bench_learn
from llamarium.cli.options import UsageError, add_json, add_kv_cache, add_model, load_llama, positive, whole_numbers
from llamarium.cli.output import duration, emit, note, percent, show, size, status, table
from llamarium.errors import InputError, counted

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.config import ModelConfig
    from llamarium.inspect.measures.speed import Speed, Work

_LENGTHS, _DEPTHS, _ROWS = (32, 128, 512), (100, 1000, 8000), (1, 2, 4, 8)
_BATCH_PROMPT = 16  # tokens of each row
_NEW_TOKENS, _ROUNDS = 32, 5
_OPTIONS = {  # what each takes besides the model
    "prefill": {"lengths", "rounds"},
    "decode": {"depths", "max_tokens", "rounds"},
    "batch": {"rows", "depths", "max_tokens", "rounds"},
    "all": {"lengths", "depths", "rows", "max_tokens", "rounds"},
    "cache": {"lengths"},
    "learn-and-write": {"max_tokens", "rounds"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    listed = f"{{{','.join((*_OPTIONS, 'serve'))}}}"  # serve is a command of its own
    parser.add_argument("what", choices=tuple(_OPTIONS), metavar=listed, help="what to measure")
    for name, subject, default in (
        ("--lengths", "tokens of each prompt; for cache, new tokens", _LENGTHS),
        ("--depths", "tokens in the cache before each new one", _DEPTHS),
        ("--rows", "answers side by side", _ROWS),
    ):
        default_text = ",".join(map(str, default))
        parser.add_argument(name, type=whole_numbers, metavar="N,N,…", help=f"{subject} (default: {default_text})")
    text = f"steps of each round (default: {_NEW_TOKENS})"
    parser.add_argument("-n", "--max-tokens", type=positive, metavar="N", help=text)
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"rounds after a first one (default: {_ROUNDS})")
    add_json(parser)
    add_kv_cache(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement."""
    _check_options(args)
    if args.what == "cache":
        return bench_cache.run(args)
    if args.what == "learn-and-write":
        return bench_learn.run(args)
    llama = load_llama(args)
    from llamarium.api import load

    works = _works(args, llama.config)
    _announce(llama, works, args)
    results = [_measure(llama, work, args) for work in works]
    library_results: list[Speed] = []
    if (model := llama.loaded.weights_of) is not None:  # of a learner's: the library's is measured beside it
        library_llama = load(model, dtype="float32", device="cpu")
        library_results = [_measure(library_llama, work, args, learner=llama.name) for work in works]
    if not args.json:
        _print(llama, results)
        for own, library in zip(results, library_results, strict=False):
            rate, times = library.tokens_per_s, library.tokens_per_s / own.tokens_per_s
            print(f"the library, {_name(own.work)}: {rate:,.1f} tokens/s, {times:,.1f} times as many")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse an option that the chosen measurement does not have, and numbers below 1."""
    why = {"cache": "its tokens would differ from those without a cache", "learn-and-write": "learning keeps no cache"}
    if args.what in why and args.kv_cache_dtype != "auto":
        raise UsageError(f"bench {args.what} has no --kv-cache-dtype; {why[args.what]}")
    for name in ("lengths", "depths", "rows", "max_tokens", "rounds"):
        value = getattr(args, name)
        if value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if name not in _OPTIONS[args.what]:
            takers = " and ".join(kind for kind, options in _OPTIONS.items() if name in options)
            raise UsageError(f"bench {args.what} has no {option}; it is for {takers}")
        if isinstance(value, tuple) and min(value) < 1:
            raise InputError(f"{option} are {list(value)}; expected numbers of at least 1")


def _works(args: argparse.Namespace, config: "ModelConfig") -> "list[Work]":
    """Return what to run: all given numbers, or those of the default ones that the context holds."""
    from llamarium.inspect.measures.speed import Work, check_room

    step = Work(num_new=args.max_tokens or _NEW_TOKENS, kv_cache_dtype=args.kv_cache_dtype)
    depth = max(1, min(_DEPTHS[0], config.max_position_embeddings - step.num_positions))
    prompts = (args.what == "batch" and args.depths) or (_BATCH_PROMPT,)
    choices = {
        "prefill": (args.lengths, [replace(step, num_prompt=length, num_new=0) for length in args.lengths or _LENGTHS]),
        "decode": (args.depths, [replace(step, num_cached=depth) for depth in args.depths or (depth, *_DEPTHS[1:])]),
        "batch": (args.rows, [replace(step, num_rows=n, num_prompt=m) for m in prompts for n in args.rows or _ROWS]),
    }
    works: list[Work] = []
    for numbers, candidates in (choices[kind] for kind in choices if args.what in (kind, "all")):
        fitting = [work for work in candidates if work.num_positions <= config.max_position_embeddings]
        works += candidates if numbers is not None or not fitting else fitting
    for work in works:
        check_room(config, work)
    return works


def _announce(llama: "Llama", works: "Sequence[Work]", args: argparse.Namespace) -> None:
    """Say how many measurements there are and about how long they take, by the speed of a short one."""
    from llamarium.inspect.measures.speed import estimate

    rounds = args.rounds or _ROUNDS
    with status("estimating the duration"):
        seconds = estimate(llama.runner, works, num_rounds=rounds) * (2 if llama.loaded.weights_of is not None else 1)
    note(f"{counted(len(works), 'measurement')} of {counted(rounds, 'round')}: about {duration(seconds)}")


def _measure(llama: "Llama", work: "Work", args: argparse.Namespace, learner: str | None = None) -> "Speed":
    """Measure; `learner` is the learner's model that this one is measured beside."""
    from llamarium.inspect.measures.speed import measure

    with status(f"measuring {_name(work)}"):
        speed = measure(llama.runner, work, num_rounds=args.rounds or _ROUNDS)
    if args.json:
        fields = asdict(speed)
        about = {"model": llama.name, **_setting(llama), "beside": learner, "test": _kind(work)}
        emit(about | fields.pop("work") | fields)
    return speed


def _setting(llama: "Llama") -> dict[str, Any]:
    from llamarium.kernels import native
    from llamarium.kernels.threads import num_threads

    runner = llama.runner
    return {
        "dtype": runner.dtype,
        "device": runner.device,
        "kernels": native.kernels() if runner.is_native else None,
        "input_bits": runner.input_bits,
        "threads": num_threads(),
    }


def _kind(work: "Work") -> str:
    if not work.num_new:
        return "prefill"
    return "decode" if work.num_cached else "batch"


def _name(work: "Work") -> str:
    return {
        "prefill": f"prefill of {work.num_prompt:,}",
        "decode": f"decode after {work.num_cached:,}",
        "batch": f"batch of {work.num_rows:,}" + (f" after {work.num_prompt:,}" * (work.num_prompt != _BATCH_PROMPT)),
    }[_kind(work)]


def _print(llama: "Llama", results: Sequence["Speed"]) -> None:
    setting = _setting(llama)
    modules = "PyTorch" if llama.loaded.weights_of is None else llama.runner.name
    computes = f"the C kernels {setting['kernels']}" if setting["kernels"] else modules
    threads = counted(setting["threads"], "thread")
    print(f"{llama.name} in {setting['dtype']}, keys and values in {llama.runner.kv_dtype}, on {setting['device']}")
    print(f"{computes}, {threads}")
    bits = setting["input_bits"]
    outliers = ", outliers to 16" if bits == 8 else ""
    print(f"inputs of packed weights are rounded to {bits} bits{outliers}\n" if bits else "")
    numbers = ("tokens/s", "time", "read", "GB/s", "of memory", "outside")
    result = table("", *numbers, right=numbers)
    for speed in results:
        result.add_row(
            _name(speed.work),
            f"{speed.tokens_per_s:,.1f}",
            f"{1000 * speed.seconds:,.1f} ms" if speed.seconds < 1 else f"{speed.seconds:,.2f} s",
            "-" if speed.step_bytes is None else size(speed.step_bytes),
            "-" if speed.bytes_per_s is None else f"{speed.bytes_per_s / 1e9:.1f}",
            "-" if speed.memory_share is None else percent(speed.memory_share),
            "-" if speed.python_share is None else percent(speed.python_share),
        )
    show(result)
    reads = [speed.memory_bytes_per_s for speed in results if speed.memory_bytes_per_s is not None]
    if reads:
        span = " to ".join(dict.fromkeys(f"{read / 1e9:.1f}" for read in (min(reads), max(reads))))
        print(f"\nmemory: {span} GB/s, read by {threads}")
