"""Tools from Python: `Llama.chat`, its stream, an engine's, and a conversation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import llamarium
from llamarium.api import Llama
from llamarium.errors import GrammarError, LlamariumError, SamplingError, ToolError
from llamarium.generation.completion import Piece
from llamarium.tokenizer.tools.deltas import CallArguments, CallBegin, CallEnd, ContentDelta, calls_of
from llamarium.tokenizer.tools.functions import definition_of
from scripted import ScriptedLlama
from serving import small_llama

pytestmark = pytest.mark.torch

QUESTION: dict[str, Any] = {"role": "user", "content": "Is it warm in Köln?"}
GREEDY: dict[str, Any] = {"temperature": 0.0}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def get_weather(city: str) -> str:
    """The weather in a city now."""
    return f"9 C in {city}"


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> ScriptedLlama:
    return ScriptedLlama(llamarium.load_tokenizer(smollm2_path))


@pytest.fixture(scope="module")
def small(smollm2_path: Path) -> Llama:
    return small_llama(smollm2_path)


def will_say(llama: ScriptedLlama, text: str, messages: list[Any] | None = None) -> None:
    prompt = llama.tokenizer.chat(messages or [QUESTION], tools=[definition_of(get_weather)])
    llama.will_say(llama.tokenizer.encode(text, add_special_tokens=False), len(prompt))


def test_calls_come_with_the_answer_and_go_into_the_next_dialog(llama: ScriptedLlama) -> None:
    will_say(llama, f"Let me see.\n{CALL}")
    answer = llama.chat([QUESTION], tools=[get_weather], **GREEDY)
    (call,) = answer.tool_calls
    assert (answer.text, answer.completions[0].finish_reason) == ("Let me see.\n", "tool_calls")
    assert (call.name, call.values(), call.is_complete) == ("get_weather", {"city": "Köln"}, True)
    assert answer.message == {"role": "assistant", "content": answer.text, "tool_calls": [call.to_openai()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**call.values())}
    dialog = [QUESTION, answer.message, result]
    will_say(llama, "It is not.", dialog)
    assert llama.chat(dialog, tools=[get_weather], **GREEDY).message == {"role": "assistant", "content": "It is not."}


def test_a_stream_and_an_engine_tell_the_same_in_order(llama: ScriptedLlama) -> None:
    will_say(llama, f"Let me see.\n{CALL}\n{CALL.replace('Köln', 'Bonn')}")
    whole = llama.chat([QUESTION], tools=[get_weather], **GREEDY)

    def check(pieces: Iterator[Piece]) -> None:
        found = list(pieces)
        deltas = [delta for piece in found for delta in piece.deltas]
        kinds = [kind for i, kind in enumerate(map(type, deltas)) if i == 0 or type(deltas[i - 1]) is not kind]
        assert kinds == [ContentDelta, CallBegin, CallArguments, CallEnd, CallBegin, CallArguments, CallEnd]
        assert "".join(piece.text for piece in found) == whole.text
        assert [call.arguments for call in calls_of(deltas)] == [call.arguments for call in whole.tool_calls]
        assert [piece.finish_reason for piece in found] == [None] * (len(found) - 1) + ["tool_calls"]

    check(llama.stream_chat([QUESTION], tools=[get_weather], **GREEDY))
    with llama.engine(kv_memory=2**22) as engine:
        check(engine.stream_chat([QUESTION], tools=[get_weather], **GREEDY))
        collected = engine.stream_chat([QUESTION], tools=[get_weather], **GREEDY).result()
        assert [call.arguments for call in collected.tool_calls] == [call.arguments for call in whole.tool_calls]
        one = engine.stream_chat([QUESTION], tools=[get_weather], parallel_tool_calls=False, **GREEDY).result()
        assert (len(one.tool_calls), one.completions[0].finish_reason) == (1, "tool_calls")


def test_where_tools_are_hidden_nothing_is_a_call(llama: ScriptedLlama) -> None:
    llama.will_say(llama.tokenizer.encode(CALL, add_special_tokens=False), len(llama.tokenizer.chat([QUESTION])))
    for options in ({}, {"tools": [get_weather], "tool_choice": "none"}):
        answer = llama.chat([QUESTION], **GREEDY, **options)
        assert (answer.text, answer.tool_calls, answer.completions[0].finish_reason) == (CALL, (), "stop")


def test_an_answer_that_is_cut_within_a_call_says_so(llama: ScriptedLlama) -> None:
    will_say(llama, CALL)
    whole = llama.chat([QUESTION], tools=[get_weather], **GREEDY).completions[0]
    for count in range(1, len(whole.token_ids)):
        cut = llama.chat([QUESTION], tools=[get_weather], max_tokens=count, **GREEDY).completions[0]
        assert cut.finish_reason == "length"
        assert all(whole.tool_calls[0].arguments.startswith(call.arguments) for call in cut.tool_calls)
        assert all(call.is_complete is (call.arguments == '{"city": "Köln"}') for call in cut.tool_calls)
        assert ("tool_calls" in cut.message) is any(call.is_complete for call in cut.tool_calls)


def test_a_stop_string_is_told(llama: ScriptedLlama) -> None:
    will_say(llama, "Let me see. It is warm.")
    asked: dict[str, Any] = GREEDY | {"tools": [get_weather], "stop": ["never", " It"]}
    pieces = list(llama.stream_chat([QUESTION], **asked))
    assert "".join(piece.text for piece in pieces) == "Let me see."
    assert [piece.stop_string for piece in pieces] == [None] * (len(pieces) - 1) + [" It"]
    assert llama.chat([QUESTION], **asked).completions[0].stop_string == " It"
    assert llama.chat([QUESTION], **asked | {"stop": ["never"]}).completions[0].stop_string is None


def test_held_calls_follow_their_schema_at_any_temperature(small: Llama) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 5}, "of": {"enum": ["a", "b"]}},
        "required": ["of"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for form in ("hermes", "llama3_json"):
        answer = small.chat(
            [QUESTION],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            tool_form=form,
            temperature=1.5,
            seed=1,
            n=4,
            max_tokens=60,
        )
        assert len({one.tool_calls[0].arguments for one in answer.completions}) > 1
        for one in answer.completions:
            assert one.text == "" and one.finish_reason == "tool_calls"
            jsonschema.validate(json.loads(one.tool_calls[0].arguments), schema)


def test_a_conversation_keeps_calls_and_goes_on(llama: ScriptedLlama) -> None:
    talk = llama.conversation()
    will_say(llama, CALL)
    for _ in talk.say(QUESTION["content"], tools=[get_weather], **GREEDY):
        pass
    assert talk.messages[0] == QUESTION
    (call,) = talk.messages[1]["tool_calls"]
    talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "9 C"})
    will_say(llama, "No.", talk.messages)
    assert "".join(piece.text for piece in talk.go_on(tools=[get_weather], **GREEDY)) == "No."
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"tools": [3]}, ToolError, r"tools\[0\] is 3"),
        ({"tools": [get_weather], "tool_choice": "any"}, ToolError, "tool_choice"),
        ({"tools": [get_weather], "tool_form": "xml"}, ToolError, "llama3_json, pythonic, hermes"),
        ({"tools": [get_weather], "regex": "a"}, GrammarError, "found a form of the kind regex"),
        ({"tools": [get_weather], "json_object": True, "stop": "x"}, SamplingError, "beside a grammar"),
        ({"tools": [get_weather], "json_object": True, "regex": "a"}, SamplingError, "an answer has one form"),
        ({"tools": [get_weather], "tool_choice": "required", "stop": "x"}, SamplingError, "beside a grammar"),
        ({"tool_choice": "required"}, ToolError, "there are no tools"),
        ({"tool": []}, SamplingError, "tool"),
    ],
)
def test_refusals_come_with_the_call(llama: ScriptedLlama, options: Any, kind: type[LlamariumError], word: str) -> None:
    for ask in (llama.chat, llama.stream_chat):
        with pytest.raises(kind, match=word):
            ask([QUESTION], **options)
