"""Requests in the shapes of programs that are not installed here: frameworks for agents, packages for forms, cn.

tests/clients/ runs the programs themselves. Each sends a call that the server answered with, and its result, back in a
way of its own; with these small models the call has to be made, by `tool_choice`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from clients.scripted_server import CALLS, PRINTED, scripted_server
from serving import CHAT, Running

pytestmark = pytest.mark.torch

NO_EFFECT = "x-llamarium-no-effect"
QUESTION = "Which weather does Paris have?"
RESULT = "It is 21 degrees and sunny in Paris."
PLACE: dict[str, Any] = {"type": "string"}


@dataclass(frozen=True)
class Shape:
    """How a program asks.

    Attributes:
        request: Beside the model, the messages and the tools.
        place: The schema of the tool's argument.
        parameters: Keywords of the arguments' schema, beside those that all have.
        function: Of the tool, beside its name and parameters.
        opening: The messages before the call.
        call: What the message with the call has, beside its role and calls.
        call_keys: The order in which a call's keys come.
        result: What the message with the result has, beside its text.
        no_effect: What the server names of the second request.
    """

    request: Mapping[str, Any] = field(default_factory=dict[str, Any])
    place: Mapping[str, Any] = field(default_factory=lambda: dict(PLACE))
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    function: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opening: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": QUESTION},)
    call: Mapping[str, Any] = field(default_factory=dict[str, Any])
    call_keys: tuple[str, ...] = ("id", "type", "function")
    result: Mapping[str, Any] = field(default_factory=dict[str, Any])
    no_effect: frozenset[str] = frozenset()

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"place": self.place}, "required": ["place"], **self.parameters}


CLOSED = {"additionalProperties": False}
AUTO = {"tool_choice": "auto"}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
NAMED = frozenset({"messages[].name"})
MOST_SAFE = 2**53 - 1  # zod writes it as the bounds of every integer
TIMEOUT = {"type": "integer", "minimum": -MOST_SAFE, "exclusiveMinimum": 0, "maximum": MOST_SAFE}
SHAPES = {
    "agno": Shape(place=PLACE | {"description": "Where"}, call={"content": ""}),
    "ai-sdk": Shape(
        parameters={**CLOSED, "$schema": "http://json-schema.org/draft-07/schema#"}, call={"content": None}
    ),
    "autogen": Shape(
        AUTO | {"stream": False},
        PLACE | {"description": "place", "title": "Place"},
        CLOSED,
        {"strict": False},
        ({"content": "Solve tasks.", "role": "system"}, {"role": "user", "name": "user", "content": QUESTION}),
        {"content": None},
        ("id", "function", "type"),
        no_effect=NAMED,
    ),
    "continue": Shape(
        STREAMED,
        opening=({"role": "system", "content": "You are an agent."}, {"role": "user", "content": QUESTION}),
        call={"content": ""},
    ),
    "crewai": Shape(
        AUTO,
        parameters=CLOSED,
        function={"strict": True},
        opening=({"role": "system", "content": "You are a reporter."}, {"role": "user", "content": f"\n{QUESTION}"}),
        call={"content": None},
        result={"name": "texts-weather"},
        no_effect=NAMED,
    ),
    "haystack": Shape({"stream": False, "n": 1}, call_keys=("type", "function", "id")),
    "litellm-proxy": Shape(
        parameters={"title": "Weather"},
        call={"provider_specific_fields": {"refusal": None}},
        call_keys=("id", "function", "type"),
        no_effect=frozenset({"messages[].provider_specific_fields"}),
    ),
    "llama-index": Shape(
        AUTO | {"parallel_tool_calls": True, "stream": True},
        PLACE | {"title": "Place"},
        CLOSED,
        {"strict": False},
        call={"content": None},
        call_keys=("type", "function", "id"),
    ),
    "opencode": Shape(
        AUTO | STREAMED,
        parameters={
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "properties": {"place": PLACE, "timeout": TIMEOUT},
        },
        opening=({"role": "system", "content": "You are a program."}, {"role": "user", "content": f'"{QUESTION}"'}),
        call={"content": ""},
    ),
    "qwen-code": Shape(
        STREAMED,
        PLACE | {"minLength": 1},
        CLOSED,
        opening=(
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": [{"type": "text", "text": "This sets up the context."}]},
            {"role": "assistant", "content": "Thanks for the context!"},
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        ),
        call={"content": None},
        result={"content": [{"type": "text", "text": f"Command: weather\nOutput: {RESULT}"}]},
    ),
    "semantic-kernel": Shape(AUTO | {"stream": False}),
    "smolagents": Shape(
        {"stop": ["Observation:", "Calling tools:"]},
        opening=(
            {"role": "system", "content": [{"type": "text", "text": "You solve tasks by calls."}]},
            {"role": "user", "content": [{"type": "text", "text": f"New task:\n{QUESTION}"}]},
        ),
        call={"content": None},
    ),
    "strands": Shape(
        STREAMED,
        opening=({"role": "user", "content": [{"text": QUESTION, "type": "text"}]},),
        call_keys=("function", "id", "type"),
    ),
}


def ask(running: Running, body: dict[str, Any]) -> tuple[dict[str, Any], str, set[str]]:
    """The message of an answer, whole or put together from a stream; why it ended; what had no effect."""
    got = httpx.post(running.url + CHAT, json=body, timeout=60)
    assert got.status_code == 200, got.text
    no_effect = set(got.headers.get(NO_EFFECT, "").split(",")) - {""}
    if not body.get("stream"):
        (choice,) = got.json()["choices"]
        return choice["message"], choice["finish_reason"], no_effect
    state = ChatCompletionStreamState()
    for line in got.text.splitlines():
        if line.startswith("data: {"):
            state.handle_chunk(ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")))
    (made,) = state.get_final_completion().choices
    return made.message.model_dump(mode="json", exclude_none=True), made.finish_reason, no_effect


def ordered(value: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value[key] for key in keys}


@pytest.mark.parametrize("name", SHAPES)
def test_a_framework_calls_its_tool_and_goes_on(talker: Running, name: str) -> None:
    shape = SHAPES[name]
    described = {"name": "texts-weather", "description": "The weather of a place", **shape.function}
    tools = [{"type": "function", "function": described | {"parameters": shape.schema}}]
    body = {"model": "small", **shape.request, "tools": tools, "max_tokens": 64, "temperature": 0}

    opening = {"messages": [*shape.opening]}
    message, reason, _ = ask(talker, body | opening | {"tool_choice": "required", "parallel_tool_calls": False})
    (call,) = message["tool_calls"]
    assert (reason, call["type"], call["function"]["name"]) == ("tool_calls", "function", "texts-weather")
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, shape.schema)

    called = {"role": "assistant", **shape.call, "tool_calls": [ordered(call, shape.call_keys)]}
    told = {"role": "tool", "tool_call_id": call["id"], "content": RESULT, **shape.result}
    message, _, no_effect = ask(talker, body | {"messages": [*shape.opening, called, told]})
    assert message.get("content") or message.get("tool_calls")
    assert no_effect == shape.no_effect


DSPY = '[[ ## question ## ]]\n{question}\n\nOutputs will be a JSON object.\n\n{\n  "city": "{city}"\n}'
CITY: dict[str, Any] = {
    "description": "A city.",
    "title": "City",
    "type": "object",
    "properties": {"city": {"title": "City", "type": "string"}},
    "required": ["city"],
}
PARTS = [{"type": "text", "text": "Which city is the capital of France?"}]
FORMS: Mapping[str, dict[str, Any]] = {
    "dspy": {
        "messages": [{"role": "system", "content": DSPY}, {"role": "user", "content": QUESTION}],
        "response_format": {"type": "json_object"},
    },
    "outlines": {
        "messages": [{"role": "user", "content": QUESTION}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "default", "strict": True, "schema": CITY | CLOSED},
        },
    },
    "guidance": {
        "messages": [{"role": "user", "content": PARTS}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "json_schema", "schema": CITY, "strict": True},
        },
        "logprobs": True,
        "top_logprobs": 5,
        "tools": None,
        **STREAMED,
    },
    "outlines for SGLang": {
        "messages": [{"role": "user", "content": QUESTION}],
        "regex": '\\{"city": "(Paris|Rome)"\\}',
    },
    "smolagents' code in JSON": {
        "messages": [{"role": "user", "content": PARTS}],
        "stop": ["Observation:", "Calling tools:"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": CITY | CLOSED, "name": "ThoughtAndCodeAnswer", "strict": True},
        },
    },
    "litellm for Fireworks": {
        "messages": [{"role": "user", "content": QUESTION}],
        "response_format": {"type": "json_object", "schema": CITY},
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_a_package_gets_an_answer_with_a_form(talker: Running, name: str) -> None:
    message, reason, no_effect = ask(talker, FORMS[name] | {"model": "small", "max_tokens": 64, "temperature": 0})
    assert (reason, no_effect) == ("stop", {"stop"} & FORMS[name].keys())
    value = json.loads(message["content"])
    jsonschema.validate(value, {"type": "object"} if name == "dspy" else CITY)


def test_the_server_that_programs_are_run_against_answers_as_is_written(smollm2_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "texts-join", "parameters": CITY}}
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": {"left": PLACE, "right": PLACE}}}}
    with scripted_server(smollm2_path) as (running, requests):
        ask_it = {"messages": [{"role": "user", "content": "Join."}]}
        message, reason, _ = ask(running, ask_it | {"tools": [tool]})
        assert (message["tool_calls"][0]["function"]["name"], reason) == ("texts-join", "tool_calls")
        assert json.loads(ask(running, ask_it | {"response_format": form})[0]["content"]) == CALLS["join"]
        assert ask(running, ask_it)[0]["content"] == "Hello."
        assert PRINTED in ask(running, {"messages": [{"role": "user", "content": PRINTED}]})[0]["content"]
        assert [request["status"] for request in requests] == [200] * 4


def test_code_agents_stop_where_their_code_ends(talker: Running) -> None:
    """smolagents' agent that writes code: parts, a step of its own that it repeats, and stops that end the next."""
    stops = ["Observation:", "Calling tools:", "</code>"]
    dialog = [
        ("system", "You solve tasks by code, between <code> and </code>."),
        ("user", "New task:\nRepeat exactly: <code>print(1)</code>"),
        ("assistant", "<code>\nprint(1)\n</code>\nCalling tools:\n[{'id': 'call_1', 'type': 'function'}]"),
        ("user", "Observation:\nExecution logs:\n1\nLast output from code snippet:\nNone"),
    ]
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in dialog]
    body = {"model": "small", "messages": messages, "stop": stops, "max_tokens": 64, "temperature": 0}
    message, reason, no_effect = ask(talker, body)
    assert reason in ("stop", "length") and no_effect == set()
    assert message["content"] and not any(stop in message["content"] for stop in stops)
