"""Why a prefix missed: planted divergences of an agent's conversation are named, for the same key alone."""

import copy
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamarium.api import Llama
from llamarium.server.prefix.explainer import BYTES_PER_BLOCK, PrefixExplainer
from llamarium.tokenizer.chat.choose import with_template
from serving import CHAT, Running, serving, small_llama

pytestmark = pytest.mark.torch

TEMPLATE = r"""{%- if persona is defined %}<|im_start|>persona
{{ persona }}<|im_end|>
{% endif %}
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{%- if message.reasoning_content %}
<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.tool_call_id is defined %} {{ message.tool_call_id }}{% endif %}{{ '\n' }}
{%- if message.content is string %}{{ message['content'] }}
{%- elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
<call id="{{ call.id }}" name="{{ call.function.name }}">{{ call.function.arguments | tojson }}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that writes all fields, ids included."""


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    _tool("list_files", "List the files of a folder.", path={"type": "string"}),
    _tool("read_file", "Return the text of a file.", path={"type": "string"}, lines={"type": "integer"}),
    _tool("run_tests", "Run the tests that match a pattern.", pattern={"type": "string"}),
]
TRANSCRIPT: list[dict[str, Any]] = [
    {
        "role": "system",
        "content": "You repair programs. Work in small steps, and run the tests after each change.\n"
        "Session started 2026-11-28 09:14:03. The folder is /src/garden, the branch is main.",
    },
    {"role": "user", "content": [{"type": "text", "text": "The watering schedule skips Sundays. "},
                                 {"type": "text", "text": "Find out why, please."}]},
    {
        "role": "assistant",
        "content": "I look at the folder first.",
        "reasoning_content": "The schedule is probably built from a list of days.",
        "tool_calls": [_call("call_41", "list_files", '{"path": "/src/garden"}')],
    },
    {"role": "tool", "tool_call_id": "call_41", "content": "beds.py\nschedule.py\ntest_schedule.py"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [_call("call_42", "read_file", '{"path": "/src/garden/schedule.py", "lines": 40}')],
    },
    {"role": "tool", "tool_call_id": "call_42", "content": "DAYS = range(1, 7)  # Monday is 1\n"},
    {"role": "assistant", "content": "The range ends before 7, so Sunday is never in it."},
    {"role": "user", "content": "Repair it, then run the tests of the schedule."},
]  # fmt: skip
BASE: dict[str, Any] = {"messages": TRANSCRIPT, "tools": TOOLS, "temperature": 0, "max_tokens": 2}

Change = Callable[[dict[str, Any]], object]


def _message(place: int, **changes: Any) -> Change:
    return lambda body: body["messages"][place].update(changes)


def _replaced(place: int, old: str, new: str) -> Change:
    def change(body: dict[str, Any]) -> None:
        message = body["messages"][place]
        assert old in message["content"]
        message["content"] = message["content"].replace(old, new)

    return change


def _function(place: int, **changes: Any) -> Change:
    return lambda body: body["tools"][place]["function"].update(changes)


def _called(message: int, **changes: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        call = body["messages"][message]["tool_calls"][0]
        call["function"].update({key: value for key, value in changes.items() if key in call["function"]})
        call.update({key: value for key, value in changes.items() if key == "id"})

    return change


def _new_ids(body: dict[str, Any]) -> None:
    """Give the second call and its result another id, as clients do that make them anew."""
    _called(4, id="call_99")(body)
    body["messages"][5]["tool_call_id"] = "call_99"


def _keys_reversed(body: dict[str, Any]) -> None:
    parameters = body["tools"][1]["function"]["parameters"]
    parameters["properties"] = dict(reversed(parameters["properties"].items()))


PLANTED: dict[str, tuple[Change, str, str | None]] = {
    "a time stamp in the system prompt": (_replaced(0, "09:14:03", "09:14:58"), "changed", "messages[0].content"),
    "another folder in the system prompt": (_replaced(0, "/garden", "/field"), "changed", "messages[0].content"),
    "trimmed white space of a result": (_replaced(5, "1\n", "1"), "whitespace", "messages[5].content"),
    "other line ends of a result": (_replaced(3, "\n", "\r\n"), "whitespace", "messages[3].content"),
    "tools in another order": (lambda body: body["tools"].reverse(), "reordered", "tools"),
    "a tool that is gone": (lambda body: body["tools"].pop(1), "removed", "tools[1]"),
    "a tool that was added": (lambda body: body["tools"].insert(1, _tool("wait", "Do nothing.")), "added", "tools[1]"),
    "another description of a tool": (
        _function(2, description="Run some tests."), "changed", "tools[2].function.description",
    ),
    "another name of a tool": (_function(0, name="list_folder"), "changed", "tools[0].function.name"),
    "another schema of a tool": (
        _function(1, parameters={"type": "object", "properties": {}}), "changed", "tools[1].function.parameters",
    ),
    "a schema's keys in another order": (_keys_reversed, "rendering", "tools[1].function.parameters"),
    "reasoning that was dropped": (
        lambda body: body["messages"][2].pop("reasoning_content"), "reasoning_dropped", "messages[2].reasoning_content",
    ),
    "arguments in another spelling": (
        _called(4, arguments='{"lines":40,"path":"/src/garden/schedule.py"}'), "rendering",
        "messages[4].tool_calls[0].function.arguments",
    ),
    "other arguments": (
        _called(4, arguments='{"path": "/src/garden/beds.py", "lines": 40}'), "changed",
        "messages[4].tool_calls[0].function.arguments",
    ),
    "other ids": (_new_ids, "changed", "messages[4].tool_calls[0].id"),
    "another function called": (_called(2, name="read_file"), "changed", "messages[2].tool_calls[0].function.name"),
    "messages that were dropped": (
        lambda body: body["messages"].__delitem__(slice(2, 4)), "removed", "messages[2]",
    ),
    "a message that was put in": (
        lambda body: body["messages"].insert(1, {"role": "user", "content": "Be brief."}), "added", "messages[1]",
    ),
    "a part that was dropped": (lambda body: body["messages"][1]["content"].pop(0), "changed", "messages[1].content"),
    "another role": (_message(7, role="system"), "changed", "messages[7].role"),
    "another message": (_message(6, role="user", content="Well?"), "changed", "messages[6]"),
    "an edited answer": (_replaced(6, "never", "not"), "changed", "messages[6].content"),
    "a variable of the template": (
        lambda body: body.update(chat_template_kwargs={"persona": "a gardener"}), "added", "chat_template_kwargs",
    ),
    "another salt": (lambda body: body.update(cache_salt="b"), "cache_salt", "cache_salt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> Llama:
    made = small_llama(smollm2_path, max_position_embeddings=4096)
    return Llama("small", made.loaded, with_template(made.tokenizer, TEMPLATE))


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, explain_cache=True, engine={"kv_memory": 2**26}) as found:
        yield found


def said(response: httpx.Response) -> dict[str, Any]:
    """The explanation in the usage of an answer; the header says the same without texts."""
    assert response.status_code == 200, response.text
    found = response.json()["usage"]["prompt_tokens_details"]["prefix"]
    head = dict(part.partition("=")[::2] for part in response.headers["x-llamarium-prefix"].split("; "))
    assert head.get("field") == found["field"] and head["reason"] == found["reason"]
    assert int(head["matched"]) == found["matched_tokens"]
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_divergence_is_named(running: Running, name: str) -> None:
    change, reason, field = PLANTED[name]
    running.post(**BASE)
    body = copy.deepcopy(BASE)
    change(body)
    response = running.post(**body)
    found = said(response)
    assert (found["reason"], found["field"]) == (reason, field), found
    assert found["is_date_or_time"] == ("time stamp" in name)
    cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    if reason != "cache_salt":
        assert found["is_exact"] and cached >= found["matched_tokens"] == found["first_different_token"] > 0
        assert found["text"] != found["earlier_text"]


def test_an_answer_that_comes_back_extends_the_prompt(running: Running) -> None:
    """The conversation's next turn has the answer; one with other blanks around it is named, at its message."""
    body = BASE | {"max_tokens": 8, "cache_salt": "turns"}
    answer = running.post(**body).json()["choices"][0]["message"]
    turn = [*TRANSCRIPT, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Go on."}]
    found = said(running.post(**body | {"messages": turn}))
    assert (found["reason"], found["field"]) in (("extended", None), ("retokenized", "messages[8].content")), (
        answer,
        found,
    )
    turn[8] = {"role": "assistant", "content": answer["content"] + "  "}
    found = said(running.post(**body | {"messages": turn}))
    assert (found["reason"], found["field"]) == ("whitespace", "messages[8].content")


def test_an_answer_of_other_tokens_with_the_same_text_is_named(running: Running) -> None:
    """A biased answer spells " and" by two tokens; the template's text of it has one."""
    tokenizer = running.service.tokenizer
    space, word = (tokenizer.encode(text, add_special_tokens=False) for text in (" ", "and"))
    assert [len(space), len(word), len(tokenizer.encode(" and", add_special_tokens=False))] == [1, 1, 1]
    dialog = [{"role": "user", "content": "One word?"}]
    body = {"messages": dialog, "structured_outputs": {"choice": [" and"]}, "max_tokens": 3, "temperature": 0}
    bias = {"logit_bias": {str(tokenizer.encode(" and", add_special_tokens=False)[0]): -100.0}}
    answer = running.post(**body | bias)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert text == " and" and answer.json()["usage"]["completion_tokens"] > 1
    turn = [*dialog, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    found = said(running.post(messages=turn, max_tokens=1))
    assert (found["reason"], found["field"]) == ("retokenized", "messages[1].content"), found


def test_another_keys_prompts_are_never_compared(llama: Llama) -> None:
    """The second key's first prompt is its first, whatever the first key has asked; counts are by key, without text."""
    keys = [{"authorization": f"Bearer {key}"} for key in ("key-of-one", "key-of-two")]
    with serving(llama, explain_cache=True, api_keys=("key-of-one", "key-of-two")) as closed:

        def ask(place: int, text: str) -> dict[str, Any]:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
            return said(httpx.post(closed.url + CHAT, json=body, headers=keys[place], timeout=30))

        assert ask(0, "The secret word is heron, tell nobody about it.")["reason"] == "first"
        assert ask(1, "The secret word is egret, tell nobody about it.")["reason"] == "first"
        found = ask(0, "The secret word is egret, tell nobody about it.")
        assert found["reason"] == "changed" and "heron" in found["text_before"] + found["earlier_text"]
        metrics = httpx.get(f"{closed.url}/metrics", headers=keys[0], timeout=30).text
    lines = [line for line in metrics.splitlines() if line.startswith("llamarium:prefix_cache_prompts_total")]
    assert {re.sub(r'model_name="small",', "", line) for line in lines} == {
        'llamarium:prefix_cache_prompts_total{field="",key="1",reason="first"} 1.0',
        'llamarium:prefix_cache_prompts_total{field="",key="2",reason="first"} 1.0',
        'llamarium:prefix_cache_prompts_total{field="messages[].content",key="1",reason="changed"} 1.0',
    }
    assert "secret" not in metrics and "key-of" not in metrics


def test_without_the_option_the_header_alone_explains_and_has_no_text(llama: Llama) -> None:
    with serving(llama) as plain:
        bodies = [
            {"messages": [{"role": "user", "content": text}], "max_tokens": 1} for text in ("One sees.", "One is.")
        ]
        first, second = (plain.post(**body) for body in bodies)
        assert first.headers["x-llamarium-prefix"].endswith("reason=first")
        assert second.headers["x-llamarium-prefix"].endswith("reason=changed; field=messages[0].content")
        assert second.json()["usage"]["prompt_tokens_details"].keys() == {"cached_tokens"}
        stream = plain.post(**bodies[0], stream=True)
        assert "reason=contained" in stream.headers["x-llamarium-prefix"]


def test_paths_are_those_of_the_clients_protocol(running: Running) -> None:
    for path, body, field in (
        ("/v1/messages", {"system": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}, "system"),
        ("/v1/responses", {"instructions": "a", "input": "Hi", "max_output_tokens": 1}, "instructions"),
    ):
        running.post(path, **body, cache_salt=path)
        head = running.post(path, **body | {field: "b", "cache_salt": path}).headers["x-llamarium-prefix"]
        assert f"field={field}" in head, head
    texts = [f"Once upon a time there was a {word}" for word in ("fox", "wolf")]
    heads = [running.post("/v1/completions", prompt=text).headers["x-llamarium-prefix"] for text in texts]
    assert heads[1].endswith("reason=changed; field=prompt")


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_tool_of_the_earlier_request_alone_is_named_beside_tools_that_are_left_out(
    running: Running, path: str
) -> None:
    """Its place is that of the earlier request; this one has no such place."""
    function = TOOLS[0] if path == CHAT else {"type": "function", **TOOLS[0]["function"]}
    said: dict[str, Any] = {"input": "a", "max_output_tokens": 2}
    if path == CHAT:
        said = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    body = said | {"cache_salt": f"left out {path}"}
    hosted = {"type": "web_search"}
    assert running.post(path, **body, tools=[function, hosted]).status_code == 200
    answer = running.post(path, **body, tools=[hosted])
    assert answer.status_code == 200
    assert "reason=removed; field=tools[0]" in answer.headers["x-llamarium-prefix"]


def test_the_memory_of_earlier_prompts_is_bounded(running: Running) -> None:
    explainer, blocks = running.service.explainer, running.engine.snapshot.num_blocks
    for i in range(40):
        running.post(messages=[{"role": "user", "content": f"{i} " + "word " * 200}], max_tokens=1)
    assert 0 < explainer.num_bytes <= BYTES_PER_BLOCK * blocks


def test_two_requests_are_compared_without_running_either(running: Running) -> None:
    before = running.engine.snapshot.counts.prompt_tokens
    for name in ("another description of a tool", "other ids", "reasoning that was dropped", "another salt"):
        change, reason, field = PLANTED[name]
        body = copy.deepcopy(BASE)
        change(body)
        found = running.post("/v1/cache/explain", earlier=BASE, now=body).json()
        assert (found["reason"], found["field"]) == (reason, field)
        assert found["text"] and found["tokens"] > found["matched_tokens"]
        assert (found["earlier_text"] is None) == (reason == "cache_salt")  # whose texts are the same
    same = running.post("/v1/cache/explain", earlier=BASE, now=BASE).json()
    assert same["reason"] == "contained" and same["matched_tokens"] == same["tokens"] == same["earlier_tokens"]
    assert running.engine.snapshot.counts.prompt_tokens == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"earlier": BASE}, "now"),
        ({"earlier": BASE, "now": {"messages": []}}, "now.messages"),
        ({"earlier": BASE | {"messages": [{"role": "tool", "content": "a"}]}, "now": BASE}, "earlier.messages[0]"),
        ({"earlier": BASE, "now": BASE | {"messages": [{"role": "user", "content": "a"}] * 5000}}, "now.messages"),
        ({"earlier": BASE | {"model": "other"}, "now": BASE}, "earlier.model"),
    ],
)
def test_a_request_that_cannot_be_compared_is_refused_by_its_path(
    running: Running, body: dict[str, Any], param: str
) -> None:
    response = running.post("/v1/cache/explain", **body)
    assert 400 <= response.status_code < 500
    assert response.json()["error"]["param"].startswith(param)


def test_the_comparison_of_two_requests_needs_a_key_as_all_questions_do(llama: Llama) -> None:
    body = {"earlier": BASE, "now": BASE | {"messages": TRANSCRIPT[1:]}}
    with serving(llama, api_keys=("a", "b")) as running:
        url = f"{running.url}/v1/cache/explain"
        for headers in ({}, {"authorization": "Bearer c"}):
            response = httpx.post(url, json=body, headers=headers, timeout=30)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")

        found = [httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=30) for key in "ab"]
        assert [one.status_code for one in found] == [200, 200] and found[0].json() == found[1].json()
        assert running.service.explainer.counts == {} and running.service.explainer.num_bytes == 0, "none is kept"


@pytest.mark.parametrize("is_long", [True, False])
def test_answers_to_long_prompts_are_kept_beside_the_event_loop(
    llama: Llama, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    finished, threads = PrefixExplainer.finished, list[threading.Thread]()

    def noted(self: PrefixExplainer, *how: Any) -> None:
        threads.append(threading.current_thread())
        finished(self, *how)

    monkeypatch.setattr(PrefixExplainer, "finished", noted)
    if is_long:
        monkeypatch.setattr("llamarium.server.replying.LONG_PROMPT", 8)
    with serving(llama) as running:
        said = running.post(**BASE).json()["choices"][0]["message"]
        after = [*TRANSCRIPT, said, {"role": "user", "content": "And now?"}]
        header = running.post(**BASE | {"messages": after}).headers["x-llamarium-prefix"]
    assert "reason=retokenized; field=messages[8].content" in header, "the answer is known when the next prompt comes"
    assert len(threads) == 2 and (running._thread in threads) == (not is_long)
