"""The requests of `soak.py`: good ones of many kinds, such whose clients leave, and bad ones of many kinds.

A share of the good ones is as real programs send them: unknown names, hints, tools that do not run here, schemas as
libraries write them, stop strings beside forms, responses that branch, and questions why a prefix missed.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llamarium.load_test.workload import WORDS

ABORTED, BAD = 0.30, 0.05  # of all requests
COMPLETIONS, CHAT, RESPONSES, EXPLAIN = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/cache/explain"


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
        branch: Where among the newest responses the one stands that it goes on from, 0 to 1; None goes on from none.
    """

    kind: str
    path: str
    body: bytes
    expected: int = 200
    leaves: str = ""
    patience: float = 0.0
    branch: float | None = None


SCHEMAS: tuple[dict[str, Any], ...] = (
    {  # as zod writes records
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    {  # as Pydantic writes optional fields and formats
        "title": "Event",
        "type": "object",
        "properties": {
            "at": {"title": "At", "type": "string", "format": "date-time"},
            "count": {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "null"}], "default": None},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 4},
        },
        "required": ["at"],
    },
    {  # as OpenAPI writes numbers, with a reference
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number", "format": "double"}}}},
        "type": "object",
        "properties": {"id": {"type": "integer", "format": "int64"}, "at": {"$ref": "#/$defs/Point"}},
        "required": ["id", "at"],
        "additionalProperties": False,
    },
)
FOREIGN: tuple[dict[str, Any], ...] = (
    {"type": "web_search"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "files", "server_url": "https://mcp.example"},
)
HINTS: tuple[dict[str, Any], ...] = (
    {"metadata": {"run": "soak"}, "user": "someone"},
    {"service_tier": "auto", "prompt_cache_key": "soak"},
    {"safety_identifier": "someone", "store": False},
)


def schema_form(source: random.Random) -> dict[str, Any]:
    """Return a form by a schema, with stop strings, which have no effect within it."""
    json_schema = {"name": "answer", "schema": source.choice(SCHEMAS)}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}, "stop": ["\n\n", "END"]}


FORMS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda source: {"structured_outputs": {"choice": source.sample(WORDS, 3)}},
    lambda source: {"structured_outputs": {"regex": f"[a-f]{{{source.randrange(1, 9)}}}"}},
    lambda source: {"response_format": {"type": "json_object"}},
    schema_form,
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
    body |= as_programs_send(source, has_form=has_form)
    words = words[:40] if "tools" in body else words  # both fit into the context
    return CHAT, body | {"messages": [shared, {"role": "user", "content": " ".join(words)}]}


def as_programs_send(source: random.Random, *, has_form: bool) -> dict[str, Any]:
    """Return fields of a chat completion as real programs send them: without effect here, or tools."""
    fields: dict[str, Any] = {}
    if source.random() < 0.3:
        fields |= {f"zz_client_{source.randrange(10_000)}": [1, {"any": "value"}]}  # names of no field
    if source.random() < 0.3:
        fields |= source.choice(HINTS)
    if not has_form and source.random() < 0.2:
        function = {"name": "look_up", "description": "Look something up.", "parameters": source.choice(SCHEMAS)}
        fields |= {"tools": [source.choice(FOREIGN), {"type": "function", "function": function}]}
        if source.random() < 0.5:
            fields |= {"tool_choice": "required", "stop": ["END"]}
    return fields


def response(source: random.Random, *, streams: bool) -> Asking:
    """Return a request for a response, which may go on from an earlier one."""
    body: dict[str, Any] = {
        "input": " ".join(source.choices(WORDS, k=source.randrange(2, 12))),
        "max_output_tokens": source.randrange(1, 13),
        "stream": streams,
        "tools": [source.choice(FOREIGN)],
        f"zz_client_{source.randrange(10_000)}": True,
    }
    branch = source.random() if source.random() < 0.7 else None
    return Asking("stream" if streams else "whole", RESPONSES, json.dumps(body).encode(), branch=branch)


def explanation(source: random.Random) -> Asking:
    """Return a question where two prompts part."""
    words = source.choices(WORDS, k=30)
    earlier, now = " ".join(words), " ".join([*words[: source.randrange(30)], "otherwise"])
    body = {
        name: {"messages": [{"role": "user", "content": text}]} for name, text in (("earlier", earlier), ("now", now))
    }
    return Asking("whole", EXPLAIN, json.dumps(body).encode())


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


def of_each_kind() -> Iterator[Asking]:
    """Yield a request with each form, schema and kind of tool, so that what they need is imported."""
    source, shared = random.Random(0), {"max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    forms = [form(source) for form in FORMS]
    for schema in SCHEMAS:
        json_schema = {"name": "answer", "schema": schema}
        forms.append({"response_format": {"type": "json_schema", "json_schema": json_schema}, "stop": ["END"]})
        for choice in ("auto", "required"):
            function = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
            forms.append({"tools": [FOREIGN[0], function], "tool_choice": choice})
    for streams in (False, True):
        for form in forms:
            yield Asking("whole", CHAT, json.dumps(shared | form | {"stream": streams}).encode())
        yield response(source, streams=streams)
    yield explanation(source)
    for path, body, status in BADS:
        yield Asking("bad", path, body.encode(), status)


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
        if stays and source.random() < 0.2:
            yield response(source, streams=streams) if source.random() < 0.8 else explanation(source)
            continue
        path, fields = good(source, streams=streams, has_form=stays and source.random() < 0.1)
        if stays:
            yield Asking("stream" if streams else "whole", path, json.dumps(fields).encode())
            continue
        fields |= {
            "max_tokens": 100 if "tools" in fields else 200,
            "ignore_eos": True,
        }  # which takes longer than they wait
        leaves = source.choice(("waiting", "waiting", "reading" if streams else "waiting", "sending"))
        patience = source.randrange(1, 9) if leaves == "reading" else source.random()
        yield Asking("aborted", path, json.dumps(fields).encode(), 0, leaves, patience)
