"""The requests of `soak.py`: good ones of many kinds, such whose clients leave, and bad ones of many kinds."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llamarium.load_test.workload import WORDS

ABORTED, BAD = 0.30, 0.05  # of all requests
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Asking:
    """One request, and how its client behaves.

    Attributes:
        kind: As in the table.
        path: The route.
        body: What is sent.
        expected: The status that it should get; 0 where the client leaves.
        leaves: "sending", "waiting" or "reading"; empty if it stays.
        patience: How long it stays, as a share of what others take, or in events.
    """

    kind: str
    path: str
    body: bytes
    expected: int = 200
    leaves: str = ""
    patience: float = 0.0


FORMS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda source: {"structured_outputs": {"choice": source.sample(WORDS, 3)}},
    lambda source: {"structured_outputs": {"regex": f"[a-f]{{{source.randrange(1, 9)}}}"}},
    lambda source: {"response_format": {"type": "json_object"}},
)


def good(source: random.Random, *, streams: bool, has_form: bool) -> tuple[str, dict[str, Any]]:
    """Return a route and a body that it answers."""
    words = source.choices(WORDS, k=min(200, round(source.lognormvariate(3, 1)) + 1))
    body: dict[str, Any] = {
        "max_tokens": source.randrange(1, 33),
        "temperature": source.choice((0, 0.8)),
        "stream": streams,
    }
    if body["temperature"] and source.random() < 0.1:
        body |= {"n": source.randrange(2, 4)}
    if has_form:
        body |= source.choice(FORMS)(source)
    if source.random() < 0.05:
        body |= {"cache_salt": f"salt {source.random()}"}
    if source.random() < 0.5:
        return COMPLETIONS, body | {"prompt": " ".join(words), "logprobs": source.choice((None, 2))}
    shared = {"role": "system", "content": " ".join(WORDS[: source.choice((10, 40))])}
    return CHAT, body | {"messages": [shared, {"role": "user", "content": " ".join(words)}]}


BADS: tuple[tuple[str, str, int], ...] = (
    (COMPLETIONS, "no JSON", 400),
    (COMPLETIONS, '{"prompt": "a", "prompt": "b"}', 400),
    (COMPLETIONS, '{"prompt": "a", "temperature": NaN}', 400),
    (COMPLETIONS, '{"prompt": {"deep": ' + "[" * 99 + "]" * 99 + "}}", 400),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": "ten"}', 400),
    (COMPLETIONS, '{"prompt": "a", "temprature": 1}', 400),
    (COMPLETIONS, '{"prompt": "a", "suffix": "b"}', 400),
    (COMPLETIONS, '{"prompt": [99999999]}', 400),
    (COMPLETIONS, '{"prompt": "' + "word " * 600 + '"}', 400),
    (COMPLETIONS, '{"prompt": "a", "structured_outputs": {"regex": "("}}', 400),
    (COMPLETIONS, '{"prompt": "a", "model": "another"}', 404),
    (CHAT, '{"messages": []}', 400),
    (CHAT, '{"messages": [{"role": "user", "content": 3}], "stream": true}', 400),
    ("/v1/nothing", "{}", 404),
    ("/v1/models", "{}", 405),
)


def askings(number: int, seed: int = 0) -> Iterator[Asking]:
    """Yield requests of all kinds, the same for the same seed."""
    source = random.Random(seed)
    for _ in range(number):
        kind, streams = source.random(), source.random() < 0.5
        if kind < BAD:
            path, body, status = source.choice(BADS)
            yield Asking("bad", path, body.encode(), status)
            continue
        stays = kind > BAD + ABORTED
        path, fields = good(source, streams=streams, has_form=stays and source.random() < 0.1)
        if stays:
            yield Asking("stream" if streams else "whole", path, json.dumps(fields).encode())
            continue
        fields |= {"max_tokens": 200, "ignore_eos": True}  # which takes longer than they wait
        leaves = source.choice(("waiting", "waiting", "reading" if streams else "waiting", "sending"))
        patience = source.randrange(1, 9) if leaves == "reading" else source.random()
        yield Asking("aborted", path, json.dumps(fields).encode(), 0, leaves, patience)
