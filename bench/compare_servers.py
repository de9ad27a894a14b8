"""Our server against llama.cpp's `llama-server`, and any other, on the same GGUF file, alternating.

    python bench/compare_servers.py --model FILE.gguf --llama-server PATH [--scenario NAME] [--peer NAME=COMMAND] ...

| --scenario  | what is measured                                                                                    |
|-------------|-----------------------------------------------------------------------------------------------------|
| clients     | throughput, time to first token and between tokens, under each number of --clients at once           |
| prefix      | time to first token of a prompt whose first --prefix-tokens the server has read before, or has not   |
| long-prompt | how long --streams answers pause when a prompt of --long-tokens arrives among them                   |
| one         | tokens/s of one client's answer, our server against `llamarium bench decode` without any (no peers)  |

`llama-server` is built from llama.cpp's sources; those of the PyPI package llama-cpp-python will do:

    cmake -B build -DGGML_NATIVE=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF
    cmake --build build --target llama-server

Options of its own may follow its path: --llama-server "PATH -fa off". A peer is any command with {model}, {port},
{threads}, {slots} (answers at once) and {tokens} (of the longest prompt and its answer) in it. All servers are started
once, and asked in turn by the load generator of `llamarium bench serve`, which runs on the same machine; what it takes
of a processor is among the results. Prompts are different in every round, and the same for each server.

With `clients`, "allowed" are the tokens/s that prompts and as many streams would have if each were computed without the
other and without a server: `llamarium bench prefill`, and `bench batch` after prompts of the same length, in every
round. "llamarium / allowed" is the share that the server reaches. At its beginning and its end a measurement has fewer
streams than clients, which is the more of it the fewer --requests-per-client there are.

Answers have their full length (`ignore_eos`) and the most probable token is chosen (`temperature` 0). Latencies are in
milliseconds; a ratio of them below 1 is ours being sooner. "outside" is the share of the time that a server spent
outside of passes over the model, where its `/metrics` tell that.
"""

import argparse
import asyncio
import itertools
import json
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.request import urlopen

import numpy as np
import uvloop

import common
from llamarium.errors import ServerError
from llamarium.hub.resolve import resolve
from llamarium.load_test.client import Client, Target
from llamarium.load_test.drive import LoadRun, closed_loop
from llamarium.load_test.exchange import Exchange
from llamarium.load_test.summary import Spread, summarize
from llamarium.load_test.workload import Lengths, LoadRequest, synthetic

OURS = (
    f"{shlex.quote(sys.executable)} -m llamarium serve -m {{model}} --host 127.0.0.1 --port {{port}} "
    "--threads {threads} --max-num-seqs {slots}"
)
LLAMA_SERVER = "-m {model} --host 127.0.0.1 --port {port} -t {threads} -np {slots} -c {context} --no-webui"
PASS_S = "llamarium:model_pass_seconds_total"
START_S = 300.0  # that a server may take to read its model
SAME = {"temperature": 0, "ignore_eos": True}

Found = dict[str, float]


# --- servers ----------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """One that runs; `seeds` numbers its measurements, so that all servers get the same prompts."""

    name: str
    target: Target
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, body: Callable[[Client], Awaitable[Any]]) -> Any:
        """Run `body` with a client of this server."""

        async def run() -> Any:
            with closing(Client(self.target)) as client:
                return await body(client)

        return uvloop.run(run())


@contextmanager
def running(name: str, command: str, values: dict[str, object]) -> Generator[Server]:
    """Start a server, wait until it is ready, and end it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(**values, port=port) for word in shlex.split(command)]
    server = Server(name, Target(url=f"http://127.0.0.1:{port}", extra=SAME))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(server, process)
            model = server.ask(lambda client: client.model())
            yield replace(server, target=replace(server.target, model=model))
        except ServerError as error:
            log.seek(0)
            log_text = log.read().decode("utf-8", "replace")[-2000:]
            raise SystemExit(f"{shlex.join(words)} failed: {error}\n{log_text}") from None
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(server: Server, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return server.ask(lambda client: client.ready(1.0))
        except ServerError:
            if process.poll() is not None:
                raise ServerError(f"it ended with {process.returncode}") from None
            if time.monotonic() > deadline:
                raise


# --- scenarios --------------------------------------------------------------------------------------------------------


def under_clients(server: Server, num_clients: int, options: argparse.Namespace) -> Found:
    """Return throughput and latencies under so many clients."""
    number = max(num_clients * options.requests_per_client, 4)
    workload = _made(options.prompt_tokens, options.max_tokens, seed=f"{num_clients} {next(server.seeds)}")
    requests = itertools.islice(workload, number)
    before_s = pass_s(server)
    run: LoadRun = server.ask(lambda client: closed_loop(client, requests, num_clients=num_clients))
    after_s = pass_s(server)
    _check(server, run.exchanges)
    summary = summarize(run)
    assert summary.ttft_s is not None
    outside = {} if before_s is None or after_s is None else {"outside": 1 - (after_s - before_s) / run.duration_s}
    gaps = summary.itl_s or Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    return {
        "tokens/s": summary.total_tokens_per_s or 0.0,
        "output tokens/s": summary.output_tokens_per_s,
        "ttft p50": 1000 * summary.ttft_s.p50,
        "ttft p99": 1000 * summary.ttft_s.p99,
        "itl p50": 1000 * gaps.p50,
        "itl p99": 1000 * gaps.p99,
        "generator": summary.cpu_share,
        **outside,
    }


def allowed(num_clients: int, options: argparse.Namespace) -> Found:
    """Return the tokens/s that prefill allows, and streams of this number, where each is measured alone."""
    prompt, answer = options.prompt_tokens, options.max_tokens
    prefill = alone("prefill", options, "--lengths", prompt)
    streams = alone("batch", options, "--depths", prompt, "--rows", num_clients, "-n", answer)
    return {
        "tokens/s": (prompt + answer) / (prompt / prefill + answer / streams),
        "prefill": prefill,
        "streams": streams,
    }


def pass_s(server: Server) -> float | None:
    """Return the seconds that a server has spent in passes over its model; None where it does not tell."""
    try:
        with urlopen(f"{server.target.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    return next((float(line.split()[-1]) for line in lines if line.startswith(PASS_S)), None)


def one_answer(server: Server, options: argparse.Namespace) -> Found:
    """Return tokens/s of one client's answers, after their first token."""
    figures = under_clients(server, 1, options)
    return {"tokens/s": 1000 / figures["itl p50"]}


def without_server(options: argparse.Namespace) -> Found:
    """Return tokens/s of `llamarium bench decode`, at the depth that an answer has on average."""
    return {"tokens/s": alone("decode", options, "--depths", options.prompt_tokens + options.max_tokens // 2)}


def alone(what: str, options: argparse.Namespace, *words: object) -> float:
    """Return tokens/s of one of `llamarium bench`'s measurements, in one round."""
    command = [sys.executable, "-m", "llamarium", "bench", what, "--json", "--rounds", "1", "-m", options.model]
    command += ["--threads", str(options.threads), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]


def shared_prefix(server: Server, options: argparse.Namespace) -> Found:
    """Return milliseconds to the first token of a prompt with a new prefix, and of those that follow with the same."""
    seed = f"prefix {next(server.seeds)}"
    workload = _made(options.prompt_tokens, 4, seed=seed, shared_prefix=options.prefix_tokens)
    requests = itertools.islice(workload, 1 + options.hits)
    run: LoadRun = server.ask(lambda client: closed_loop(client, requests, num_clients=1))
    _check(server, run.exchanges)
    first, *later = run.exchanges
    hit_s = statistics.median(exchange.ttft_s for exchange in later)
    cached = statistics.median((exchange.usage and exchange.usage.cached_tokens) or 0 for exchange in later)
    return {
        "miss": 1000 * first.ttft_s,
        "hit": 1000 * hit_s,
        "hit / miss": hit_s / first.ttft_s,
        "cached": float(cached),
    }


def long_prompt(server: Server, options: argparse.Namespace) -> Found:
    """Return the pauses of answers under way before and while a long prompt is read, in milliseconds.

    Ids are asked for, so that tokens without text arrive, too: those that a model writes after its end (`ignore_eos`).
    """
    server = replace(server, target=replace(server.target, extra={**SAME, "return_token_ids": True}))
    seed = f"long {next(server.seeds)}"
    streams = itertools.islice(_made(options.prompt_tokens, options.stream_tokens, seed=seed), options.streams)
    late = next(_made(options.long_tokens, 4, seed=f"late {seed}"))
    exchanges, arrived = server.ask(lambda client: _interrupt(client, list(streams), late))
    _check(server, [*exchanges, arrived])
    gaps = [pair for exchange in exchanges for pair in itertools.pairwise(exchange.arrivals)]
    all_stream = max(exchange.arrivals[0] for exchange in exchanges)
    before = sorted(later - earlier for earlier, later in gaps if all_stream <= earlier and later <= arrived.start)
    within = sorted(
        later - earlier for earlier, later in gaps if later > arrived.start and earlier < arrived.arrivals[0]
    )
    if not before or min(exchange.arrivals[-1] for exchange in exchanges) < arrived.arrivals[0]:
        raise SystemExit(f"{server.name}: an answer ended before the long prompt was read; raise --stream-tokens")
    median, high = float(np.percentile(before, 50)), float(np.percentile(within, 99))
    return {
        "median before": 1000 * median,
        "p99 while": 1000 * high,
        "longest": 1000 * within[-1],
        "p99 / median": high / median if median else 0.0,
        "ttft": 1000 * arrived.ttft_s,
    }


async def _interrupt(client: Client, streams: list[LoadRequest], late: LoadRequest) -> tuple[list[Exchange], Exchange]:
    """Let all streams begin, some tokens each, and send the late request among them."""
    exchanges = [Exchange(request, time.perf_counter()) for request in streams]
    tasks = [asyncio.create_task(client.carry_out(exchange)) for exchange in exchanges]
    while not all(len(exchange.arrivals) >= 8 or exchange.failure for exchange in exchanges):
        await asyncio.sleep(0.01)
    arrived = await client.send(late)
    await asyncio.gather(*tasks)
    return exchanges, arrived


def _made(prompt_tokens: int, max_tokens: int, *, seed: str, shared_prefix: int = 0) -> Iterator[LoadRequest]:
    lengths = (Lengths.parse(str(prompt_tokens)), Lengths.parse(str(max_tokens)))
    return synthetic(*lengths, seed=seed, shared_prefix=shared_prefix)


def _check(server: Server, exchanges: list[Exchange]) -> None:
    """Refuse answers that failed, or are shorter than what was asked for: they would count as fast ones."""
    for exchange in exchanges:
        if exchange.failure is not None:
            raise SystemExit(f"{server.name}: {exchange.failure}")
        if exchange.usage is not None and exchange.num_tokens != exchange.request.max_tokens:
            num_requested = exchange.request.max_tokens
            raise SystemExit(
                f"{server.name}: an answer has {exchange.num_tokens} tokens; {num_requested} were asked for"
            )


# --- all of them ------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="the built-in name, or a GGUF file")
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--peer", type=common.named, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument(
        "--ours", default=OURS, metavar="COMMAND", help="how our server is started (default: %(default)s)"
    )
    parser.add_argument("--scenario", choices=("clients", "prefix", "long-prompt", "one"), default="clients")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16, 32], metavar="N")
    parser.add_argument("--requests-per-client", type=int, default=8, metavar="N")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--prefix-tokens", type=int, default=2000, metavar="N")
    parser.add_argument("--hits", type=int, default=4, metavar="N", help="prompts that follow with the same prefix")
    parser.add_argument("--streams", type=int, default=8, metavar="N")
    parser.add_argument("--stream-tokens", type=int, default=700, metavar="N", help="of each stream's answer")
    parser.add_argument("--long-tokens", type=int, default=2000, metavar="N")
    return parser.parse_args()


def sizes(options: argparse.Namespace) -> tuple[int, int]:
    """Return how many answers there are at once, and the tokens of the longest prompt with its answer."""
    spare = 64  # what a server adds to a prompt, and a margin
    if options.scenario == "one":
        return 1, options.prompt_tokens + options.max_tokens + spare
    if options.scenario == "prefix":
        return 1, options.prefix_tokens + options.prompt_tokens + spare
    if options.scenario == "long-prompt":
        longest = max(options.long_tokens, options.prompt_tokens + options.stream_tokens)
        return options.streams + 1, longest + spare
    return max(options.clients), options.prompt_tokens + options.max_tokens + spare


def commands(options: argparse.Namespace) -> dict[str, str]:
    """Return how each server is started, by name; ours first."""
    command_of = {"llamarium": options.ours}
    if options.scenario == "one":
        return command_of
    if options.llama_server:
        command_of["llama-server"] = f"{options.llama_server} {LLAMA_SERVER}"
    return command_of | dict(options.peer)


def measure(servers: list[Server], options: argparse.Namespace) -> dict[str, dict[str, Found]]:
    """Return medians and ratios of each measurement of the scenario, as `common.alternate` does."""
    if options.scenario == "one":
        sides = {"server": partial(one_answer, servers[0], options), "bench decode": partial(without_server, options)}
        return {"one": common.alternate(options.rounds, sides)}
    if options.scenario == "clients":
        works = {str(n): (lambda server, n=n: under_clients(server, n, options)) for n in options.clients}
    else:
        scenario = shared_prefix if options.scenario == "prefix" else long_prompt
        works = {options.scenario: lambda server: scenario(server, options)}
    medians: dict[str, dict[str, Found]] = {}
    for name, work in works.items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        sides = {server.name: (lambda server=server, work=work: work(server)) for server in servers}
        if options.scenario == "clients":
            sides["allowed"] = partial(allowed, int(name), options)
        medians[name] = common.alternate(options.rounds, sides)
    return medians


def rows_of(medians: dict[str, dict[str, Found]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the table: a line for each measurement and server, and one for each ratio."""
    first_column = "clients" if options.scenario == "clients" else "scenario"
    sides = [
        ({first_column: work, "server": name}, side)
        for work, all_sides in medians.items()
        for name, side in all_sides.items()
    ]
    columns = dict.fromkeys(key for _, side in sides for key in side)
    return [names | columns | side for names, side in sides]


def main() -> None:
    """Measure and report."""
    options = parse()
    path, (slots, tokens) = resolve(options.model), sizes(options)
    values = {"model": path, "threads": options.threads, "slots": slots, "tokens": tokens, "context": slots * tokens}
    with ExitStack() as stack:
        servers = [stack.enter_context(running(name, command, values)) for name, command in commands(options).items()]
        medians = measure(servers, options)
    rows = rows_of(medians, options)
    common.report(f"compare-servers-{options.scenario}-{path.stem}", options, rows, {"servers": medians})


if __name__ == "__main__":
    main()
