"""Tools over HTTP: what the official client sends, and the calls that come back, whole and streamed."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

import llamarium
from llamarium.api import Llama
from llamarium.tokenizer.tools.request import ToolRequest
from scripted import ScriptedLlama
from serving import Running, serving, small_llama

pytestmark = pytest.mark.torch

QUESTION: dict[str, Any] = {"role": "user", "content": "Is it warm in Köln?"}
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
PLOT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "plot",
        "description": "Draw a line",
        "parameters": {
            "type": "object",
            "properties": {
                "points": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 3},
                "style": {"enum": ["dotted", "solid"]},
            },
            "required": ["points", "style"],
            "additionalProperties": False,
        },
    },
}
TOOLS: Any = [WEATHER, PLOT]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "plot"}}
ASKED: dict[str, Any] = {"messages": [QUESTION], "tools": TOOLS, "temperature": 0, "model": "small"}
SPELLINGS = ("<|eot_id|>", "<|im_end|>", "<|python_tag|>", "<|im_start|>system", "<|start_header_id|>")


@pytest.fixture(scope="module")
def llama3(llama3_tokenizer_path: Path) -> ScriptedLlama:
    return ScriptedLlama(llamarium.load_tokenizer(llama3_tokenizer_path))


@pytest.fixture(scope="module")
def scripted(llama3: ScriptedLlama) -> Iterator[Running]:
    with serving(llama3) as running:
        yield running


@pytest.fixture(scope="module")
def small(smollm2_path: Path) -> Llama:
    return small_llama(smollm2_path)


@pytest.fixture(scope="module")
def running(small: Llama) -> Iterator[Running]:
    """Random weights: whatever is not held, is noise."""
    with serving(small) as running:
        yield running


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def will_say(llama: ScriptedLlama, text: str, **asked: Any) -> None:
    """Answer a request with a text, in which the tag is the control token."""
    tokenizer, fields = llama.tokenizer, ASKED | asked
    words, tag, calls = text.partition("<|python_tag|>")
    ids = tokenizer.encode(words, add_special_tokens=False)
    ids += [tokenizer.special_tokens[tag], *tokenizer.encode(calls, add_special_tokens=False)] if tag else []
    tools = ToolRequest.read(fields["tools"], fields.get("tool_choice")).offered
    llama.will_say(ids, len(tokenizer.chat(fields["messages"], tools=tools)))


@contextmanager
def told_in(running: Running, form: Any) -> Iterator[None]:
    """Have a server tell its model of tools in a form."""
    service = running.service
    own, service.settings = service.settings, dataclasses.replace(service.settings, tool_form=form)
    try:
        yield
    finally:
        service.settings = own


def joined(stream: Any) -> list[dict[str, Any]]:
    """What a stream says of each answer, and a check that calls come as OpenAI's do."""
    answers: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            answer = answers.setdefault(choice.index, {"content": None, "calls": [], "finish_reason": None})
            assert answer["finish_reason"] is None, "nothing follows the end"
            if choice.delta.content is not None:
                answer["content"] = (answer["content"] or "") + choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.index == len(answer["calls"]):
                    assert (call.type, call.function.arguments) == ("function", "")
                    answer["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.index == len(answer["calls"]) - 1, "calls do not overlap"
                    assert call.id is call.type is call.function.name is None and call.function.arguments
                    answer["calls"][-1][2] += call.function.arguments
            answer["finish_reason"] = choice.finish_reason
    return [answers[i] for i in range(len(answers))]


def told(choice: Any) -> dict[str, Any]:
    """The same of a whole answer."""
    calls = [[call.id, call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    return {"content": choice.message.content, "calls": calls, "finish_reason": choice.finish_reason}


def without_ids(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer | {"calls": [call[1:] for call in answer["calls"]]} for answer in answers]


CALL = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
ANSWERS = [
    ("It is warm.", "It is warm.", [], "stop"),
    (CALL, None, [["get_weather", '{"city": "Köln"}']], "tool_calls"),
    (f"Let me see.<|python_tag|>{CALL}", "Let me see.", [["get_weather", '{"city": "Köln"}']], "tool_calls"),
    (
        "[get_weather(city='a'), plot(points=[1], style='solid')]",
        None,
        [["get_weather", '{"city": "a"}'], ["plot", '{"points": [1], "style": "solid"}']],
        "tool_calls",
    ),
    ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', [], "stop"),
    ('{"name": "get_weather", "parameters": {"city": 3,', None, [["get_weather", '{"city": 3']], "tool_calls"),
]


@pytest.mark.parametrize(("text", "content", "calls", "reason"), ANSWERS)
def test_calls_in_a_free_answer(
    llama3: ScriptedLlama, scripted: Running, text: str, content: str | None, calls: Any, reason: str
) -> None:
    will_say(llama3, text)
    expected = [{"content": content, "calls": calls, "finish_reason": reason}]
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**ASKED)
        assert without_ids([told(whole.choices[0])]) == expected
        assert without_ids(joined(client.chat.completions.create(**ASKED, stream=True))) == expected
    ids = [call.id for call in whole.choices[0].message.tool_calls or ()]
    assert all(one.startswith("call_") for one in ids) and len(set(ids)) == len(calls)


# --- calls that are held ----------------------------------------------------------------------------------------------

HELD: dict[str, Any] = ASKED | {"tool_choice": "required", "temperature": 1.5, "max_tokens": 120}


def check(name: str, arguments: str) -> None:
    (schema,) = (tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("parallel", [True, False])
def test_held_calls_follow_their_schemas_and_stream_as_they_are(
    running: Running, client: openai.OpenAI, form: str, parallel: bool
) -> None:
    num_calls = 0
    with told_in(running, form):
        for seed in range(3):
            asked = HELD | {"seed": seed, "n": 2, "parallel_tool_calls": parallel, "tools": [PLOT]}
            whole = [told(choice) for choice in client.chat.completions.create(**asked).choices]
            assert without_ids(joined(client.chat.completions.create(**asked, stream=True))) == without_ids(whole)
            for answer in whole:
                assert answer["content"] is None
                assert parallel or len(answer["calls"]) == 1
                complete = answer["calls"][: None if answer["finish_reason"] == "tool_calls" else -1]
                num_calls += len(complete)
                for _, name, arguments in complete:
                    check(name, arguments)
    assert num_calls >= 5


def test_held_calls_in_python(running: Running, client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": ["x", 1]}, "b": {"type": "boolean"}},
        "required": ["b"],
    }
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with told_in(running, "pythonic"):
        for seed in range(4):
            asked = HELD | {"seed": seed, "tools": tools, "parallel_tool_calls": False}
            (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), parameters)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "plot"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "plot"}}]},
        },
    ],
)
def test_a_choice_of_one_tool_is_held(running: Running, client: openai.OpenAI, small: Llama, choice: Any) -> None:
    asked = HELD | {"tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(3):
        (call,) = client.chat.completions.create(**asked, seed=seed).choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "plot"
        check("plot", call.function.arguments)
    prompt = small.tokenizer.chat([QUESTION], tools=ToolRequest.read([PLOT]).offered)
    assert running.post(**asked).json()["usage"]["prompt_tokens"] == len(prompt), "it is told of no other"


class Point(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    x: Literal[1, 22]
    label: Literal["a", "b"] | None


class Draw(pydantic.BaseModel):
    """Draw points."""

    points: list[Point] = pydantic.Field(max_length=2)
    is_closed: bool


def test_the_official_client_parses_calls(running: Running, client: openai.OpenAI) -> None:
    asked: Any = HELD | {"tools": [openai.pydantic_function_tool(Draw)], "parallel_tool_calls": False, "max_tokens": 70}
    for seed in range(3):
        made = client.chat.completions.parse(**asked, seed=seed).choices[0]
        (call,) = made.message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Draw)
        assert made.finish_reason == "tool_calls"
        with client.chat.completions.stream(**asked, seed=seed) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]
    back = [QUESTION, made.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert client.chat.completions.create(**asked | {"messages": back}).usage, "it takes what the client sends back"

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(**asked, seed=2)
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, seed=2, stream=True)]
            return [told(whole.choices[0])], joined(chunks)

    whole, streamed = asyncio.run(ask())
    assert without_ids(whole) == without_ids(streamed)
    assert whole[0]["calls"][0][2] == call.function.arguments


@pytest.mark.parametrize("number", [99, 100])
def test_a_strict_tool_is_held_where_the_model_is_free(llama3: ScriptedLlama, scripted: Running, number: int) -> None:
    asked = ASKED | {"tools": [{"type": "function", "function": PLOT["function"] | {"strict": True}}]}
    arguments = f'{{"points": [{number}], "style": "solid"}}'
    will_say(llama3, f'{{"name": "plot", "parameters": {arguments}}}', tools=asked["tools"])
    (call,) = scripted.post(**asked, max_tokens=30).json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["arguments"] == arguments) is (number < 100), "the schema allows 99 at most"
    will_say(llama3, "It is warm.", tools=asked["tools"])
    assert scripted.post(**asked).json()["choices"][0]["message"]["content"] == "It is warm."


STRICT = [{"type": "function", "function": PLOT["function"] | {"strict": True}}]


def test_stop_ends_the_text_beside_a_strict_tool(llama3: ScriptedLlama, scripted: Running) -> None:
    will_say(llama3, "It is warm. STOP It is cold.", tools=STRICT)
    for streams in (False, True):
        answer = scripted.post(**ASKED | {"tools": STRICT}, stop=["nothing", " STOP"], stream=streams)
        assert "x-llamarium-no-effect" not in answer.headers
        if streams:
            events = [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines()[:-2:2]]
            text = "".join(event["delta"].get("content") or "" for event in events)
            reason = events[-1]["finish_reason"]
        else:
            choice = answer.json()["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == ("It is warm.", "stop")
    scripted.wait(scripted.is_idle)


def test_stop_that_is_never_completed_loses_no_text(llama3: ScriptedLlama, scripted: Running) -> None:
    will_say(llama3, "It is warm. STO", tools=STRICT)
    choice = scripted.post(**ASKED | {"tools": STRICT}, stop="STOP").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is warm. STO", "stop")


def test_stop_has_no_effect_within_a_call_of_a_strict_tool(llama3: ScriptedLlama, scripted: Running) -> None:
    arguments = '{"points": [5], "style": "solid"}'
    will_say(llama3, f'{{"name": "plot", "parameters": {arguments}}}', tools=STRICT)
    choice = scripted.post(**ASKED | {"tools": STRICT}, stop=["solid", "points"]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == (arguments, "tool_calls")


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": None, "response_format": {"type": "json_object"}},
        {"tools": None, "structured_outputs": {"regex": "[a-z]{3}"}},
        {"tools": [WEATHER], "response_format": {"type": "json_object"}},
    ],
)
def test_stop_is_named_where_all_of_the_answer_has_a_form(running: Running, more: dict[str, Any]) -> None:
    asked = ASKED | {"max_tokens": 60, "temperature": 1.0, "seed": 4} | more
    answer = running.post(**asked, stop=["a", "e", '"'])
    assert answer.headers["x-llamarium-no-effect"] == "stop", answer.text
    kept, plain = (one.json()["choices"][0] for one in (answer, running.post(**asked)))
    for one in (kept, plain):
        for call in one["message"].get("tool_calls", ()):
            del call["id"]
    assert kept == plain


def test_one_call_ends_an_answer_where_there_is_to_be_one(llama3: ScriptedLlama, scripted: Running) -> None:
    will_say(llama3, f"{CALL}; {CALL.replace('Köln', 'Bonn')}")
    answers = [scripted.post(**ASKED, parallel_tool_calls=parallel).json() for parallel in (True, False)]
    both, one = (answer["choices"][0] for answer in answers)
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    assert counts[1] < counts[0] / 2 + 1, "what would follow is not generated"
    assert (len(both["message"]["tool_calls"]), len(one["message"]["tool_calls"])) == (2, 1)
    assert both["finish_reason"] == one["finish_reason"] == "tool_calls"
    scripted.wait(scripted.is_idle)


def test_logprobs_are_those_of_calls_too(llama3: ScriptedLlama, scripted: Running) -> None:
    will_say(llama3, CALL)
    whole = scripted.post(**ASKED, logprobs=True).json()
    events = scripted.post(**ASKED, logprobs=True, stream=True).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert streamed == whole["choices"][0]["logprobs"]["content"]
    assert len(streamed) == whole["usage"]["completion_tokens"]


def test_tools_that_nobody_may_call_leave_the_form_to_the_request(client: openai.OpenAI) -> None:
    asked: Any = HELD | {"tool_choice": "none", "response_format": {"type": "json_object"}}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.message.content is not None and answer.message.content.strip().startswith("{")
    assert not answer.message.tool_calls


# --- a form besides ---------------------------------------------------------------------------------------------------

ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["get_weather", "it"]}, "parameters": {"enum": [1, {"city": 3}]}},
    "required": ["name"],
    "additionalProperties": False,
}
FORM: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": ANSWER}}


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "pythonic"])
def test_an_answer_beside_tools_is_calls_or_of_its_form(running: Running, client: openai.OpenAI, form: str) -> None:
    """One grammar holds both, however wild the model: also where an answer looks much like a call."""
    kinds, tokenizer = set[bool](), running.service.tokenizer
    parameters = CITY | {"properties": {"city": {"const": "a"}}}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    begins = {"hermes": "<", "llama3_json": ' "', "pythonic": "["}[form]  # what sets a call apart
    calls, others = ({str(tokenizer.encode(text, add_special_tokens=False)[0]): 15} for text in (begins, '{"'))
    with told_in(running, form):
        for seed in range(4):
            more = {"seed": seed, "n": 4, "tools": tools, "logit_bias": calls if seed % 2 else others}
            asked: Any = HELD | {"tool_choice": "auto", "response_format": FORM} | more
            whole = [told(choice) for choice in client.chat.completions.create(**asked).choices]
            assert without_ids(joined(client.chat.completions.create(**asked, stream=True))) == without_ids(whole)
            for answer in whole:
                kinds.add(bool(answer["calls"]))
                assert answer["finish_reason"] == ("tool_calls" if answer["calls"] else "stop")
                assert [arguments for _, _, arguments in answer["calls"]] in ([], ['{"city": "a"}'])
                if not answer["calls"]:
                    jsonschema.validate(json.loads(answer["content"]), ANSWER)
    assert kinds == {True, False}


def test_what_is_written_as_the_form_is_no_call(llama3: ScriptedLlama, scripted: Running) -> None:
    asked = ASKED | {"response_format": {"type": "json_object"}}
    for text, calls in ((CALL, 1), (json.dumps(json.loads(CALL), ensure_ascii=False, separators=(",", ":")), 0)):
        will_say(llama3, text)
        for more in ({}, {"json_schema": {"type": "object"}, "response_format": None}):
            (choice,) = scripted.post(**asked | more).json()["choices"]
            assert len(choice["message"].get("tool_calls", ())) == calls
            assert choice["message"]["content"] == (None if calls else text)


def test_a_call_that_was_made_twice_is_not_made_again_where_there_is_a_form(running: Running) -> None:
    asked: Any = HELD | {"tool_choice": "auto", "response_format": FORM, "n": 8, "seed": 1, "max_tokens": 30}
    dialog = [QUESTION, called("a"), result("a")]
    twice = [*dialog, called("b"), result("b")]
    asked["logit_bias"] = {str(running.service.tokenizer.encode("<", add_special_tokens=False)[0]): 15}

    def calls(dialog: list[Any], **more: Any) -> list[bool]:
        choices = running.post(**asked | {"messages": dialog} | more).json()["choices"]
        return [bool(choice["message"].get("tool_calls")) for choice in choices]

    assert (
        any(calls([*dialog, called("b", arguments='{"city": "Bonn"}'), result("b")]))
        and not any(calls(twice))
        and any(calls(twice, tool_choice="required"))
    )
    assert any(calls([*twice, {"role": "assistant", "content": "9 C"}, QUESTION]))


# --- what goes in -----------------------------------------------------------------------------------------------------


def called(*ids: str, arguments: str = '{"city": "Köln"}', **more: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(call_id: str, content: Any = "9 C") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_calls_and_results_go_back_in(running: Running, small: Llama) -> None:
    dialog = [QUESTION, called("a", "b"), result("b", "2"), result("a", "1")]
    ids = small.tokenizer.chat(dialog, tools=ToolRequest.read(TOOLS).offered)
    seen = running.post("/apply-template", messages=dialog, tools=TOOLS).json()["prompt"]
    assert seen == small.tokenizer.decode(ids, skip_special_tokens=False)
    assert seen.index("<tool_response>\n1") < seen.index("<tool_response>\n2")
    assert running.post("/tokenize", messages=dialog, tools=TOOLS).json()["tokens"] == ids
    answer = running.post(**ASKED | {"messages": dialog}, max_tokens=4).json()
    assert answer["usage"]["prompt_tokens"] == len(ids)
    dialog[3] = result("a", [{"type": "text", "text": "1"}])
    assert running.post("/apply-template", messages=dialog, tools=TOOLS).json()["prompt"] == seen


def schema(**fields: Any) -> list[Any]:
    return [WEATHER, {"type": "function", "function": {"name": "f", "parameters": fields}}]


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


MESSAGE = "messages[1].tool_calls"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": function(name="a b")}, "tools[0].function.name"),
    ({"tools": function(name="<|eot_id|>")}, "tools[0].function.name"),
    ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
    ({"tools": function(strict=1)}, "tools[0].function.strict"),
    ({"tools": function(strict=True, parameters={"type": "string"})}, "tools[0].function.parameters"),
    ({"tools": function(strict=True, parameters={"uniqueItems": True})}, "tools[0].function.parameters"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice.type"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "text"}}}},
     "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"grammar": 'root ::= "a"'}, "grammar"),
    ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"messages": [QUESTION, called("a"), result("b")]}, "messages[2].tool_call_id"),
    ({"messages": [QUESTION, called("a"), result("a"), result("a")]}, "messages[3].tool_call_id"),
    ({"messages": [QUESTION, called("a"), QUESTION, result("a")]}, "messages[3].tool_call_id"),
    ({"messages": [QUESTION, called("a", "b"), result("a")]}, f"{MESSAGE}[1].id"),
    ({"messages": [QUESTION, called("a", "a"), result("a")]}, f"{MESSAGE}[1].id"),
    ({"messages": [QUESTION, called("")]}, f"{MESSAGE}[0].id"),
    ({"messages": [QUESTION, called("a", arguments="3")]}, f"{MESSAGE}[0].function.arguments"),
    ({"messages": [QUESTION, called("a", arguments="[1]")]}, f"{MESSAGE}[0].function.arguments"),
    ({"messages": [QUESTION, called("a", arguments='"{}"')]}, f"{MESSAGE}[0].function.arguments"),
    ({"messages": [QUESTION, called()]}, MESSAGE),
    ({"messages": [QUESTION, called("a"), {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"),
    ({"messages": [QUESTION, called("a"), result("a", None)]}, "messages[2].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [QUESTION | {"tool_calls": called("a")["tool_calls"]}]}, "messages[0].tool_calls"),
    ({"messages": [QUESTION | {"tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [QUESTION, called("a", function_call={"name": "f", "arguments": ""})]}, "messages[1].function_call"),
    ({"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"custom": {}}]}]}, f"{MESSAGE}[0].custom"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_taken_is_refused_by_its_path(running: Running, fields: dict[str, Any], param: str) -> None:
    answer = running.post(**ASKED | fields)
    assert (answer.status_code, answer.json().get("error", {}).get("param")) == (400, param), answer.text


def test_a_form_that_is_not_known_is_no_path_in_an_answer(llama3_tokenizer_path: Path) -> None:
    tokenizer = llamarium.load_tokenizer(llama3_tokenizer_path).with_chat_template("{{ messages[0].content }}")
    with serving(ScriptedLlama(tokenizer)) as running:
        error = running.post(**ASKED).json()["error"]
    assert error["param"] == "tools" and "pass tool_form" in error["message"]
    assert str(llama3_tokenizer_path.parent) not in error["message"]


# --- text is text -----------------------------------------------------------------------------------------------------


def everywhere(word: str) -> dict[str, Any]:
    """A word in every field that takes any text."""
    described = {"type": "string", "description": word, "enum": [word], "default": word}
    parameters = {"properties": {"x": described}, "required": [word]}
    call = {"id": word, "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": word})}}
    messages = [
        {"role": "system", "content": word},
        {"role": "user", "content": word},
        {"role": "assistant", "content": word, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": word, "content": word},
    ]
    return {"messages": messages, "tools": function(description=word, parameters=parameters)}


@pytest.mark.parametrize("form", ["llama3_json", "pythonic", "hermes", None])
def test_no_field_becomes_a_control_token(running: Running, scripted: Running, form: Any) -> None:
    for server in (running, scripted):
        special = frozenset(server.service.tokenizer.special_tokens.values())

        def control(word: str, server: Running = server, special: frozenset[int] = special) -> list[int]:
            seen = server.post("/tokenize", **everywhere(word)).json()["tokens"]
            return [token_id for token_id in seen if token_id in special]

        with told_in(server, form):
            for word in SPELLINGS:
                assert control(word) == control("word")


@pytest.mark.parametrize("word", SPELLINGS)
def test_what_a_call_says_is_text_and_goes_back_as_text(llama3: ScriptedLlama, scripted: Running, word: str) -> None:
    def control(word: str) -> list[int]:
        """The control tokens of a dialog in which the model, and then a tool, says a word."""
        tokenizer, prompt = llama3.tokenizer, llama3.tokenizer.chat([QUESTION], tools=ToolRequest.read(TOOLS).offered)
        text = json.dumps({"name": "get_weather", "parameters": {"city": word}})
        llama3.will_say(tokenizer.encode(text, add_special_tokens=False), len(prompt))
        message = scripted.post(**ASKED).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": word}
        dialog = [QUESTION, message, result(call["id"], word)]
        seen = scripted.post("/tokenize", messages=dialog, tools=TOOLS).json()["tokens"]
        return [token_id for token_id in seen if token_id in tokenizer.special_tokens.values()]

    assert control(word) == control("x")
