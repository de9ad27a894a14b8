"""A server under twenty thousand requests, 30 % of them aborted and 5 % bad: is anything of them left afterwards?

    python bench/soak.py [--requests N] [--clients N] [--model NAME] [--save]

| kind        | what a client does                                                                                  |
|-------------|-----------------------------------------------------------------------------------------------------|
| whole       | asks for completions or chat completions, some of several answers or held to a form, and reads all   |
| stream      | the same, as events                                                                                 |
| aborted     | the same, whole or as events, and leaves: within the body, at a random moment, or after some events |
| bad         | sends no JSON, a wrong or unknown field, a prompt that does not fit, to no such route, ...          |

Twice as many clients ask as are answered side by side, so half of those who leave at a random moment leave the queue.
The server keeps its prefix cache on disk, too, in a folder of 1 MiB at most, which is measured on the way. It
records its answers, stores 1 MiB of responses, explains why prefixes missed, and drafts from a pool of earlier texts of
1 MiB. Whole and streamed requests have what real programs send (`soak_requests.py`).
The model is random, 2 layers of 64 with SmolLM2's vocabulary and dialogs, unless --model names another: what is looked
for is what a request leaves behind, and that does not depend on how long it computes.

Of the server's process is reported, from Linux: resident memory after every hundred requests, and its slope in bytes a
request over the second half (a straight line through the measurements); descriptors, threads (without asyncio's pool,
which has some more than processors at most, and begins them as it needs them), and from inside asyncio's tasks, the
collector's objects and Python's allocations (which grow with the texts of tokens that are kept, one for each of the
vocabulary at most), before and after, while nothing is asked. The same, and how much the server's tables hold, is
reported after 2,000, 10,000 and 20,000 requests, while others run. Then what /metrics and /health say, whether a
question gets the answer that it got before, and the exit code after SIGTERM.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import common
from llamarium.errors import ServerError
from llamarium.load_test.client import Client
from llamarium.load_test.connections import Connections, Response
from soak_requests import COMPLETIONS, RESPONSES, Asking, askings, of_each_kind
from soak_server import SLOTS, Server, started, write_model

EVERY = 100  # requests from one measurement of the memory to the next
RANDOM = "random, 2 layers of 64, SmolLM2's vocabulary and dialogs"
SCARCE = "192KiB"  # of the random model's keys and values: 24 blocks, so that answers wait for room
CHECKPOINTS = (2_000, 10_000, 20_000)
MAX_BRANCHED, MAX_DEPTH = 16, 3  # responses that others go on from: the newest, which are still stored
PROBE: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


# --- asking -----------------------------------------------------------------------------------------------------------


class Left(Exception):
    """The client has read enough."""


@dataclass
class Soak:
    """What has come so far.

    Attributes:
        outcomes: How often which kind of request ended how.
        memory: After how many requests how many bytes were resident.
        disk: How many bytes the prefix cache had on disk then.
        held_after: What the server held after so many requests, others running.
        responses: The newest responses that others may go on from, and how many came before each.
        unexpected: What should not have been, at most ten of them.
        typical_s: How long an answer takes, at present.
    """

    server: Server
    connections: Connections
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    memory: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    disk: list[int] = field(default_factory=list[int])
    unexpected: list[str] = field(default_factory=list[str])
    num_done: int = 0
    typical_s: float = 0.1
    held_after: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    responses: deque[tuple[str, int]] = field(default_factory=lambda: deque[tuple[str, int]](maxlen=MAX_BRANCHED))

    async def ask_all(self, requests: Iterator[Asking], num_clients: int) -> None:
        """Ask with so many clients at once."""

        async def ask_on() -> None:
            for asking in requests:
                outcome = await self._ask(asking)
                self.outcomes[asking.kind, outcome] += 1
                self.num_done += 1
                if self.num_done % EVERY == 0:
                    self.memory.append((self.num_done, self.server.resident_bytes))
                    self.disk.append(self.server.disk_bytes)
                if self.num_done in CHECKPOINTS:
                    self.held_after[self.num_done] = state = self.server.held()
                    print(f"after {self.num_done}: {json.dumps(state)}", file=sys.stderr, flush=True)

        await asyncio.gather(*(ask_on() for _ in range(num_clients)))

    async def _ask(self, asking: Asking) -> str:
        """Carry out one request; return how it ended."""
        if asking.leaves == "sending":
            return await self._leave_while_sending(asking)
        parts: list[bytes] = []
        request_body, depth = self._continued(asking)

        def receive(response: Response, now: float, body: bytes) -> None:
            parts.append(body)
            if asking.leaves == "reading" and len(parts) >= asking.patience:
                raise Left

        limit_s = asking.patience * self.typical_s if asking.leaves == "waiting" else None
        start = time.perf_counter()
        try:
            async with asyncio.timeout(limit_s):
                response = await self.connections.send("POST", asking.path, request_body, receive)
        except Left:
            return "left among events"
        except TimeoutError:
            return "left among events" if parts else "left before any byte"
        except OSError as error:
            self._note(asking, repr(error))
            return "no answer"
        if asking.kind in ("whole", "stream"):
            self.typical_s += (time.perf_counter() - start - self.typical_s) / 16
        body = b"".join(parts)
        self._check(asking, response, body)
        if asking.path == RESPONSES and asking.kind == "whole" and response.status == 200 and depth < MAX_DEPTH:
            self.responses.append((json.loads(body)["id"], depth))
        return str(response.status)

    def _continued(self, asking: Asking) -> tuple[bytes, int]:
        """Return the body, going on from an earlier response if it branches, and how many came before it."""
        if asking.branch is None or not self.responses:
            return asking.body, 0
        previous, depth = self.responses[int(asking.branch * len(self.responses))]
        return json.dumps({**json.loads(asking.body), "previous_response_id": previous}).encode(), depth + 1

    def _check(self, asking: Asking, response: Response, body: bytes) -> None:
        """Note an answer that is not as it should be; who wanted to leave may have been answered before."""
        is_whole = not body.startswith(b"data: ") or body.endswith(b"data: [DONE]\n\n")
        if body.startswith(b"event: "):
            is_whole = b"event: response.completed" in body or b"event: response.incomplete" in body
        if response.status != (asking.expected or 200) or not is_whole:
            self._note(asking, f"{response.status} {body[-300:]!r}")

    def _note(self, asking: Asking, problem: str) -> None:
        """Note what should not have been."""
        self.unexpected = [*self.unexpected, f"{asking}: {problem}"][:10]

    async def _leave_while_sending(self, asking: Asking) -> str:
        """Send a part of a request and hang up."""
        address = self.server.target.url.removeprefix("http://").split(":")
        head = f"POST {asking.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        message = head.encode() + b"content-length: %d\r\n\r\n" % len(asking.body) + asking.body
        _, writer = await asyncio.open_connection(*address)
        writer.write(message[: round(asking.patience * (len(message) - 1))])
        await asyncio.sleep(asking.patience * 0.01)
        writer.transport.abort()
        return "left while sending"


async def get(connections: Connections, path: str) -> tuple[int, str]:
    """Return a page's status and text."""
    parts: list[bytes] = []
    response = await connections.send("GET", path, b"", lambda _, __, body: parts.append(body))
    return response.status, b"".join(parts).decode()


async def probe(connections: Connections) -> str:
    """Return the answer to a question that has one."""
    parts: list[bytes] = []
    await connections.send("POST", COMPLETIONS, json.dumps(PROBE).encode(), lambda _, __, body: parts.append(body))
    return json.loads(b"".join(parts))["choices"][0]["text"]


async def idle(connections: Connections) -> dict[str, float]:
    """Wait until nothing is answered any more; return what the engine has left after five seconds at most."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + 5
    while True:
        _, text = await get(connections, "/metrics")
        values = {name: _metric(text, name) for name in names}
        if not any(values.values()) or time.monotonic() > end:
            return values
        await asyncio.sleep(0.05)


async def settled(server: Server, descriptors: int = 0) -> dict[str, Any]:
    """Return what a server holds once it has closed its clients' connections, for which it has some seconds."""
    for _ in range(24 if descriptors else 4):
        await asyncio.sleep(0.5)
        state = server.held()
        if state["descriptors"] <= descriptors:
            break
    return state


def _metric(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"llamarium:{name}{{"))


# --- the whole --------------------------------------------------------------------------------------------------------


async def soak(server: Server, number: int, num_clients: int, seed: int = 0) -> dict[str, Any]:
    """Ask a server so many requests, and return what came of them and what is left."""
    with closing(Client(server.target)) as client:
        await client.ready(120)
    connections = Connections(server.target.url, {"Content-Type": "application/json"})
    warm = Soak(server, connections)
    first = chain(of_each_kind(), askings(20 * num_clients, seed + 1))
    await warm.ask_all(first, num_clients)  # every thread, module and buffer is there
    answer, _ = await probe(connections), await idle(connections)
    connections.close()
    before = await settled(server)
    run, start = Soak(server, connections), time.monotonic()
    await run.ask_all(askings(number, seed), num_clients)
    seconds = time.monotonic() - start
    remaining = await idle(connections)
    is_same = await probe(connections) == answer
    status, health = await get(connections, "/health")
    _, metrics = await get(connections, "/metrics")
    connections.close()
    return {
        "requests": number,
        "requests/s": number / seconds,
        "outcomes": {f"{kind}: {outcome}": count for (kind, outcome), count in sorted(run.outcomes.items())},
        "5xx": sum(count for (_, outcome), count in run.outcomes.items() if outcome.startswith("5")),
        "unexpected": run.unexpected + warm.unexpected,
        "bytes a request": slope(run.memory[len(run.memory) // 2 :]),
        "bytes a request, first half": slope(run.memory[: len(run.memory) // 2]),
        "memory": run.memory[:: max(1, len(run.memory) // 40)],
        "before": before,
        "after": await settled(server, before["descriptors"]),
        "preemptions": _metric(metrics, "num_preemptions_total"),
        "bytes on disk, at most": max(run.disk),
        "tokens from disk": _metric(metrics, "prefix_cache_disk_hits_total"),
        "held after": run.held_after,
        "left in the engine": remaining,
        "health": [status, json.loads(health)["status"]],
        "same answer as before": is_same,
    }


def slope(points: list[tuple[int, int]]) -> float:
    """Return bytes a request: the slope of a straight line through measurements; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def end(server: Server) -> int:
    """Tell a server to stop, and return its exit code."""
    server.process.terminate()
    return server.process.wait(60)


def measure(number: int, num_clients: int, model: str | None = None, seed: int = 0) -> dict[str, Any]:
    """Soak a server of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, memory = (str(write_model(folder)), SCARCE) if model is None else (model, "1GiB")
        with started(path, memory, folder / "log") as server:
            results = asyncio.run(soak(server, number, num_clients, seed))
            results["exit code"] = end(server)
        log, recorded = (folder / "log").read_text(), (folder / "record").stat().st_size
    results["model"] = RANDOM if model is None else model
    results["bytes recorded"] = recorded
    results["log"] = {word: log.count(word) for word in ("Traceback", "internal_error", "Exception")}
    return results


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="in sum (default 20000)")
    parser.add_argument("--clients", type=int, default=2 * SLOTS, help=f"that ask at once (default {2 * SLOTS})")
    parser.add_argument("--model", help="what `llamarium serve -m` takes (default: random, with SmolLM2's vocabulary)")
    parser.add_argument("--save", action="store_true", help="write the JSON line to bench/results/ too")
    options = parser.parse_args()
    try:
        results = measure(options.requests, options.clients, options.model)
    except ServerError as error:
        raise SystemExit(f"the server does not start: {error}") from None
    names = ("resident_bytes", "descriptors", "threads", "tasks", "objects", "allocations")
    rows = [{"what": name, "before": results["before"][name], "after": results["after"][name]} for name in names]
    tables = results["after"]["tables"]
    rows += [{"what": name, "before": results["before"]["tables"].get(name), "after": tables[name]} for name in tables]
    rows += [{"what": name, "before": None, "after": count} for name, count in results["outcomes"].items()]
    rows += [
        {"what": f"{name}", "before": None, "after": results[name]}
        for name in ("5xx", "bytes a request", "bytes on disk, at most", "exit code")
    ]
    common.report("soak", options, rows, results)


if __name__ == "__main__":
    main()
