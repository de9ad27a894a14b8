"""What a steered answer takes against a plain one, through the server: alone, and eight side by side.

    python bench/steering.py

One server of the built-in model. Answers of 128 tokens are asked for plain and steered in turn; the direction is the
difference of two prompts, added behind one layer at every position. The claim is the ratio of tokens/s.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx

import common
from beside_page import server

STEER = {"toward": "I love it", "away": "I hate it", "layer": 15, "strength": 1}
TOKENS = 128


def tokens_per_s(client: httpx.Client, streams: int, fields: dict[str, Any]) -> dict[str, float]:
    """Return the tokens/s of answers side by side."""
    body = {"prompt": "The weather is", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True} | fields

    def answer(_: int) -> int:
        reply = client.post("/v1/completions", json=body).raise_for_status().json()
        return reply["usage"]["completion_tokens"]

    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        count = sum(pool.map(answer, range(streams)))
    return {"tokens/s": count / (time.monotonic() - began)}


def main() -> None:
    """Measure and report."""
    options = common.parser(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    with server(options.threads, "--allow-interventions") as client:
        for streams in (1, 8):
            ask = partial(tokens_per_s, client, streams)
            sides = {"steered": partial(ask, {"steer": STEER}), "plain": partial(ask, {})}
            medians = common.alternate(options.rounds, sides)
            rows.append(
                {"streams": streams} | {name: medians[name]["tokens/s"] for name in (*sides, "steered / plain")}
            )
    common.report("steering", options, rows, {"rows": rows})


if __name__ == "__main__":
    main()
