"""OpenAI's responses as its own client sees them: whole, as numbered events, with tools, and stored."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

import llamarium
from llamarium.api import Llama
from llamarium.cli.main import main
from llamarium.errors import OptionError
from llamarium.server.hints import HEADER
from llamarium.server.openai.responses.store import ResponseStore
from llamarium.tokenizer.tools.request import ToolRequest
from scripted import ScriptedLlama
from serving import Running, serving

pytestmark = pytest.mark.torch

RESPONSES = "/v1/responses"
DIALOG: Any = [{"role": "user", "content": "Hello!"}]
ASKED: dict[str, Any] = {"input": "Hello!", "max_output_tokens": 12, "temperature": 0}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=30) as found:
        yield found


class Colour(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["red", "green"]
    is_warm: bool


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream: named by their types, and numbered."""
    found = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def joined(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a stream's events make, and a check that they are those of its last event."""
    first, second, *between, last = told
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"] == second["response"]
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    assert last["type"] == f"response.{last['response']['status']}"
    items: list[dict[str, Any]] = []
    for event in between:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
        assert event["output_index"] == len(items) - 1
        item = items[-1]
        if "item_id" in event:
            assert event["item_id"] == item["id"]
        match kind:
            case "content_part.added":
                assert event["part"]["text"] == "" and event["content_index"] == len(item["content"]) == 0
                item["content"].append(event["part"])
            case "output_text.delta":
                item["content"][0]["text"] += event["delta"]
                item["content"][0]["logprobs"] += event["logprobs"]
            case "output_text.done":
                assert event["text"] == item["content"][0]["text"]
                assert event["logprobs"] == item["content"][0]["logprobs"]
            case "content_part.done":
                assert event["part"] == item["content"][0]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
            case "output_item.done":
                assert event["item"] == item | {"status": event["item"]["status"]}
                items[-1] = event["item"]
            case _:
                assert kind == "output_item.added", kind
    assert items == last["response"]["output"]
    return items


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_response_is_what_the_library_answers(client: openai.OpenAI, llama: Llama) -> None:
    expected = llama.chat(DIALOG, temperature=0.0, max_tokens=12)
    made = client.responses.create(model="small", **ASKED, metadata={"a": "b"}, user="me")
    assert made.output_text == expected.text
    (item,) = made.output
    assert (item.type, item.status) == ("message", "incomplete")
    assert made.id.startswith("resp_") and item.id is not None and item.id.startswith("msg_")
    assert (made.status, made.model, made.metadata, made.user) == ("incomplete", "small", {"a": "b"}, "me")
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage is not None
    assert made.usage.input_tokens == len(expected.prompt_ids)
    assert (made.usage.output_tokens, made.usage.total_tokens) == (12, 12 + len(expected.prompt_ids))
    again = client.responses.create(model="small", **ASKED)
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 20


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5, "seed": 7, "top_p": 0.9},
        {"temperature": 2.0, "seed": 3, "include": LOGPROBS, "top_logprobs": 2},
    ],
)
def test_a_stream_joined_is_the_whole_response(http: httpx.Client, options: dict[str, Any]) -> None:
    asked = ASKED | {"max_output_tokens": 60, **options}
    whole = http.post(RESPONSES, json=asked).json()
    told = events(http.post(RESPONSES, json=asked | {"stream": True}).text)
    assert without_ids(joined(told)) == without_ids(whole["output"])
    changing = ("id", "created_at", "completed_at", "output", "usage")
    last = told[-1]["response"]
    assert {k: v for k, v in last.items() if k not in changing} == {k: v for k, v in whole.items() if k not in changing}
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert len([event for event in told if event["type"] == "response.output_text.delta"]) > 20


def test_the_official_client_reads_the_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "input": "Hello!", "temperature": 1.5, "extra_body": {"seed": 3}}
    with client.responses.stream(**asked, text_format=Colour) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and final.completed_at is not None
    assert "".join(pieces) == final.output_text
    assert isinstance(final.output_parsed, Colour)


def test_the_same_tokens_alone_and_beside_others(running: Running, http: httpx.Client) -> None:
    asked: list[dict[str, Any]] = [
        {
            "input": f"Tell me {'more ' * (i % 5)}about {i}",
            "max_output_tokens": 5 + i,
            "temperature": 1.2 if i % 2 else 0,
            "extra_body": {"seed": i},
        }
        for i in range(16)
    ]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int, body: dict[str, Any]) -> str:
                if i % 3:
                    return (await client.responses.create(model="small", **body)).output_text
                stream = await client.responses.create(model="small", **body, stream=True)
                return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

            return await asyncio.gather(*(one(i, body) for i, body in enumerate(asked)))

    beside = asyncio.run(together())
    alone = []
    for body in asked:
        extra = body.pop("extra_body")
        output = http.post(RESPONSES, json=body | extra).json()["output"]
        alone.append(output[0]["content"][0]["text"])
    assert beside == alone
    assert len(set(beside)) > 8


def test_instructions_items_and_earlier_answers_are_the_dialog(client: openai.OpenAI, llama: Llama) -> None:
    first = client.responses.create(model="small", **ASKED, include=LOGPROBS)  # type: ignore[arg-type]
    plain = [
        {"role": "system", "content": "Be brief."},
        *DIALOG,
        {"role": "assistant", "content": first.output_text},
        {"role": "system", "content": "Briefer."},
        {"role": "user", "content": "Hello!"},
    ]
    expected = llama.chat(plain, temperature=0.0, max_tokens=12)
    given: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo!"}]},
        *first.output,
        {"role": "developer", "content": "Briefer.", "type": "message"},
        *DIALOG,
    ]
    made = client.responses.create(model="small", **ASKED | {"input": given, "instructions": "Be brief."})
    assert made.output_text == expected.text
    assert made.instructions == "Be brief."


def test_logprobs_are_those_of_the_library(client: openai.OpenAI, llama: Llama) -> None:
    expected = llama.chat(DIALOG, temperature=0.0, max_tokens=12, logprobs=2).completions[0].logprobs
    made = client.responses.create(model="small", **ASKED, include=LOGPROBS, top_logprobs=2)  # type: ignore[arg-type]
    told = made.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert expected is not None and told is not None
    assert [one.logprob for one in told] == [one.logprob for one in expected]
    assert all(len(one.top_logprobs) == 2 for one in told)


def test_the_official_client_parses_responses(client: openai.OpenAI) -> None:
    made = client.responses.parse(
        model="small", input="Hello!", text_format=Colour, temperature=1.5, extra_body={"seed": 2}
    )
    assert isinstance(made.output_parsed, Colour)
    assert made.status == "completed"
    assert made.text is not None and made.text.format is not None and made.text.format.type == "json_schema"


# --- tools ------------------------------------------------------------------------------------------------------------

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PLOT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "points": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 3},
        "style": {"enum": ["dotted", "solid"]},
    },
    "required": ["points", "style"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": CITY, "strict": None},
    {"type": "function", "name": "plot", "parameters": PLOT, "description": "Draw a line", "strict": False},
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "plot", "description": "Draw a line", "parameters": PLOT}},
]
CALL = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
WEATHER = {"type": "function_call", "name": "get_weather", "arguments": '{"city": "Köln"}', "status": "completed"}


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": "completed", "content": [part]}


@pytest.fixture(scope="module")
def llama3(llama3_tokenizer_path: Path) -> ScriptedLlama:
    return ScriptedLlama(llamarium.load_tokenizer(llama3_tokenizer_path))


@pytest.fixture(scope="module")
def scripted(llama3: ScriptedLlama) -> Iterator[Running]:
    with serving(llama3) as running:
        yield running


def will_say(llama: ScriptedLlama, text: str) -> None:
    """Answer a request with `TOOLS` with a text, in which the tag is the control token."""
    tokenizer = llama.tokenizer
    words, tag, calls = text.partition("<|python_tag|>")
    ids = tokenizer.encode(words, add_special_tokens=False)
    ids += [tokenizer.special_tokens[tag], *tokenizer.encode(calls, add_special_tokens=False)] if tag else []
    llama.will_say(ids, len(tokenizer.chat(DIALOG, tools=ToolRequest.read(CHAT_TOOLS).offered)))


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("It is warm.", [message("It is warm.")]),
        ("", [message("")]),
        (CALL, [WEATHER]),
        (f"Let me see.<|python_tag|>{CALL}", [message("Let me see."), WEATHER]),
        (
            "[get_weather(city='Köln'), plot(points=[1], style='solid')]",
            [
                WEATHER,
                {
                    "type": "function_call",
                    "name": "plot",
                    "arguments": '{"points": [1], "style": "solid"}',
                    "status": "completed",
                },
            ],
        ),
    ],
)
def test_calls_are_items(llama3: ScriptedLlama, scripted: Running, text: str, output: list[dict[str, Any]]) -> None:
    will_say(llama3, text)
    asked = ASKED | {"tools": TOOLS, "max_output_tokens": 200}
    whole = scripted.post(RESPONSES, **asked).json()
    told = events(scripted.post(RESPONSES, **asked, stream=True).text)
    assert without_ids(whole["output"]) == without_ids(joined(told)) == output
    assert whole["status"] == told[-1]["response"]["status"] == "completed"
    ids = [item["call_id"] for item in whole["output"] if "call_id" in item]
    assert len(set(ids)) == len(ids) and all(one.startswith("call_") for one in ids)
    with (
        openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client,
        client.responses.stream(model="small", **asked) as stream,
    ):
        final = stream.get_final_response()
    assert [item.arguments for item in final.output if item.type == "function_call"] == [
        item["arguments"] for item in output if "arguments" in item
    ]


@pytest.mark.parametrize(("text", "output"), [(CALL, [WEATHER]), ('{"name": "x"}', [message('{"name": "x"}')])])
def test_an_answer_beside_tools_is_calls_or_of_its_form(
    llama3: ScriptedLlama, scripted: Running, text: str, output: list[dict[str, Any]]
) -> None:
    will_say(llama3, text)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}}
    asked = ASKED | {"tools": TOOLS, "text": form, "max_output_tokens": 200}
    whole = scripted.post(RESPONSES, **asked).json()
    assert whole["status"] == "completed" and without_ids(whole["output"]) == output
    assert without_ids(joined(events(scripted.post(RESPONSES, **asked, stream=True).text))) == output


def test_a_call_that_breaks_off_is_incomplete(llama3: ScriptedLlama, scripted: Running) -> None:
    will_say(llama3, CALL)
    asked = ASKED | {"tools": TOOLS, "max_output_tokens": 15}
    whole = scripted.post(RESPONSES, **asked).json()
    (item,) = whole["output"]
    assert (whole["status"], item["status"]) == ("incomplete", "incomplete")
    assert '{"city": "Köln"}'.startswith(item["arguments"]) and item["arguments"]
    told = joined(events(scripted.post(RESPONSES, **asked, stream=True).text))
    assert without_ids(told) == without_ids(whole["output"])


def test_log_probabilities_come_with_what_is_said_and_not_with_calls(llama3: ScriptedLlama, scripted: Running) -> None:
    will_say(llama3, f"Let me see.<|python_tag|>{CALL}")
    asked = ASKED | {"tools": TOOLS, "max_output_tokens": 200, "include": LOGPROBS}
    whole = scripted.post(RESPONSES, **asked).json()["output"]
    assert [item["type"] for item in whole] == ["message", "function_call"]
    assert "".join(one["token"] for one in whole[0]["content"][0]["logprobs"]) == "Let me see."
    assert without_ids(joined(events(scripted.post(RESPONSES, **asked, stream=True).text))) == without_ids(whole)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "plot"}),
        ({"type": "function", "name": "plot"}, {"plot"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
            {"get_weather"},
        ),
        ("none", set()),
    ],
)
def test_choices_are_held(http: httpx.Client, choice: Any, names: set[str]) -> None:
    for seed in range(3):
        asked = ASKED | {"max_output_tokens": 200, "temperature": 1.3, "seed": seed, "tools": TOOLS}
        made = http.post(RESPONSES, json=asked | {"tool_choice": choice, "parallel_tool_calls": False}).json()
        calls = [item for item in made["output"] if item["type"] == "function_call"]
        assert bool(calls) == bool(names) and {call["name"] for call in calls} <= names and len(calls) <= 1
        assert made["tool_choice"] == choice and made["parallel_tool_calls"] is False
        if made["status"] == "completed":
            for call in calls:
                jsonschema.validate(json.loads(call["arguments"]), CITY if call["name"] == "get_weather" else PLOT)


def test_calls_and_results_go_back_in(client: openai.OpenAI, llama: Llama) -> None:
    asked: dict[str, Any] = {"model": "small", "tools": TOOLS, "max_output_tokens": 100}
    made = client.responses.create(
        **asked, input="Hello!", tool_choice={"type": "function", "name": "plot"}, extra_body={"seed": 1}
    )
    call = made.output[0]
    assert call.type == "function_call"
    items: Any = [
        *DIALOG,
        {"role": "assistant", "content": "Look:"},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
        {"role": "user", "content": "Again?"},
    ]
    function = {"name": "plot", "arguments": call.arguments}
    expected = [
        *DIALOG,
        {
            "role": "assistant",
            "content": "Look:",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
        {"role": "user", "content": "Again?"},
    ]
    offered = ToolRequest.read(CHAT_TOOLS).offered
    for given, meant in ((items, expected), ([items[0], *items[2:]], None)):
        again = client.responses.create(**asked, input=given)
        meant = meant or [expected[0], expected[1] | {"content": None}, *expected[2:]]
        assert again.usage is not None
        assert again.usage.input_tokens == len(llama.tokenizer.chat(meant, tools=offered))


CALLS = [{"type": "function_call", "call_id": x, "name": "weather", "arguments": "{}"} for x in "ab"]
RESULT = {"type": "function_call_output", "call_id": "a", "output": "x"}
DEEP: dict[str, Any] = {}
for _ in range(20):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
DEEP_PATH = "tools[0].parameters" + ".properties.a" * 16 + ".type"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": -2}, "seed"),
        ({"stop": "x"}, "stop"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [*DIALOG, {"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[1].call_id"),
        ({"input": [*DIALOG, *CALLS, CALLS[0]]}, "input[3].call_id"),
        ({"input": [*DIALOG, *CALLS, RESULT]}, "input[2].call_id"),
        ({"input": [*DIALOG, CALLS[0] | {"arguments": "3"}, RESULT]}, "input[1].arguments"),
        ({"input": [*DIALOG, *CALLS[:1], CALLS[1] | {"arguments": "[1]"}, RESULT]}, "input[2].arguments"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format.name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"uniqueItems": True}}}},
            "text.format.schema",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}, "tools": TOOLS},
            "text.format.schema",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "x"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, None),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"name": "x"}}, "tool_choice.type"),
        ({"tools": [TOOLS[0] | {"parameters": DEEP}]}, DEEP_PATH),
    ],
)
def test_a_refusal_names_the_field(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    answer = http.post(RESPONSES, json=ASKED | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("perhaps", "tool_choice: Input should be 'none', 'auto' or 'required'"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": []},
            "tool_choice.tools has 0 items; expected at least 1",
        ),
        ({"type": "custom"}, "tool_choice.type is 'custom'; expected function, allowed_tools"),
        ({}, "tool_choice.type is missing"),
        (5, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    ],
)
def test_a_choice_is_told_what_it_lacks(http: httpx.Client, choice: Any, message: str) -> None:
    answer = http.post(RESPONSES, json=ASKED | {"tools": TOOLS, "tool_choice": choice})
    assert answer.json()["error"]["message"] == message


def test_a_long_path_is_the_clients_in_the_message_too(http: httpx.Client) -> None:
    error = http.post(RESPONSES, json=ASKED | {"tools": [TOOLS[0] | {"parameters": DEEP}]}).json()["error"]
    assert error["message"].startswith(f"{DEEP_PATH[:199]}… is nested deeper")


def test_false_and_null_are_as_if_not_given(http: httpx.Client) -> None:
    nulls = ("previous_response_id", "conversation", "prompt", "reasoning", "tools", "tool_choice", "include", "text")
    asked = ASKED | {"store": False, "background": False, "truncation": "disabled"} | dict.fromkeys(nulls)
    one, other = (http.post(RESPONSES, json=body).json()["output"] for body in (asked, ASKED))
    assert without_ids(one) == without_ids(other)


def test_a_stream_that_breaks_says_so(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    run, left = llama.runner.run, 5

    def break_down(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        logits = run(*args, **kwargs)
        return logits * float("nan") if left < 0 else logits

    monkeypatch.setattr(llama.runner, "run", break_down)
    with serving(llama) as running:
        told = events(running.post(RESPONSES, **ASKED, stream=True).text)
        assert [event["type"] for event in told[-2:]] == ["error", "response.failed"]
        assert told[-2]["code"] == "model_error"
        failed = told[-1]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert any(event["type"] == "response.output_text.delta" for event in told)
        assert failed["output"] == []  # the message did not come to its end
        assert not any(event["type"].endswith((".done", "completed", "incomplete")) for event in told)
        left = 0
        assert running.post(RESPONSES, **ASKED).status_code == 500
        running.wait(running.is_idle)


# --- stored responses -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ResponseStore:
    return ResponseStore(2**20, tmp_path / "responses" if request.param == "file" else None)


@pytest.fixture
def stored(llama: Llama, store: ResponseStore) -> Iterator[Running]:
    with serving(llama, responses=store, api_keys=("mine", "another")) as found:
        yield found


def test_a_stored_response_is_gone_on_from_with_its_own_key_alone(stored: Running, llama: Llama) -> None:
    at = {"base_url": f"{stored.url}/v1", "max_retries": 0}
    with openai.OpenAI(**at, api_key="mine") as mine, openai.OpenAI(**at, api_key="another") as another:
        how: dict[str, Any] = {"model": "small", "temperature": 0, "max_output_tokens": 12}
        first = mine.responses.create(**how, input="Hello!", instructions="Be brief.")
        assert first.model_dump()["store"] is True and mine.responses.retrieve(first.id) == first
        *_, last = mine.responses.create(**how, input="Again?", previous_response_id=first.id, stream=True)
        second = last.response  # pyright: ignore
        said = [*DIALOG, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Again?"}]
        assert second.output_text == llama.chat(said, temperature=0.0, max_tokens=12).text  # without instructions
        assert second.previous_response_id == first.id and mine.responses.retrieve(second.id) == second
        third = mine.responses.create(**how, input=DIALOG, previous_response_id=second.id, store=False)
        said += [{"role": "assistant", "content": second.output_text}, *DIALOG]
        assert third.output_text == llama.chat(said, temperature=0.0, max_tokens=12).text
        for client, name in ((another, first.id), (mine, third.id), (mine, "../responses")):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(name)
            with pytest.raises(openai.NotFoundError):
                client.responses.delete(name)
            with pytest.raises(openai.NotFoundError) as refused:
                client.responses.create(**how, input="x", previous_response_id=name)
            assert refused.value.param == "previous_response_id"  # pyright: ignore
        mine.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="is stored for this key"):
            mine.responses.retrieve(first.id)
        assert mine.responses.retrieve(second.id) == second  # which has the items of the first one
        with pytest.raises(openai.BadRequestError, match="starting_after is not a field"):
            mine.responses.retrieve(second.id, extra_query={"starting_after": 1})


def test_calls_of_a_stored_response_get_their_results(stored: Running) -> None:
    with httpx.Client(base_url=stored.url, headers={"x-api-key": "mine"}, timeout=30) as http:
        asked = ASKED | {"tools": TOOLS, "max_output_tokens": 100, "seed": 1}
        made = http.post(RESPONSES, json=asked | {"tool_choice": {"type": "function", "name": "plot"}}).json()
        (call,) = made["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        on = http.post(RESPONSES, json=asked | {"input": [result], "previous_response_id": made["id"]})
        assert on.status_code == 200, on.text
        whole = http.post(RESPONSES, json=asked | {"input": [*DIALOG, call, result]}).json()
        assert on.json()["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        unknown = [result | {"call_id": "x"}]
        error = http.post(RESPONSES, json=asked | {"input": unknown, "previous_response_id": made["id"]}).json()[
            "error"
        ]
        assert error["param"] == "input[0].call_id"
        assert HEADER not in http.post(RESPONSES, json=ASKED | {"store": False}).headers  # it has an effect here


def test_nothing_is_stored_unless_asked(http: httpx.Client) -> None:
    made = http.post(RESPONSES, json=ASKED).json()
    assert made["store"] is False
    assert http.get(f"{RESPONSES}/{made['id']}").status_code == 404
    missing = http.post(RESPONSES, json=ASKED | {"previous_response_id": made["id"]})
    assert missing.status_code == 404 and "--store-responses" in missing.json()["error"]["message"]


def test_a_store_is_bounded_and_forgets_what_was_least_recently_used(store: ResponseStore) -> None:
    for name in ("a", "b", "c"):
        assert store.put(name, "me", {"text": name * 300_000})
    assert store.get("a", "me") == {"text": "a" * 300_000}
    assert store.put("d", "me", {"text": "d" * 300_000})
    assert [store.get(name, "me") is not None for name in "abcd"] == [True, False, True, True]
    assert not store.put("e", "me", {"text": "e" * 2**20}) and store.get("d", "me") is not None
    assert store.delete("d", "me") and not store.delete("d", "me")


def test_a_file_is_read_by_the_next_server_and_what_is_damaged_is_a_miss(tmp_path: Path) -> None:
    path, owner = tmp_path / "responses", "a-key-of-mine"
    first, beside = ResponseStore(2**20, path), ResponseStore(2**20, path)
    for name in ("whole", "damaged"):
        assert first.put(name, owner, {"text": name * 99})
    assert beside.get("whole", owner) == {"text": "whole" * 99}
    assert path.stat().st_mode & 0o777 == 0o600 and owner.encode() not in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b"damageddamaged", b"damagedDamaged"))
    after = ResponseStore(2**20, path)
    assert after.get("whole", owner) is not None and after.get("damaged", owner) is None
    for other in ("text", None, 5):
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("update responses set content = ?", (other,))
        assert after.get("whole", owner) is None
    assert ResponseStore(1, path).get("whole", owner) is None  # the bound holds at the start, too
    path.write_bytes(b"x" * path.stat().st_size)
    assert (after.get("whole", owner), after.put("x", owner, {}), after.delete("whole", owner)) == (None, False, False)
    for other in (path, tmp_path, tmp_path / "none" / "x"):
        with pytest.raises(OptionError, match="cannot store responses"):
            ResponseStore(2**20, other)


def test_a_file_without_a_bound_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--store-file", str(tmp_path / "x")]) == 2
    assert "--store-responses" in capsys.readouterr().err
