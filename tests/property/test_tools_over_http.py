"""Any split of an answer into tokens gives the same calls, through the server, whole and streamed, and from Python."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llamarium
from llamarium.tokenizer.tools.definition import ToolCall, ToolDefinition
from llamarium.tokenizer.tools.deltas import calls_of, text_of
from llamarium.tokenizer.tools.forms import ToolForm, write_calls
from llamarium.tokenizer.tools.parser import MAX_CALLS, ToolCallParser
from scripted import ScriptedLlama, cut_into_tokens
from serving import CHAT, Running, serving

pytestmark = pytest.mark.torch

NAMES = ("f", "get_weather")
TOOLS = [ToolDefinition(name, parameters={"type": "object"}) for name in NAMES]
QUESTION = [{"role": "user", "content": "?"}]
ASKED: dict[str, Any] = {"messages": QUESTION, "tools": [tool.to_openai() for tool in TOOLS], "temperature": 0}

_VALUES = st.one_of(
    st.integers(-999, 999), st.none(), st.lists(st.booleans(), max_size=2), st.text("aä😀 '\"\\\n{[]}<>", max_size=8)
)
_CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text("abcö", min_size=1, max_size=3), _VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)
_BITS = ["Let me see. ", "\n", "ä😀", "<tool_call>", "</tool_call>", '{"name": "f"', "[f(", "; ", '{"a": 1}', "<"]
_WORDS = st.lists(st.sampled_from(_BITS), max_size=3).map("".join)


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> ScriptedLlama:
    return ScriptedLlama(llamarium.load_tokenizer(smollm2_path))


@pytest.fixture(scope="module")
def running(llama: ScriptedLlama) -> Iterator[Running]:
    with serving(llama) as running:
        yield running


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as client:
        yield client


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    before=_WORDS,
    calls=_CALLS,
    form=st.sampled_from(("llama3_json", "pythonic", "hermes")),
    after=_WORDS,
    parallel=st.booleans(),
    data=st.data(),
)
def test_any_split_into_tokens_gives_the_same_calls(
    llama: ScriptedLlama,
    running: Running,
    http: httpx.Client,
    before: str,
    calls: list[tuple[str, dict[str, Any]]],
    form: ToolForm,
    after: str,
    parallel: bool,
    data: st.DataObject,
) -> None:
    text = before + write_calls([ToolCall("", name, json.dumps(made)) for name, made in calls], form) + after
    oracle = ToolCallParser(TOOLS, most=MAX_CALLS if parallel else 1)
    oracle.push(text)
    oracle.finish()
    expected = oracle.content, [(call.name, call.arguments) for call in oracle.calls]
    ids = cut_into_tokens(llama.tokenizer, text, data)
    llama.will_say(ids, len(llama.tokenizer.chat(QUESTION, tools=TOOLS)))

    asked = ASKED | {"parallel_tool_calls": parallel}
    (choice,) = http.post(running.url + CHAT, json=asked).json()["choices"]
    assert _whole(choice) == expected
    assert choice["finish_reason"] == ("tool_calls" if expected[1] else "stop")
    streamed, reason = _joined(http.post(running.url + CHAT, json=asked | {"stream": True}).text)
    assert (streamed, reason) == (expected, choice["finish_reason"])
    pieces = list(llama.stream_chat(**asked))
    deltas = [delta for piece in pieces for delta in piece.deltas]
    assert "".join(piece.text for piece in pieces) == text_of(deltas) == expected[0]
    assert [(call.name, call.arguments) for call in calls_of(deltas)] == expected[1]


def _whole(choice: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    return choice["message"]["content"] or "", [(one["name"], one["arguments"]) for one in functions]


def _joined(events: str) -> tuple[tuple[str, list[tuple[str, str]]], str | None]:
    """What the events of a stream say together."""
    content, calls, reason = "", list[tuple[str, str]](), None
    *chunks, done = events.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    for chunk in chunks:
        (choice,) = json.loads(chunk.removeprefix("data: "))["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[-1]
            calls[-1] = name, arguments + call["function"]["arguments"]
        reason = choice["finish_reason"]
    return (content, calls), reason
