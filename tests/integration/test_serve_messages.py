"""Anthropic's protocol as its own client sees it: messages whole and streamed, tools, counts and errors."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import pydantic
import pytest

import llamarium
from llamarium.api import Llama
from llamarium.generation.text_engine import TextEngine
from llamarium.sampling.grammar.compiler import GrammarCompiler
from llamarium.server.settings import Settings
from llamarium.tokenizer.tools.request import ToolRequest
from scripted import ScriptedLlama
from serving import Running, serving, small_engine

pytestmark = pytest.mark.torch

MESSAGES = "/v1/messages"
DIALOG: Any = [{"role": "user", "content": "Hello!"}]
ASKED: dict[str, Any] = {"messages": DIALOG, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as found:
        yield found


def create(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """Ask for a message; the sampler's fields are none of the client's own any more."""
    asked = ASKED | fields
    extra = {name: asked.pop(name) for name in ("temperature", "top_p", "top_k", "seed") if name in asked}
    return client.messages.create(model="small", **asked, extra_body=extra)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    found = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make, and a check of their order."""
    assert told[0]["type"] == "message_start"
    message: dict[str, Any] = told[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    fragments, is_open = "", False
    for event in told[1:-2]:
        kind = event["type"]
        if kind == "ping":
            continue
        assert is_open == (kind != "content_block_start")
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            fragments, is_open = "", True
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            delta, block = event["delta"], message["content"][-1]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                assert delta["type"] == "input_json_delta"
                fragments += delta["partial_json"]
        else:
            assert (kind, event["index"]) == ("content_block_stop", len(message["content"]) - 1)
            is_open = False
            if fragments:
                message["content"][-1]["input"] = json.loads(fragments)
    assert not is_open
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    return message | told[-2]["delta"] | {"usage": told[-2]["usage"]}


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two messages say the same; what was cached and what things are called may differ."""

    def plain(message: dict[str, Any]) -> Any:
        usage = message["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
        return content, message["stop_reason"], message["stop_sequence"], usage["output_tokens"], total

    return plain(one) == plain(other)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_is_what_the_library_answers(client: anthropic.Anthropic, llama: Llama) -> None:
    expected = llama.chat(DIALOG, temperature=0.0, max_tokens=12)
    message = create(client)
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected.text)
    assert (message.type, message.role, message.model) == ("message", "assistant", "small")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id.startswith("msg_")
    assert message._request_id is not None and message._request_id.startswith("req-")
    usage = message.usage
    assert usage.output_tokens == 12
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(expected.prompt_ids)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.5, "seed": 7}, {"temperature": 2.0, "seed": 3, "top_k": 900}]
)
def test_a_stream_joined_is_the_whole_message(
    client: anthropic.Anthropic, running: Running, options: dict[str, Any]
) -> None:
    asked = ASKED | {"max_tokens": 60, **options}
    whole = running.post(MESSAGES, **asked).json()
    told = events(running.post(MESSAGES, **asked, stream=True).text)
    assert alike(joined(told), whole)
    extra = {name: asked.pop(name) for name in ("temperature", "seed", "top_k") if name in asked}
    with client.messages.stream(model="small", **asked, extra_body=extra) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 20
    assert "".join(pieces) == whole["content"][0]["text"] == final.content[0].text  # type: ignore[union-attr]
    assert final.usage.output_tokens == 60


def test_the_same_tokens_alone_and_beside_others(running: Running) -> None:
    asked = [
        {
            "messages": [{"role": "user", "content": f"Tell me {'more ' * (i % 5)}about {i}"}],
            "max_tokens": 5 + i,
            "extra_body": {"temperature": 1.2 if i % 2 else 0, "seed": i},
        }
        for i in range(16)
    ]

    async def together() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as client:

            async def one(i: int, body: dict[str, Any]) -> str:
                if i % 3:
                    message = await client.messages.create(model="small", **body)
                    return "".join(block.text for block in message.content if block.type == "text")
                async with client.messages.stream(model="small", **body) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(one(i, body) for i, body in enumerate(asked)))

    beside = asyncio.run(together())
    alone = []
    for body in asked:
        extra = body.pop("extra_body")
        alone.append(running.post(MESSAGES, **body, **extra).json()["content"][0]["text"])
    assert beside == alone
    assert len(set(beside)) > 8


def test_system_and_blocks_are_the_dialogs_text(running: Running, llama: Llama) -> None:
    plain = [{"role": "system", "content": "Be brief."}, *DIALOG]
    expected = llama.chat(plain, temperature=0.0, max_tokens=12).text
    mark = {"type": "ephemeral"}
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!", "cache_control": mark, "citations": None}]
    for system, content in (
        ("Be brief.", "Hello!"),
        ([{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": mark}], parts),
    ):
        asked = ASKED | {"messages": [{"role": "user", "content": content}], "system": system, "cache_control": mark}
        assert running.post(MESSAGES, **asked).json()["content"][0]["text"] == expected
    within = [{"role": "system", "content": "Be brief."}, *DIALOG]
    assert running.post(MESSAGES, **ASKED | {"messages": within}).json()["content"][0]["text"] == expected


def test_a_stop_sequence_is_named_and_no_part_of_the_text(client: anthropic.Anthropic, running: Running) -> None:
    text = create(client, max_tokens=40).content[0].text  # type: ignore[union-attr]
    stop = text[10:14]
    message = create(client, max_tokens=40, stop_sequences=["never this", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]
    told = events(running.post(MESSAGES, **ASKED | {"max_tokens": 40}, stop_sequences=[stop], stream=True).text)
    assert told[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
    assert joined(told)["content"] == [{"type": "text", "text": message.content[0].text}]  # type: ignore[union-attr]


def test_an_answer_that_has_been_begun_goes_on(running: Running, llama: Llama) -> None:
    text = llama.chat(DIALOG, temperature=0.0, max_tokens=12).text
    ids = [*llama.tokenizer.chat(DIALOG), *llama.tokenizer.encode(text[:9], add_special_tokens=False)]
    expected = llama.generate(ids, temperature=0.0, max_tokens=6).text
    begun = [*DIALOG, {"role": "assistant", "content": text[:9]}]
    message = running.post(MESSAGES, **ASKED | {"messages": begun, "max_tokens": 6}).json()
    assert message["content"][0]["text"] == expected
    count = running.post(f"{MESSAGES}/count_tokens", messages=begun).json()
    assert count == {"input_tokens": len(ids)}


def test_an_empty_answer_has_no_block(llama3_tokenizer_path: Path) -> None:
    llama = ScriptedLlama(llamarium.load_tokenizer(llama3_tokenizer_path))
    llama.will_say([], len(llama.tokenizer.chat(DIALOG)))
    with serving(llama) as running:
        whole = running.post(MESSAGES, **ASKED).json()
        assert (whole["content"], whole["stop_reason"]) == ([], "end_turn")
        told = events(running.post(MESSAGES, **ASKED, stream=True).text)
        assert [event["type"] for event in told] == ["message_start", "message_delta", "message_stop"]


def test_tokens_are_counted_as_they_are_run(client: anthropic.Anthropic, llama: Llama) -> None:
    asked: dict[str, Any] = {"messages": [*DIALOG, *DIALOG], "system": "Be brief."}
    count = client.messages.count_tokens(model="small", **asked).input_tokens
    usage = create(client, **asked).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert count == len(llama.tokenizer.chat([{"role": "system", "content": "Be brief."}, *DIALOG, *DIALOG]))


def test_what_was_run_before_is_counted_apart(running: Running) -> None:
    body = ASKED | {"messages": [{"role": "user", "content": "Count me twice, " * 10}]}
    first, second = (running.post(MESSAGES, **body).json()["usage"] for _ in range(2))
    streamed = joined(events(running.post(MESSAGES, **body, stream=True).text))["usage"]
    other = running.post(MESSAGES, **body, cache_salt="mine").json()["usage"]
    total = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["input_tokens"] <= 2
    assert second["cache_read_input_tokens"] == total - second["input_tokens"]
    assert streamed == second
    assert other["cache_read_input_tokens"] == 0
    assert other["input_tokens"] == total


class Colour(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["red", "green"]
    is_warm: bool


def test_the_official_client_parses_answers(client: anthropic.Anthropic, running: Running) -> None:
    message = client.messages.parse(
        model="small", messages=DIALOG, max_tokens=200, output_format=Colour, extra_body={"temperature": 1.5, "seed": 1}
    )
    assert isinstance(message.parsed_output, Colour)
    schema = Colour.model_json_schema()
    form = {"format": {"type": "json_schema", "schema": schema}}
    asked = ASKED | {"max_tokens": 200, "temperature": 1.5, "seed": 4, "output_config": form}
    told = joined(events(running.post(MESSAGES, **asked, stream=True).text))
    jsonschema.validate(json.loads(told["content"][0]["text"]), schema)
    assert told["stop_reason"] == "end_turn"


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
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    {"name": "plot", "description": "Draw a line", "input_schema": PLOT, "type": "custom"},
]
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "plot", "description": "Draw a line", "parameters": PLOT}},
]
CALL = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
WEATHER = {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln"}}


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
    llama.will_say(ids, len(tokenizer.chat(DIALOG, tools=ToolRequest.read(OPENAI_TOOLS).offered)))


@pytest.mark.parametrize(
    ("text", "content", "reason"),
    [
        ("It is warm.", [{"type": "text", "text": "It is warm."}], "end_turn"),
        (CALL, [WEATHER], "tool_use"),
        (f"Let me see.<|python_tag|>{CALL}", [{"type": "text", "text": "Let me see."}, WEATHER], "tool_use"),
        (
            "[get_weather(city='Köln'), plot(points=[1], style='solid')]",
            [WEATHER, {"type": "tool_use", "name": "plot", "input": {"points": [1], "style": "solid"}}],
            "tool_use",
        ),
    ],
)
def test_calls_are_blocks(
    llama3: ScriptedLlama, scripted: Running, text: str, content: list[dict[str, Any]], reason: str
) -> None:
    will_say(llama3, text)
    asked = ASKED | {"tools": TOOLS, "max_tokens": 200}
    whole = scripted.post(MESSAGES, **asked).json()
    told = joined(events(scripted.post(MESSAGES, **asked, stream=True).text))
    for message in (whole, told):
        assert [{k: v for k, v in block.items() if k != "id"} for block in message["content"]] == content
        assert message["stop_reason"] == reason
        ids = [block["id"] for block in message["content"] if "id" in block]
        assert len(set(ids)) == len(ids)
    with anthropic.Anthropic(base_url=scripted.url, api_key="none") as client:
        asked.pop("temperature")
        with client.messages.stream(model="small", **asked) as stream:
            final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [
        block["input"] for block in content if block["type"] == "tool_use"
    ]


def test_of_a_call_that_breaks_off_there_is_what_came_whole(llama3: ScriptedLlama, scripted: Running) -> None:
    will_say(llama3, '{"name": "plot", "parameters": {"style": "solid", "points": [1, 2, 3, 4, 5, 6, 7, 8, 9]}}')
    asked = ASKED | {"tools": TOOLS, "max_tokens": 22}
    whole = scripted.post(MESSAGES, **asked).json()
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"][0]["input"] == {"style": "solid"}
    told = events(scripted.post(MESSAGES, **asked, stream=True).text)
    fragments = "".join(event["delta"].get("partial_json", "") for event in told if "delta" in event)
    assert fragments.startswith('{"style": "solid", "points": [1')
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ({"type": "any"}, {"get_weather", "plot"}, 9),
        ({"type": "tool", "name": "plot"}, {"plot"}, 9),
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "plot"}, 1),
        ({"type": "none"}, set(), 0),
    ],
)
def test_choices_are_held(running: Running, choice: dict[str, Any], names: set[str], most: int) -> None:
    for seed in range(3):
        asked = ASKED | {"max_tokens": 200, "temperature": 1.3, "seed": seed, "tools": TOOLS, "tool_choice": choice}
        message = running.post(MESSAGES, **asked).json()
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        assert bool(calls) == bool(names) and {call["name"] for call in calls} <= names and len(calls) <= most
        if message["stop_reason"] == "tool_use":
            for call in calls:
                jsonschema.validate(call["input"], CITY if call["name"] == "get_weather" else PLOT)


def test_calls_and_results_go_back_in(running: Running, llama: Llama, client: anthropic.Anthropic) -> None:
    made = create(
        client, tools=TOOLS, tool_choice={"type": "tool", "name": "plot"}, max_tokens=200, temperature=1.0, seed=1
    )
    (call, *_) = [block for block in made.content if block.type == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}]
    dialog: Any = [
        *DIALOG,
        {"role": "assistant", "content": [{"type": "text", "text": "Look:"}, call]},
        {"role": "user", "content": [*blocks, {"type": "text", "text": "Again?"}]},
    ]
    function = {"name": "plot", "arguments": json.dumps(call.input)}
    expected = [
        *DIALOG,
        {
            "role": "assistant",
            "content": "Look:",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
        {"role": "user", "content": "Again?"},
    ]
    offered = ToolRequest.read(OPENAI_TOOLS).offered
    ids = llama.tokenizer.chat(expected, tools=offered)
    assert client.messages.count_tokens(model="small", messages=dialog, tools=TOOLS).input_tokens == len(ids)
    answer = create(client, messages=dialog, tools=TOOLS)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(ids)
    blocks[0]["is_error"] = True
    expected[2]["content"] = "Error: done"
    count = client.messages.count_tokens(model="small", messages=dialog, tools=TOOLS).input_tokens
    assert count == len(llama.tokenizer.chat(expected, tools=offered))


FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
DEEP: dict[str, Any] = {}
for _ in range(20):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
DEEP_PATH = "tools[0].input_schema" + ".properties.a" * 16 + ".type"


# --- errors -----------------------------------------------------------------------------------------------------------


def error_of(answer: httpx.Response | dict[str, Any]) -> dict[str, Any]:
    """An error in Anthropic's form."""
    told = answer if isinstance(answer, dict) else answer.json()
    assert told.keys() == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["error"].keys() <= {"type", "message", "details"}
    if isinstance(answer, httpx.Response):
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == told["request_id"]
    return told["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "text", "text": 5}]}, "system[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, None),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "text"}}}},
            "output_config.format.schema",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "any", "name": "plot"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOLS[0] | {"input_schema": DEEP}]}, DEEP_PATH),
        ({"tools": TOOLS, "messages": [*DIALOG, {"role": "assistant", "content": "So"}]}, "messages[1]"),
        (
            {
                "system": "x",
                "messages": [*DIALOG, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}],
            },
            "messages[1].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "user", "content": [WEATHER | {"id": "a"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [*DIALOG, {"role": "assistant", "content": [WEATHER | {"id": "a"}]}]},
            "messages[1].content[0]",
        ),
        (
            {"messages": [*DIALOG, {"role": "assistant", "content": [WEATHER | {"id": "a", "input": 5}]}]},
            "messages[1].content[0].input",
        ),
    ],
)
def test_a_refusal_names_the_field(running: Running, fields: dict[str, Any], param: str | None) -> None:
    answer = running.post(MESSAGES, **ASKED | fields)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert param is None or error["details"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages contains only the beginning of an answer; "),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice: expected an object"),
        ({"messages": [5]}, "messages[0]: expected an object"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any", "name": "plot"}},
            "tool_choice.name is set, but tool_choice.type is any",
        ),
        ({"tools": [TOOLS[0] | {"input_schema": DEEP}]}, f"{DEEP_PATH[:199]}… is nested deeper"),
    ],
)
def test_a_refusal_is_in_the_clients_words(running: Running, fields: dict[str, Any], message: str) -> None:
    answer = running.post(MESSAGES, **ASKED | fields)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["message"].startswith(message), answer.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOLS[0] | {"strict": True, "input_schema": {"uniqueItems": True}}]}, "tools[0].input_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "text"}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_what_a_message_is_refused_for_is_not_counted(
    running: Running, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: pytest.fail("a grammar was compiled"))
    counted = {name: value for name, value in (ASKED | fields).items() if name not in ("max_tokens", "temperature")}
    told = [error_of(running.post(path, **body)) for path, body in
            ((MESSAGES, ASKED | fields), (f"{MESSAGES}/count_tokens", counted))]  # fmt: skip
    assert told[0] == told[1] and told[0]["details"]["param"] == param


def test_every_refusal_has_anthropics_form(llama: Llama, running: Running) -> None:
    with serving(llama, api_keys=("key",), max_body_bytes=1000) as closed:

        def ask(method: str = "POST", path: str = MESSAGES, **how: Any) -> tuple[int, str]:
            headers = {"x-api-key": "key", "content-type": "application/json"} | how.pop("headers", {})
            answer = httpx.request(method, closed.url + path, headers=headers, **how)
            return answer.status_code, error_of(answer)["type"]

        assert ask(headers={"x-api-key": "other"}) == (401, "authentication_error")
        assert ask(headers={"host": "evil.example"}) == (403, "permission_error")
        assert ask(headers={"origin": "https://evil.example"}) == (403, "permission_error")
        assert ask(path=f"{MESSAGES}/batches", json={}) == (404, "not_found_error")
        assert ask("GET") == (405, "invalid_request_error")
        assert ask(json=ASKED | {"model": "claude"}) == (404, "not_found_error")
        assert ask(content=b" " * 2000) == (413, "request_too_large")
        assert ask(content=b"{}", headers={"content-type": "text/plain"}) == (415, "invalid_request_error")
        for body in (b"{", b"[1", b"NaN", b'{"a": 1, "a": 2}', b'"\xff"', b"[]", b'"\\ud800"', b"[" * 100):
            assert ask(content=body) == (400, "invalid_request_error")
        other = httpx.get(f"{closed.url}/v1/messagesx", headers={"x-api-key": "key"})
        assert other.json()["error"]["code"] == "not_found"  # OpenAI's


def test_a_server_that_is_still_loading_says_so(llama: Llama) -> None:
    settings = Settings(port=0)
    go = threading.Event()

    def load(_: Any) -> tuple[Llama, TextEngine]:
        go.wait(10)
        return llama, small_engine(llama, settings)

    running = Running(load, settings)
    running.wait(lambda: running.server.started)
    for path, body in ((MESSAGES, ASKED), (f"{MESSAGES}/count_tokens", {"messages": DIALOG})):
        refused = running.post(path, **body)
        assert (refused.status_code, error_of(refused)["type"]) == (503, "overloaded_error")
        assert refused.headers["retry-after"] == "1"
    go.set()
    running.wait(lambda: running.service.state == "ready")
    running.stop()


def test_either_header_lets_in(llama: Llama) -> None:
    with serving(llama, api_keys=("key",)) as closed:
        how: dict[str, Any] = {"base_url": closed.url, "max_retries": 0}
        for client in (anthropic.Anthropic(api_key="key", **how), anthropic.Anthropic(auth_token="key", **how)):
            assert create(client).role == "assistant"
        for name, value in (("x-api-key", "key"), ("authorization", "Bearer key")):
            assert httpx.post(closed.url + MESSAGES, json=ASKED, headers={name: value}).status_code == 200
        with pytest.raises(anthropic.AuthenticationError) as error:
            create(anthropic.Anthropic(api_key="other", **how))
        assert error.value.type == "authentication_error"
        assert error.value.error_code == "invalid_api_key"
        assert error.value.request_id == error.value.body["request_id"]  # type: ignore[index]


def test_headers_that_are_too_large_or_late_have_the_form_too(llama: Llama) -> None:
    head = f"POST {MESSAGES}?beta=true HTTP/1.1\r\nhost: localhost\r\n".encode()
    limits: list[tuple[dict[str, Any], bytes, int]] = [
        ({"max_header_bytes": 2000}, b"x: " + b"y" * 3000, 431),
        ({"header_timeout_s": 0.3}, b"", 408),
    ]
    for limit, rest, status in limits:
        with serving(llama, **limit) as running, socket.create_connection(("127.0.0.1", running.port)) as client:
            client.settimeout(10)
            client.sendall(head + rest)
            parts = []
            while part := client.recv(65536):
                parts.append(part)
        first, _, body = b"".join(parts).partition(b"\r\n\r\n")
        assert int(first.split()[1]) == status
        assert error_of(json.loads(body))["message"]


def test_who_comes_when_the_queue_is_full_is_told_when_to_come_again(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _gate(llama, monkeypatch)
    with serving(llama, max_num_seqs=1, max_queue=0) as running:
        thread = threading.Thread(target=running.post, args=(MESSAGES,), kwargs=ASKED)
        thread.start()
        running.wait(lambda: running.service.in_flight == 1)
        with pytest.raises(anthropic.RateLimitError) as error:
            create(anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0))
        assert error.value.type == "rate_limit_error"
        assert int(error.value.response.headers["retry-after"]) >= 1
        gate.set()
        thread.join()


def _gate(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold a model's passes until it is set."""
    gate, run = threading.Event(), llama.runner.run

    def wait(*args: Any, **kwargs: Any) -> Any:
        gate.wait(10)
        return run(*args, **kwargs)

    monkeypatch.setattr(llama.runner, "run", wait)
    return gate


def test_a_stream_that_waits_has_pings_and_one_that_breaks_says_so(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _gate(llama, monkeypatch)
    with serving(llama, ping_s=0.05, request_timeout_s=1.5) as running:
        asked = ASKED | {"stream": True}
        with httpx.stream("POST", running.url + MESSAGES, json=asked, timeout=30) as answer:
            parts = answer.iter_text()
            waited = next(parts) + next(parts)
            time.sleep(1.5)  # its time is over, whatever the machine did meanwhile
            gate.set()
            *others, last = events(waited + "".join(parts))
        assert [event["type"] for event in others[:2]] == ["ping", "ping"]
        assert not any(event["type"] in ("message_delta", "message_stop") for event in others)
        assert error_of(last)["type"] == "timeout_error"
        gate.clear()
        told: list[str] = []
        thread = threading.Thread(target=lambda: told.append(running.post(MESSAGES, **ASKED).text))
        thread.start()
        running.wait(lambda: running.service.in_flight == 1)
        thread.join(1.7)
        gate.set()
        thread.join()
        assert error_of(json.loads(told[0]))["details"]["error_code"] == "request_timeout"


def test_a_stream_that_breaks_in_the_middle_raises_in_the_client(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    run, left = llama.runner.run, 5

    def break_down(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        logits = run(*args, **kwargs)
        return logits * float("nan") if left < 0 else logits

    monkeypatch.setattr(llama.runner, "run", break_down)
    with serving(llama) as running:
        asked = {key: value for key, value in ASKED.items() if key != "temperature"}
        client = anthropic.Anthropic(base_url=running.url, api_key="x", max_retries=0)
        with pytest.raises(anthropic.APIStatusError) as error, client.messages.stream(model="small", **asked) as stream:
            for _ in stream:
                pass
        assert error.value.type == "api_error"
        left = 5
        told = events(running.post(MESSAGES, **ASKED, stream=True).text)
        assert told[-1]["type"] == "error"
        assert not any(event["type"] in ("message_delta", "message_stop") for event in told)
        assert error_of(told[-1])["details"]["error_code"] == "model_error"
        running.wait(running.is_idle)
