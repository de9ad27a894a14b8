"""What a request may have besides the fields that are honoured: taken and named, or refused with the right name."""

import dataclasses
from typing import Any

import httpx
import pytest

from llamarium.server.field_table import TABLE, Hint
from llamarium.server.hints import HEADER, MAX_NAME_CHARACTERS, MAX_NAMES
from serving import CHAT, HELLO, Running

pytestmark = pytest.mark.torch

SAID = {"messages": HELLO["messages"]}
RESPONSE: dict[str, Any] = {"input": "Hello!", "temperature": 0, "max_output_tokens": 8}
MESSAGE: dict[str, Any] = SAID | {"temperature": 0, "max_tokens": 8}
TEXT: dict[str, Any] = {"prompt": "Hello", "temperature": 0, "max_tokens": 8}
PLAIN = {CHAT: HELLO, "/v1/completions": TEXT, "/v1/responses": RESPONSE, "/v1/messages": MESSAGE}


def named(answer: httpx.Response) -> set[str]:
    """The names in an answer's header."""
    assert answer.status_code == 200, answer.text
    return set(answer.headers.get(HEADER, "").split(",")) - {""}


def refused(answer: httpx.Response) -> tuple[str, str]:
    """The field of a refusal, and its message."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error.get("param") or error["details"]["param"], error["message"]


def text_of(answer: httpx.Response) -> Any:
    body = answer.json()
    if "choices" in body:
        return [choice.get("message", {}).get("content", choice.get("text")) for choice in body["choices"]]
    content = body["content"] if "content" in body else body["output"][0]["content"]
    return [part["text"] for part in content]


# --- unknown names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PLAIN)
def test_an_unknown_name_is_taken_and_named_and_changes_nothing(running: Running, path: str) -> None:
    answer = running.post(path, **PLAIN[path], my_own_setting={"x": [1]})
    assert named(answer) == {"my_own_setting"}
    assert text_of(answer) == text_of(running.post(path, **PLAIN[path]))


def test_unknown_names_are_taken_at_any_depth_and_reach_no_template(running: Running) -> None:
    tool = {
        "type": "function", "origin": "mcp",
        "function": {"name": "f", "origin": "mcp", "parameters": {"type": "object", "properties": {}}},
    }  # fmt: skip
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi", "mood": 1}], "weight": 1}]
    told = {"messages": messages, "tools": [tool], "stream_options": {"padding": 1}, "stream": True, "max_tokens": 2}
    expected = {
        "messages[].weight", "messages[].content[].mood", "tools[].origin", "tools[].function.origin",
        "stream_options.padding",
    }  # fmt: skip
    assert named(running.post(**told)) == expected
    plain = running.post(
        "/apply-template",
        messages=[{"role": "user", "content": "Hi"}],
        tools=[{"type": "function", "function": {k: v for k, v in tool["function"].items() if k != "origin"}}],
    ).json()
    assert running.post("/apply-template", messages=messages, tools=[tool]).json() == plain


def test_names_in_the_header_and_the_log_are_escaped_and_few(
    running: Running, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = {"a\r\nset-cookie: x": 1, "b,c": 1, "🦙": 1, "x" * 1000: 1} | {
        f"own_{i}_setting_of_mine": 1 for i in range(99)
    }
    names = named(running.post(**HELLO, **odd))
    assert len(names) == MAX_NAMES + 1 and f"and-{len(odd) - MAX_NAMES}-more" in names
    assert all(name.isascii() and name.isprintable() and len(name) <= MAX_NAME_CHARACTERS for name in names)
    assert {"a\\r\\nset-cookie: x", "b\\x2cc", "\\U0001f999"} <= names
    running.wait(lambda: "no_effect=" in capfd.readouterr().err)


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        (CHAT, "temprature", "temperature"),
        (CHAT, "tempratur", "temperature"),
        (CHAT, "maxTokens", "max_tokens"),
        (CHAT, "max-tokens", "max_tokens"),
        (CHAT, "max_token", "max_tokens"),
        (CHAT, "topP", "top_p"),
        (CHAT, "toolChoice", "tool_choice"),
        (CHAT, "respones_format", "response_format"),
        (CHAT, "frequencyPenalty", "frequency_penalty"),
        (CHAT, "mirostatt", "mirostat"),
        ("/v1/messages", "stop_sequence", "stop_sequences"),
        ("/v1/messages", "sytem", "system"),
        ("/v1/responses", "maxOutputTokens", "max_output_tokens"),
        ("/v1/responses", "instruction", "instructions"),
        ("/v1/completions", "promt_logprobs", "prompt_logprobs"),
    ],
)
def test_a_misspelling_is_refused_with_the_right_name(running: Running, path: str, wrong: str, right: str) -> None:
    param, message = refused(running.post(path, **PLAIN[path], **{wrong: 5}))
    assert param == wrong and right in message


def test_a_misspelling_is_found_behind_many_other_names(running: Running) -> None:
    others = {f"own_{i}_setting_of_mine": 1 for i in range(500)}
    assert refused(running.post(**HELLO | {"temperature": None}, **others, temprature=0))[0] == "temprature"


def test_a_misspelling_in_depth_is_refused_by_its_path(running: Running) -> None:
    messages = [{"role": "user", "content": "x", "toolCalls": [1]}]
    param, message = refused(running.post(messages=messages))
    assert param == "messages[0].toolCalls" and "tool_calls" in message


@pytest.mark.parametrize("name", ["tags", "models", "seeds_of_change", "temperature_unit", "n_best", "mode", "top"])
def test_other_words_are_no_misspellings(running: Running, name: str) -> None:
    assert named(running.post(**HELLO, **{name: 1})) == {name}


def test_no_name_of_the_table_is_a_misspelling(running: Running) -> None:
    hints = {
        name for holder in ("generation", "chat") for name, known in TABLE[holder].items() if isinstance(known, Hint)
    }
    for name in hints - {"user", "metadata", "store", "prompt_cache_key", "safety_identifier", "reasoning_effort"}:
        assert named(running.post(**HELLO, **{name: 1})) == {name}


def test_null_is_no_misspelling(running: Running) -> None:
    assert running.post(**HELLO, temprature=None).status_code == 200


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"max_output_tokens": 5}),
        (CHAT, {"stop_sequences": ["x"]}),
        (CHAT, {"system": "Be brief."}),
        (CHAT, {"instructions": "Be brief."}),
        ("/v1/messages", {"stop": ["x"]}),
        ("/v1/messages", {"min_p": 0.5}),
        ("/v1/messages", {"response_format": {"type": "json_object"}}),
        ("/v1/responses", {"max_tokens": 5}),
        ("/v1/responses", {"max_tokens": 0}),
        ("/v1/responses", {"prompt_logprobs": 0}),
        (CHAT, {"max_output_tokens": 0}),
        ("/v1/messages", {"max_output_tokens": 0}),
        ("/v1/completions", {"tools": [{}]}),
    ],
)
def test_what_another_request_honours_is_refused(running: Running, path: str, more: dict[str, Any]) -> None:
    assert refused(running.post(path, **PLAIN[path], **more))[0] in more


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages", {"frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0, "n": 1, "logprobs": False}),
        ("/v1/responses", {"stop": [], "n": 1}),
        ("/v1/responses", {"response_format": {"type": "text"}, "add_generation_prompt": True}),
        (
            "/v1/messages",
            {"response_format": {"type": "text"}, "add_generation_prompt": True, "parallel_tool_calls": True},
        ),
        ("/v1/completions", {"tools": [], "tool_choice": "none"}),
        ("/v1/messages/count_tokens", {"max_tokens": 5, "temperature": 0, "stop_sequences": ["x"], "stream": True}),
        ("/tokenize", {"temperature": 0, "max_tokens": 5}),
    ],
)
def test_what_changes_nothing_here_is_taken(running: Running, path: str, more: dict[str, Any]) -> None:
    assert named(running.post(path, **PLAIN.get(path, SAID), **more)) == more.keys()


# --- names of other servers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize(
    "more",
    [
        {"mirostat": 2}, {"dry_multiplier": 0.8}, {"bad_words": ["x"]}, {"typical_p": 0.9}, {"top_n_sigma": 1.5},
        {"skip_special_tokens": False}, {"include_stop_str_in_output": True}, {"extra_body": {"top_k": 1}},
        {"chat_template": "{{ messages }}"}, {"repeat_penalty": 1.1}, {"truncate_prompt_tokens": 5},
        {"structural_tag": {}}, {"choice": ["a"]}, {"lark": 'start: "a"'}, {"json_object": True},
        {"response_schema": {}}, {"stop_regex": "a"}, {"sampling_seed": 1}, {"temp": 0.5}, {"num_return_sequences": 3},
        {"custom_logit_processor": "x"}, {"enable_thinking": False}, {"parameters": {"max_new_tokens": 3}},
        {"sampling_params": {"temperature": 0}},
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused(running: Running, path: str, more: dict[str, Any]) -> None:
    assert refused(running.post(path, **PLAIN[path], **more))[0] in more


def test_a_fill_in_is_refused(running: Running) -> None:
    assert refused(running.post("/v1/completions", **TEXT, suffix="x"))[0] == "suffix"


@pytest.mark.parametrize("path", PLAIN)
def test_what_is_switched_off_is_taken(running: Running, path: str) -> None:
    off = {
        "mirostat": 0, "mirostat_tau": 5.0, "dry_multiplier": 0, "dry_base": 1.75, "typical_p": 1.0, "top_n_sigma": -1,
        "xtc_probability": 0.0, "skip_special_tokens": True, "cache_prompt": True, "bad_words": [], "repeat_penalty": 1,
        "num_return_sequences": 1, "enable_thinking": True, "parameters": {}, "json_object": False,
    }  # fmt: skip
    answer = running.post(path, **PLAIN[path], **off)
    assert named(answer) == off.keys()
    assert text_of(answer) == text_of(running.post(path, **PLAIN[path]))


# --- tolerances of fields that are honoured ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", PLAIN)
def test_minus_one_is_off_as_other_servers_say(running: Running, path: str) -> None:
    drawn = PLAIN[path] | {"temperature": 1.0, "seed": 3}
    assert text_of(running.post(path, **drawn, top_k=-1)) == text_of(running.post(path, **drawn, top_k=0))
    texts = {str(text_of(running.post(path, **drawn | {"seed": -1}))) for _ in range(4)}
    assert len(texts) > 1


def test_minus_one_is_the_rest_of_the_context(running: Running) -> None:
    for path in (CHAT, "/v1/completions"):
        usage = running.post(path, **PLAIN[path] | {"max_tokens": -1}).json()["usage"]
        assert usage["total_tokens"] > 200


def test_both_names_of_a_length_may_be_given_if_they_are_equal(running: Running) -> None:
    answer = running.post(**HELLO, max_completion_tokens=8)
    assert named(answer) == set() and answer.json()["usage"]["completion_tokens"] == 8
    assert refused(running.post(**HELLO, max_completion_tokens=9))[0] == "max_tokens"


def test_a_variable_that_no_template_reads_is_named(running: Running) -> None:
    answer = running.post(**HELLO, chat_template_kwargs={"enable_thinking": False})
    assert named(answer) == {"chat_template_kwargs.enable_thinking"}
    assert text_of(answer) == text_of(running.post(**HELLO))


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "documents"])
def test_variables_of_every_dialog_cannot_be_given(running: Running, name: str) -> None:
    assert refused(running.post(**HELLO, chat_template_kwargs={name: "x"}))[0] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("more", "accepted"),
    [
        ({"guided_json": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}}, '{"a":1}'),
        ({"guided_json": '{"const": 5}'}, "5"),
        ({"guided_choice": ["yes"]}, "yes"),
        ({"guided_regex": "ab{3}"}, "abbb"),
        ({"guided_grammar": 'root ::= "gbnf"'}, "gbnf"),
        ({"guided_grammar": 'start: "lark"'}, "lark"),
        ({"grammar": 'start: "lark"'}, "lark"),
        ({"structured_outputs": {"grammar": 'start: "lark"'}}, "lark"),
        ({"structured_outputs": {"grammar": 'root ::= "gbnf"'}}, "gbnf"),
    ],
)
def test_earlier_names_of_forms_are_honoured(running: Running, more: dict[str, Any], accepted: str) -> None:
    answer = running.post(**HELLO | {"max_tokens": 40}, **more)
    assert named(answer) == set()
    assert answer.json()["choices"][0]["message"]["content"].translate(str.maketrans("", "", " \t\r\n")) == accepted


def test_two_forms_are_refused(running: Running) -> None:
    assert refused(running.post(**HELLO, guided_json={}, guided_choice=["a"]))[0] == "guided_choice"


# --- tools ------------------------------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
OTHER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "search_context_size": "low"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "g", "parameters": {}}]},
    {"type": "local_shell"},
    {"type": "image_generation"},
    {"type": "tool_search"},
]
KINDS = {f"tools[].{tool['type']}" for tool in OTHER_TOOLS}


def tools_of(path: str, *functions: str) -> list[dict[str, Any]]:
    """Tools of other kinds, and functions after them."""
    made: list[dict[str, Any]] = []
    for name in functions:
        if path == CHAT:
            made.append({"type": "function", "function": {"name": name, "parameters": SCHEMA}})
        elif path == "/v1/responses":
            made.append({"type": "function", "name": name, "parameters": SCHEMA})
        else:
            made.append({"name": name, "input_schema": SCHEMA})
    others = OTHER_TOOLS
    if path == "/v1/messages":
        others = [
            tool | {"type": "web_search_20250305" if tool["type"] == "custom" else tool["type"]} for tool in OTHER_TOOLS
        ]
    return [*others, *made]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_tools_of_other_kinds_are_left_out_and_named(running: Running, path: str) -> None:
    answer = running.post(path, **PLAIN[path], tools=tools_of(path, "f"))
    kinds = KINDS if path != "/v1/messages" else {*KINDS - {"tools[].custom"}, "tools[].web_search_20250305"}
    assert named(answer) == kinds
    alone = running.post(path, **PLAIN[path], tools=tools_of(path, "f")[len(OTHER_TOOLS) :])
    assert text_of(answer) == text_of(alone)


@pytest.mark.parametrize(
    ("path", "choice", "param"),
    [
        (CHAT, {"type": "custom", "custom": {"name": "apply_patch"}}, "tool_choice.type"),
        (CHAT, "required", "tool_choice"),
        ("/v1/responses", {"type": "web_search"}, "tool_choice.type"),
        ("/v1/responses", {"type": "custom", "name": "apply_patch"}, "tool_choice.type"),
        ("/v1/responses", "required", "tool_choice"),
        ("/v1/messages", {"type": "tool", "name": "apply_patch"}, "tool_choice.name"),
        ("/v1/messages", {"type": "any"}, "tool_choice"),
    ],
)
def test_a_tool_that_cannot_run_cannot_be_forced(running: Running, path: str, choice: Any, param: str) -> None:
    told = running.post(path, **PLAIN[path], tools=tools_of(path), tool_choice=choice)
    assert refused(told)[0] == param


def test_an_allowed_tool_that_cannot_run_is_not_there(running: Running) -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "f"}],
    }
    only_others = allowed | {"tools": [{"type": "web_search"}]}
    tools = tools_of("/v1/responses", "f")
    assert running.post("/v1/responses", **RESPONSE, tools=tools, tool_choice=allowed).status_code == 200
    assert running.post("/v1/responses", **RESPONSE, tools=tools, tool_choice=only_others).status_code == 200


@pytest.mark.parametrize(
    ("path", "tool", "param"),
    [
        (CHAT, {"name": "f", "input_schema": SCHEMA}, "tools[0].input_schema"),
        (CHAT, {"type": "Function", "function": {"name": "f"}}, "tools[0].type"),
        (CHAT, {"type": "function", "name": "f", "parameters": SCHEMA}, "tools[0].parameters"),
        (CHAT, {"type": "custom", "name": "f", "input_schema": SCHEMA}, "tools[0].input_schema"),
        (CHAT, {"type": ["function"], "function": {"name": "f"}}, "tools[0].type"),
        ("/v1/responses", {"type": "function", "function": {"name": "f"}}, "tools[0].function"),
        ("/v1/responses", {"name": "f", "input_schema": SCHEMA}, "tools[0].input_schema"),
        ("/v1/messages", {"type": "function", "function": {"name": "f"}}, "tools[0].function"),
        ("/v1/messages", {"type": "function", "name": "f", "parameters": SCHEMA}, "tools[0].parameters"),
    ],
)
def test_a_function_in_another_spelling_is_refused_and_not_left_out(
    running: Running, path: str, tool: dict[str, Any], param: str
) -> None:
    assert refused(running.post(path, **PLAIN[path], tools=[tool]))[0] == param


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("untyped", [{}, {"type": None}], ids=["absent", "null"])
def test_a_functions_type_may_be_left_out(running: Running, path: str, untyped: dict[str, Any]) -> None:
    tool = tools_of(path, "f")[-1]
    without = {name: value for name, value in tool.items() if name != "type"} | untyped
    answer = running.post(path, **PLAIN[path], tools=[without])
    assert named(answer) == set() and text_of(answer) == text_of(running.post(path, **PLAIN[path], tools=[tool]))


def test_errors_of_the_others_name_their_places(running: Running) -> None:
    tools = tools_of(CHAT, "f", "f")
    assert refused(running.post(**HELLO, tools=tools))[0] == f"tools[{len(OTHER_TOOLS) + 1}].function.name"
    tools = tools_of("/v1/messages", "f", "f")
    told = running.post("/v1/messages", **MESSAGE, tools=tools)
    assert refused(told)[0] == f"tools[{len(OTHER_TOOLS) + 1}].name"


# --- with --strict-fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "code", "param"),
    [
        ({"my_own_setting": 1}, "unknown_parameter", "my_own_setting"),
        ({"my_own_setting": None}, "unknown_parameter", "my_own_setting"),
        ({"cache_prompt": True}, "unsupported_parameter", "cache_prompt"),
        ({"mirostat": 0}, "unsupported_parameter", "mirostat"),
        ({"tools": OTHER_TOOLS[:1]}, "invalid_parameter", "tools[0].type"),
        ({"chat_template_kwargs": {"x": 1}}, "unsupported_parameter", "chat_template_kwargs.x"),
    ],
)
def test_strict_fields_refuses_them(
    running: Running, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], code: str, param: str
) -> None:
    strict = dataclasses.replace(running.service.settings, strict_fields=True)
    monkeypatch.setattr(running.service, "settings", strict)
    answer = running.post(**HELLO, **more)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


# --- arguments that broke off -----------------------------------------------------------------------------------------

BROKEN = '{"x": 5, "text": "an end that nev'


def test_arguments_that_broke_off_can_be_given_back(running: Running) -> None:
    def dialog(arguments: str) -> list[dict[str, Any]]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [*HELLO["messages"], said, {"role": "tool", "tool_call_id": "c", "content": "no JSON"}]

    tools = tools_of(CHAT, "f")[len(OTHER_TOOLS) :]
    broken = HELLO | {"messages": dialog(BROKEN), "tools": tools}
    answer = running.post(**broken)
    assert named(answer) == {"messages[].tool_calls[].function.arguments"}
    assert text_of(answer) == text_of(running.post(**broken | {"messages": dialog('{"x": 5}')}))
    whole = running.post(**broken | {"messages": dialog('{"a": 1}')})
    for odd in ('{"a": 1, "b": NaN}', '{"a": 1, [1]: 2}', '{"a": 1, {}: 2'):
        assert text_of(running.post(**broken | {"messages": dialog(odd)})) == text_of(whole)
    for odd in ('{[1]:"a"', '{{}:"x"', "[1", "x", "[" * 10**5, '{"a":' * 10**5, '{"a": ' + "1" * 6000):
        assert running.post(**broken | {"messages": dialog(odd), "max_tokens": 1}).status_code == 200
    for empty in ("", "null"):  # of a function without parameters
        answer = running.post(**broken | {"messages": dialog(empty)})
        assert named(answer) == set() and text_of(answer) == text_of(
            running.post(**broken | {"messages": dialog("{}")})
        )


def test_items_with_arguments_that_broke_off_can_be_given_back(running: Running) -> None:
    def items(arguments: str) -> list[dict[str, Any]]:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        result = {"type": "function_call_output", "call_id": "c", "output": "no JSON"}
        return [{"role": "user", "content": "Hello!"}, call, result]

    answer = running.post("/v1/responses", **RESPONSE | {"input": items(BROKEN)})
    assert named(answer) == {"input[].arguments"}
    assert text_of(answer) == text_of(running.post("/v1/responses", **RESPONSE | {"input": items('{"x": 5}')}))
