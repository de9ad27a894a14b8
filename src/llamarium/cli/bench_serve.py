r"""Measure a server under load: any that speaks OpenAI's API, streaming.

Requests are sent by so many clients, each of which waits for its answer
before it sends another (--clients), or at random times (--rate, Poisson
arrivals), whatever has become of those before. A prompt of N tokens is N
common words, so that any server can read it; the table says how many tokens
the server counted. The same --seed sends the same requests.

  first token     until the first piece of text (TTFT)
  between pieces  from one piece to the next, of all answers together (ITL);
                  a piece is one token at most servers
  token           after the first, on average over an answer (TPOT)
  whole answer    until the end (end to end)
  goodput         answers a second that keep to --goodput

Times begin when a request is sent; with --rate, when it was due. They and
the throughput are of whole answers; errors are counted by kind. What the load
generator itself took is said too: where that is much of a processor, what it
measures is itself. Needs: pip install 'llamarium[serve]'

  llamarium bench serve --url http://127.0.0.1:8080 --clients 8
  llamarium bench serve --url http://127.0.0.1:8080 --rate 4 --requests 200 \
      --prompt-tokens lognormal:300:0.8 --max-tokens uniform:16:256 \
      --goodput ttft:500 tpot:50
"""

import argparse
import asyncio
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llamarium.cli.errors import UsageError
from llamarium.cli.flags import Group
from llamarium.cli.options import add_json, add_values, count, positive, positive_number, seconds
from llamarium.cli.output import emit, percent, printable, share_done, show, table
from llamarium.errors import OptionError, ServerError, counted
from llamarium.extras import optional

if TYPE_CHECKING:
    from llamarium.load_test.client import Client, Target
    from llamarium.load_test.drive import LoadRun
    from llamarium.load_test.exchange import Goal
    from llamarium.load_test.summary import LoadSummary, Spread
    from llamarium.load_test.workload import Lengths, LoadRequest

_KEY = "OPENAI_API_KEY"
_PROMPT_TOKENS, _MAX_TOKENS, _REQUESTS = "128", "64", 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--url", required=True, help="of the server, with or without /v1")
    parser.add_argument("-m", "--model", metavar="NAME", help="that requests carry (default: the server's only one)")
    parser.add_argument("--chat", action="store_true", help="send dialogs to /v1/chat/completions")
    parser.add_argument("--api-key", metavar="KEY", help=f"sent as a bearer token (default: ${_KEY})")
    parser.add_argument("--wait", type=seconds, metavar="S", help="wait so many seconds for the server to be ready")
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    text = "what a good answer keeps to, in milliseconds: ttft, tpot, e2e, or itl, which is its longest pause"
    parser.add_argument("--goodput", nargs="+", metavar="NAME:MS", help=text)
    add_json(parser)


def _add_load(group: Group) -> None:
    when = group.add_mutually_exclusive_group()
    when.add_argument("--clients", type=positive, metavar="N", help="that ask at once (default: 1)")
    when.add_argument("--rate", type=positive_number, metavar="R", help="requests a second, at random times")
    in_sum, warmup = f"in sum (default: {_REQUESTS}, or a file's lines)", "requests before, which do not count"
    add_values(
        group,
        ("--think-time", seconds, "S", None, "from an answer to the client's next request"),
        ("--requests", positive, "N", None, in_sum),
        ("--duration", positive_number, "S", None, "send none after so many seconds"),
        ("--warmup", count, "N", 1, f"{warmup} (default: 1)"),
        ("--timeout", positive_number, "S", 600.0, "for each request (default: %(default)g)"),
    )


def _add_requests(group: Group) -> None:
    tokens = f"N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA, which is of the logarithm (default: {_PROMPT_TOKENS})"
    add_values(
        group,
        ("--prompt-tokens", _lengths, "N", None, tokens),
        ("--max-tokens", _lengths, "N", _MAX_TOKENS, "of an answer, likewise (default: %(default)s)"),
        ("--shared-prefix", positive, "N", None, "tokens before them that all prompts share"),
        ("--dataset", Path, "FILE", None, "JSONL with prompt or messages, and max_tokens if it likes"),
        ("--seed", int, "N", 0, "of prompts, lengths and times (default: 0)"),
        ("--extra-body", _object, "JSON", None, "fields for each request; null takes away one of ours"),
    )
    text = "answers of exactly --max-tokens, where a server has the field (llama-server, vLLM, Llamarium)"
    group.add_argument("--ignore-eos", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Send the load and print the measurement."""
    goal = _goal(args)
    _check(args)
    optional("httptools", "serve", "llamarium bench serve")
    from llamarium.load_test.summary import summarize

    requests = _requests(args)
    with share_done(f"asking {args.url}") as report:
        target, load = asyncio.run(_measure(args, requests, report))
    summary = summarize(load, goal)
    if args.json:
        emit(_setting(args, target) | asdict(summary))
    else:
        print_summary(_title(args, target), summary)
    if load.was_interrupted:
        return 130
    return 0 if summary.num_answered else 1


def _goal(args: argparse.Namespace) -> "Goal | None":
    from llamarium.load_test.exchange import Goal

    try:
        return Goal.parse(args.goodput) if args.goodput else None
    except OptionError as error:
        raise UsageError(f"--goodput: {error}") from None


def _check(args: argparse.Namespace) -> None:
    if args.rate is not None and args.think_time is not None:
        raise UsageError("--think-time is for --clients; with --rate requests do not wait for answers")
    if args.dataset is not None and (args.prompt_tokens is not None or args.shared_prefix is not None):
        raise UsageError("--prompt-tokens and --shared-prefix are for prompts that are made; --dataset has its own")
    args.prompt_tokens = args.prompt_tokens or _lengths(_PROMPT_TOKENS)


def _requests(args: argparse.Namespace) -> "Iterator[LoadRequest]":
    """Return the requests to send, and set `args.requests` to their number."""
    from llamarium.load_test.workload import from_file, synthetic

    if args.dataset is not None:
        lines = from_file(args.dataset, args.max_tokens, seed=args.seed)
        requests, number = itertools.cycle(lines), len(lines)
    else:
        requests = synthetic(args.prompt_tokens, args.max_tokens, shared_prefix=args.shared_prefix or 0, seed=args.seed)
        number = _REQUESTS
    if args.requests is None and args.duration is None:
        args.requests = number
    return itertools.islice((request.as_chat() for request in requests) if args.chat else requests, args.requests)


def _target(args: argparse.Namespace) -> "Target":
    from llamarium.load_test.client import Target, base_url

    return Target(
        url=base_url(args.url),
        model=args.model or "",
        api_key=args.api_key or os.environ.get(_KEY) or None,
        timeout_s=args.timeout,
        extra={**({"ignore_eos": True} if args.ignore_eos else {}), **(args.extra_body or {})},
    )


async def _measure(
    args: argparse.Namespace, requests: "Iterator[LoadRequest]", report: Callable[[int, int], None]
) -> "tuple[Target, LoadRun]":
    """Wait for the server, warm it up and send the load; return the target and the result."""
    from llamarium.load_test.client import Client
    from llamarium.load_test.drive import closed_loop, open_loop, poisson

    with closing(Client(_target(args))) as client:
        if args.wait is not None:
            await client.ready(args.wait)
        if not client.target.model:
            client.target = replace(client.target, model=await client.model())
        await _warm_up(client, args)
        until: dict[str, Any] = {"duration_s": args.duration or math.inf, "progress": _progress(args, report)}
        if args.rate is not None:
            run = await open_loop(client, poisson(requests, args.rate, seed=args.seed), **until)
        else:
            clients, think_s = args.clients or 1, args.think_time or 0.0
            run = await closed_loop(client, requests, num_clients=clients, think_s=think_s, **until)
        return client.target, run


async def _warm_up(client: "Client", args: argparse.Namespace) -> None:
    from llamarium.load_test.workload import synthetic

    requests = synthetic(args.prompt_tokens, args.max_tokens, seed=f"warm-up {args.seed}")
    for request in itertools.islice(requests, args.warmup):
        failure = (await client.send(request.as_chat() if args.chat else request)).failure
        if failure is not None:
            raise ServerError(f"{client.target.url} fails at the first request: {failure}")


def _progress(args: argparse.Namespace, report: Callable[[int, int], None]) -> "Callable[[LoadRun], None]":
    def say(run: "LoadRun") -> None:
        if args.requests is not None:
            report(len(run.exchanges), args.requests)
        else:
            report(min(1000, round(1000 * (run.exchanges[-1].end - run.start) / args.duration)), 1000)

    return say


def _title(args: argparse.Namespace, target: "Target") -> str:
    if args.rate is not None:
        load = f"{args.rate:g} requests/s at random times"
    else:
        load = "1 client" if args.clients in (None, 1) else f"{args.clients} clients"
        load += f", each thinks for {args.think_time:g} s" if args.think_time else ""
    return f"{target.model}\n{target.url}, {load}"


def _setting(args: argparse.Namespace, target: "Target") -> dict[str, Any]:
    """Return the settings without the API key."""
    is_synthetic, names = args.dataset is None, ("chat", "rate", "think_time", "shared_prefix", "seed", "ignore_eos")
    return {name: getattr(args, name) for name in names} | {
        "url": target.url,
        "model": target.model,
        "clients": None if args.rate is not None else args.clients or 1,
        "prompt_tokens_asked": args.prompt_tokens.spelling if is_synthetic else None,
        "max_tokens_asked": args.max_tokens.spelling,
        "dataset": None if is_synthetic else args.dataset.name,
        "goodput_asked": args.goodput,
    }


def _lengths(text: str) -> "Lengths":
    from llamarium.load_test.workload import Lengths

    try:
        return Lengths.parse(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object as {{"temperature": 0}}, found {text!r}')
    return cast(dict[str, Any], value)


_BUSY = 0.5  # share of a CPU; above it, the load generator itself causes delays


def print_summary(title: str, summary: "LoadSummary") -> None:
    """Print a run's numbers."""
    print(f"{printable(title)}\n{_outcome(summary)}\n")
    if summary.num_answered:
        _print_times(summary)
        print()
        _print_rates(summary)
        print(f"\n{_generator(summary)}")
    if summary.errors:
        rows = ((f"{number:,}", kind, printable(summary.examples[kind])) for kind, number in summary.errors.items())
        print()
        show(table("failed", "why", "for example", right=("failed",), rows=rows))


def _outcome(summary: "LoadSummary") -> str:
    requests = counted(summary.num_requests, "request")
    parts = [f"{summary.num_answered:,} of {requests} answered in {summary.duration_s:,.1f} s"]
    parts += [f"{sum(summary.errors.values()):,} failed"] if summary.errors else []
    parts += [f"{summary.num_unfinished:,} more cut short"] if summary.num_unfinished else []
    return ", ".join(parts)


def _print_times(summary: "LoadSummary") -> None:
    numbers = ("mean", "p50", "p90", "p99", "max")
    result = table("ms", *numbers, right=numbers)
    for name, spread in (
        ("first token", summary.ttft_s),
        ("between pieces", summary.itl_s),
        ("token", summary.tpot_s),
        ("whole answer", summary.e2e_s),
    ):
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            result.add_row(name, *(f"{1000 * seconds:,.1f}" for seconds in values))
    show(result)


def _print_rates(summary: "LoadSummary") -> None:
    total = summary.total_tokens_per_s
    print(
        f"throughput   {summary.requests_per_s:,.2f} requests/s, {summary.output_tokens_per_s:,.1f} tokens/s"
        + ("" if total is None else f", {total:,.1f} with prompts")
    )
    if summary.goodput_per_s is not None and summary.num_good is not None:
        share = percent(summary.num_good / summary.num_requests)
        print(f"goodput      {summary.goodput_per_s:,.2f} requests/s, {share} of all")
    print(f"under way    {summary.mean_concurrency:,.1f} requests on average")
    if summary.server_counts:
        cached = summary.cached_tokens
        share = f", {cached.mean:,.1f} of them cached" if cached is not None and cached.mean >= 0.05 else ""
        print(f"prompts      {_tokens(summary.prompt_tokens)}{share}")
        print(f"answers      {_tokens(summary.output_tokens)}")
    else:
        print(f"answers      {_tokens(summary.output_tokens)}: pieces, as the server does not count")


def _tokens(spread: "Spread | None") -> str:
    if spread is None:
        return "-"
    return f"{spread.mean:,.1f} tokens on average, {spread.max:,.0f} at most"


def _generator(summary: "LoadSummary") -> str:
    took = "" if summary.cpu_s_per_token is None else f" {1e6 * summary.cpu_s_per_token:,.0f} us of processor a token,"
    sentence = f"the load generator took{took} {percent(summary.cpu_share)} of one processor"
    if summary.cpu_share > _BUSY:
        sentence += ":\ntoo much to measure by; use fewer clients, or several generators"
    return sentence
