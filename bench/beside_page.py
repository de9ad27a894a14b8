"""A small chat's first token while the page has a grid of patches computed over all layers, against alone.

    python bench/beside_page.py

One server (`llamarium serve`, the built-in model). A round is some chats alone, then chats without a pause while a grid
runs, each a prompt of its own that no cache holds. The claim is the ratio of the medians; the grid's time shows that
it comes to an end too.
"""

import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import httpx

import common

TEXTS = [f"The capital of {name} is a city that many people visit in spring, and it is" for name in ("France", "Italy")]
_numbers = itertools.count()


@contextlib.contextmanager
def server(threads: int, *words: str) -> Generator[httpx.Client]:
    """Serve the built-in model during the body, with other words of the command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "llamarium", "serve", "--port", str(port), "--threads", str(threads), *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            while process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait()


def first_token_s(client: httpx.Client) -> float:
    """Return the seconds until a chat's first token, of 16."""
    text = f"{next(_numbers)}: name a colour, please."
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16, "stream": True}
    began, first_s = time.monotonic(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not first_s and '"content":"' in line and '"content":""' not in line:
                first_s = time.monotonic() - began
    return first_s


def grid_s(client: httpx.Client) -> float:
    """Return the seconds of a grid of patches over all layers and tokens."""
    base, source = (client.post("/inspect/passes", json={"text": text}).json() for text in TEXTS)
    body = {"source_ids": [token["id"] for token in source["tokens"]], "token_id": 5}
    began = time.monotonic()
    answer = client.post(f"/inspect/passes/{base['id']}/patches", json=body)
    assert '"type":"end"' in answer.text, answer.text[-200:]
    return time.monotonic() - began


def main() -> None:
    """Measure and report."""
    options = common.parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    with server(options.threads) as client, ThreadPoolExecutor(1) as pool:
        first_token_s(client)
        for _ in range(options.rounds):
            alone = [first_token_s(client) for _ in range(10)]
            grid = pool.submit(grid_s, client)
            with_grid: list[float] = []
            while not grid.done():
                with_grid.append(first_token_s(client))
            rows.append({
                "alone s": median(alone), "beside s": median(with_grid), "ratio": median(with_grid) / median(alone),
                "worst s": max(with_grid), "chats": len(with_grid), "grid s": grid.result(),
            })  # fmt: skip
    common.report("beside-page", options, rows, {"rows": rows, "ratio": median(row["ratio"] for row in rows)})


if __name__ == "__main__":
    main()
