"""Whatever a client sends, it gets an answer below 500 in the protocol's form, and others their tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    status_code_conformance,
)

from llamarium.server.anthropic.requests import CountRequest, MessagesRequest
from llamarium.server.openai.embeddings import EmbeddingRequest
from llamarium.server.openai.requests import ChatRequest, CompletionRequest
from llamarium.server.openai.responses.requests import ResponseRequest
from serving import CHAT, HELLO, Running, serving, small_llama

pytestmark = pytest.mark.torch

QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def running(smollm2_path: Path) -> Iterator[Running]:
    with serving(small_llama(smollm2_path), max_context=64, max_queue=5000) as found:
        found.expected = found.post(**HELLO).json()["choices"]  # pyright: ignore
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=30) as found:
        yield found
        assert running.post(**HELLO).json()["choices"] == running.expected  # pyright: ignore
        running.wait(running.is_idle)


def check(answer: httpx.Response) -> None:
    """An answer is one, or a refusal that names what is at fault."""
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        if answer.url.path.startswith("/v1/messages"):
            assert answer.json().keys() == {"type", "error", "request_id"}
            assert error.keys() - {"details"} == {"message", "type"}
        else:
            assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"] and not error["message"].startswith(":")


SCALARS = [
    None,
    True,
    -1,
    0,
    1,
    2,
    0.5,
    -0.0,
    1e308,
    2**63 - 1,
    -(2**63),
    2**64,
    10**300,
    "",
    "x",
    "\x00",
    "🦙",
    "<|im_end|>",
]
LISTS = [[], [0], [""], [[]], [None], [HELLO["messages"][0]]]
ODD = st.sampled_from([*SCALARS, *LISTS, {}, {"": 1}, {"5": 1}, {"type": "text"}, HELLO["messages"][0]])


SAID = {"messages": HELLO["messages"]}
REQUESTS: list[tuple[str, Any, dict[str, Any]]] = [
    (CHAT, ChatRequest, HELLO),
    ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 3, "temperature": 0}),
    ("/v1/responses", ResponseRequest, {"input": "x", "max_output_tokens": 3, "temperature": 0}),
    ("/v1/messages", MessagesRequest, SAID | {"max_tokens": 3, "temperature": 0}),
    ("/v1/messages/count_tokens", CountRequest, SAID),
    ("/v1/embeddings", EmbeddingRequest, {"input": "x"}),
]


@pytest.mark.parametrize(("path", "body", "plain"), REQUESTS)
def test_odd_values_of_fields_are_refused_or_honoured(
    client: httpx.Client, path: str, body: Any, plain: dict[str, Any]
) -> None:
    names = [*body.model_fields, *body.refused, "unknown"]

    @QUICK
    @given(st.dictionaries(st.sampled_from(names), ODD, min_size=1, max_size=3))
    def attack(odd: dict[str, Any]) -> None:
        check(client.post(path, json=plain | odd))

    attack()


def test_odd_messages_are_refused_or_honoured(client: httpx.Client) -> None:
    part = st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "text", "image_url"), ODD))
    message = st.fixed_dictionaries(
        {}, optional={"role": ODD | st.just("user"), "content": ODD | st.lists(part), "name": ODD, "tool_calls": ODD}
    )

    @QUICK
    @given(st.lists(message, max_size=3) | ODD)
    def attack(messages: Any) -> None:
        check(client.post(CHAT, json=HELLO | {"messages": messages}))

    attack()


def test_odd_items_and_blocks_are_refused_or_honoured(client: httpx.Client) -> None:
    def made_of(names: str, **values: Any) -> Any:
        return st.fixed_dictionaries({}, optional=dict.fromkeys(names.split(), ODD) | values)

    kinds = st.sampled_from(["text", "tool_use", "tool_result", "image", "input_text", "output_text"])
    part = made_of("text id name input tool_use_id content is_error cache_control citations", type=ODD | kinds)
    spoken = {
        "role": ODD | st.sampled_from(["user", "assistant", "system"]),
        "content": ODD | st.lists(part, max_size=3),
    }
    message = made_of("", **spoken)
    sorts = st.sampled_from(["message", "function_call", "function_call_output", "item_reference"])
    item = made_of("id status call_id name arguments output phase", type=ODD | sorts, **spoken)
    tool = made_of("name type description input_schema parameters strict", type=ODD | st.just("function"))
    choice = ODD | made_of("type name disable_parallel_tool_use mode tools", type=st.sampled_from(["any", "function"]))
    both = {"tools": ODD | st.lists(tool, max_size=2), "tool_choice": choice}

    @QUICK
    @given(st.fixed_dictionaries({"messages": st.lists(message, max_size=3) | ODD}, optional=both | {"system": ODD}))
    def attack_messages(odd: dict[str, Any]) -> None:
        for path, more in (("/v1/messages", {"max_tokens": 3}), ("/v1/messages/count_tokens", {})):
            check(client.post(path, json=more | odd))

    @QUICK
    @given(st.fixed_dictionaries({"input": st.lists(item, max_size=3) | ODD}, optional=both | {"text": ODD}))
    def attack_responses(odd: dict[str, Any]) -> None:
        check(client.post("/v1/responses", json={"max_output_tokens": 3} | odd))

    attack_messages()
    attack_responses()


PATHS = [CHAT, "/tokenize", "/v1/nothing", "/v1/messages", "/v1/messages/nothing", "/v1/responses", "/v1/embeddings"]


def test_bytes_are_refused_or_honoured(client: httpx.Client) -> None:
    whole = json.dumps(HELLO).encode()

    @QUICK
    @given(st.integers(0, len(whole) - 1), st.binary(max_size=4), st.sampled_from(PATHS))
    def attack(place: int, change: bytes, path: str) -> None:
        body = whole[:place] + change + whole[place + len(change) :]
        check(client.post(path, content=body, headers={"content-type": "application/json"}))

    attack()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (HELLO | {"temperature": "hot"}, "temperature"),
        (HELLO | {"temperature": -1}, "temperature"),
        (HELLO | {"temperature": True}, "temperature"),
        (HELLO | {"top_p": 0}, "top_p"),
        (HELLO | {"top_p": 1.1}, "top_p"),
        (HELLO | {"min_p": 2}, "min_p"),
        (HELLO | {"top_k": -2}, "top_k"),
        (HELLO | {"n": 0}, "n"),
        (HELLO | {"n": 2}, "n"),  # greedy answers are equal
        (HELLO | {"seed": -2}, "seed"),
        (HELLO | {"max_tokens": 0}, "max_tokens"),
        (HELLO | {"max_completion_tokens": 9}, "max_tokens"),  # both
        (HELLO | {"presence_penalty": 2.1}, "presence_penalty"),
        (HELLO | {"frequency_penalty": -2.1}, "frequency_penalty"),
        (HELLO | {"repetition_penalty": 0}, "repetition_penalty"),
        (HELLO | {"logit_bias": {"x": 1}}, "logit_bias"),
        (HELLO | {"logit_bias": {"5": 101}}, "logit_bias"),
        (HELLO | {"logit_bias": {"99999999": 1}}, "logit_bias"),
        (HELLO | {"stop": ""}, "stop"),
        (HELLO | {"stop": [5]}, "stop[0]"),
        (HELLO | {"stop_token_ids": [-1]}, "stop_token_ids"),
        (HELLO | {"stop_token_ids": [5, 49152]}, "stop_token_ids"),
        (HELLO | {"top_logprobs": 2}, "top_logprobs"),
        (HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (HELLO | {"cache_salt": ""}, "cache_salt"),
        (HELLO | {"response_format": {"type": "xml"}}, "response_format.type"),
        (HELLO | {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (HELLO | {"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": HELLO["messages"], "max_completion_tokens": 0}, "max_completion_tokens"),
        (HELLO | {"messages": []}, "messages"),
        ({"temperature": 1}, "messages"),
        (HELLO | {"messages": [{"role": "user"}]}, "messages[0].content"),
        (HELLO | {"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        (HELLO | {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (HELLO | {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        (HELLO | {"messages": [*HELLO["messages"], {"role": "user", "content": [{"type": "image_url"}]}]}, None),
        (HELLO | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ([], None),
    ],
)
def test_a_refusal_names_the_field(client: httpx.Client, body: Any, param: str | None) -> None:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


def test_a_part_that_is_no_text_is_refused_by_its_place(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]
    error = client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}).json()["error"]
    assert error["param"].startswith("messages[0].content[1].")


@pytest.mark.parametrize(("path", "body", "plain"), REQUESTS[2:])
def test_null_is_as_if_not_given_to_any_protocol(
    client: httpx.Client, path: str, body: Any, plain: dict[str, Any]
) -> None:
    optional = [name for name in (*body.model_fields, *body.refused) if name not in plain]
    one, other = (client.post(path, json=plain | more).json() for more in (dict.fromkeys(optional), {}))
    for name in ("id", "created_at", "completed_at", "usage", "request_id"):
        one.pop(name, None), other.pop(name, None)
    for item in (*one.get("output", ()), *other.get("output", ())):
        item.pop("id")
    assert one == other


def test_null_is_as_if_not_given(client: httpx.Client) -> None:
    optional = [name for name in (*ChatRequest.model_fields, *ChatRequest.refused) if name not in HELLO]
    assert (
        client.post(CHAT, json=HELLO | dict.fromkeys(optional)).json()["choices"]
        == (client.post(CHAT, json=HELLO).json()["choices"])
    )


def test_ids_outside_the_vocabulary_are_refused_with_its_size(client: httpx.Client) -> None:
    error = client.post("/v1/completions", json={"prompt": [10**6]}).json()["error"]
    assert error["param"] == "prompt"
    assert "expected 0..49151" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[1], [10**6]]}, "prompt[1]"),
        ({"prompt": [[1], [10**6]], "echo": True}, "prompt[1]"),
        ({"prompt": ["a", "b", "word " * 600]}, "prompt[2]"),
        ({"prompt": ["a", "a b " * 10**5]}, "prompt[1]"),
        ({"prompt": [[5], [5] * 40], "max_tokens": 30}, "prompt[1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1025, "n": 1}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 2, "temperature": 1}, "n"),
    ],
)
def test_a_refusal_says_which_prompt(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_errors_hold_no_paths(client: httpx.Client, smollm2_path: Path) -> None:
    roles = [{"role": "tool", "content": "x"}]
    for path, body in [
        ("/detokenize", {"tokens": [10**6]}),
        ("/v1/completions", {"prompt": [10**6]}),
        ("/tokenize", {"messages": roles}),
        (CHAT, {"messages": roles}),
    ]:
        text = client.post(path, json=body).text
        assert str(smollm2_path.parent) not in text and smollm2_path.name not in text


def test_the_servers_own_description_holds(running: Running, client: httpx.Client) -> None:
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    checks = [not_a_server_error, content_type_conformance, status_code_conformance, negative_data_rejection]
    config = settings(QUICK, max_examples=12)
    for operation in (found.ok() for found in schema.get_all_operations()):

        @config
        @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        def attack(case: Any) -> None:
            case.call_and_validate(checks=checks, timeout=30)

        attack()
