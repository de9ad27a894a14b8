"""Requests in the shapes of aider, Codex and Claude Code, which are programs of their own."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from serving import CHAT, Running

pytestmark = pytest.mark.torch

NO_EFFECT = "x-llamarium-no-effect"
COMMAND: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "What the shell runs"},
        "timeout": {"type": "number", "description": "Milliseconds"},
        "run_in_background": {"type": "boolean"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
PLAN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "explanation": {"type": "string"},
        "plan": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "step": {"type": "string"},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["step", "status"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["plan"],
    "additionalProperties": False,
}
RESULT = "README.md\nsrc"


def sent(running: Running, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[list[Any], set[str]]:
    """The data of a stream's events, and the fields that had no effect."""
    answer = httpx.post(running.url + path, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    told = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in told if line != "[DONE]"], set(answer.headers[NO_EFFECT].split(","))


def test_aiders_dialog_with_a_reminder_at_its_end(talker: Running) -> None:
    body = {
        "model": "small",
        "messages": [
            {"role": "system", "content": "Act as an expert software developer."},
            {"role": "user", "content": "Change get_factorial() to use math.factorial"},
            {"role": "assistant", "content": "mathweb/flask/app.py\n```\n<<<<<<< SEARCH\nfrom flask import Flask\n```"},
            {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
            {"role": "system", "content": "Answer in one sentence."},
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 48,
        "reasoning_effort": "low",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    *chunks, last = sent(talker, CHAT, body, {"http-referer": "https://aider.chat", "x-title": "Aider"})[0]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks).strip()
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert last["usage"]["completion_tokens"] > 0


CODEX: dict[str, Any] = {
    "model": "small",
    "instructions": "You are a coding agent running in a terminal.",
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Run it", "strict": False, "parameters": COMMAND},
        {"type": "function", "name": "update_plan", "description": "Plan", "strict": False, "parameters": PLAN},
        {
            "type": "namespace",
            "name": "agents",
            "description": "Other agents",
            "tools": [{"type": "function", "name": "spawn", "strict": False, "parameters": COMMAND}],
        },
        {"type": "custom", "name": "apply_patch", "description": "Patch", "format": {"type": "text"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81a4-7b70-9cbc-d84c1d1d9b3d",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
    "temperature": 0,
    "max_output_tokens": 96,
}
CODEX_HEADERS = {
    "originator": "codex_cli_rs",
    "session_id": "0199a213",
    "openai-beta": "responses=experimental",
    "accept": "text/event-stream",
}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def test_codexs_turns(talker: Running) -> None:
    """A turn; and one more with what it answered, a call and its result, which Codex adds to the same dialog."""
    dialog: list[dict[str, Any]] = [
        said("developer", "<permissions instructions>Read only.</permissions instructions>"),
        said("user", "<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"),
        said("user", "What is the capital of France?"),
    ]
    events, no_effect = sent(talker, "/v1/responses", CODEX | {"input": dialog}, CODEX_HEADERS)
    assert {"reasoning.effort", "reasoning.summary", "store", "prompt_cache_key", "text.verbosity"} <= no_effect
    assert {"tools[].namespace", "tools[].custom", "tools[].web_search"} <= no_effect
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"] and items

    call = {"type": "function_call", "name": "exec_command", "arguments": '{"command": "ls"}', "call_id": "call_1"}
    dialog += [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABo"},
        *(item for item in items if item["type"] == "message"),
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": f"Exit code: 0\nOutput:\n{RESULT}"},
    ]
    *_, end = sent(talker, "/v1/responses", CODEX | {"input": dialog}, CODEX_HEADERS)[0]
    usage = end["response"]["usage"]
    assert end["type"] in ("response.completed", "response.incomplete") and end["response"]["output"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0


def test_codex_asks_for_a_form_beside_its_tools(talker: Running) -> None:
    verdict = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "name": "codex_output_schema", "strict": True, "schema": verdict}
    body = CODEX | {"input": [said("user", "Is Paris in France?")], "text": {"verbosity": "low", "format": form}}
    *_, end = sent(talker, "/v1/responses", body | {"parallel_tool_calls": False}, CODEX_HEADERS)[0]
    (item,) = end["response"]["output"]
    if item["type"] == "message":
        jsonschema.validate(json.loads(item["content"][0]["text"]), verdict | {"additionalProperties": False})
    else:
        parameters = {"exec_command": COMMAND, "update_plan": PLAN}[item["name"]]
        jsonschema.validate(json.loads(item["arguments"]), parameters)


CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "model": "small",
    "system": [
        {"type": "text", "text": "You are Claude Code, a program for the shell.", **CACHED},
        {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command", "input_schema": COMMAND},
        {"name": "TodoWrite", "description": "Plans", "input_schema": PLAN, **CACHED},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer none",
}
MORE: dict[str, Any] = {
    "max_tokens": 64,
    "temperature": 0,
    "stream": True,
    "metadata": {"user_id": "user_1_account__session_2"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}


@pytest.mark.parametrize("is_forced", [False, True])
def test_claude_code_runs_a_command_and_goes_on(talker: Running, is_forced: bool) -> None:
    dialog: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nThe date.\n</system-reminder>"}]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [{"type": "text", "text": "List the files.", **CACHED}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A command lists them.", "signature": "EqQBCgIYAhIk"},
                {"type": "text", "text": "I will look."},
                {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": RESULT, "is_error": False, **CACHED}
            ],
        },
    ]
    asked = CLAUDE | {"messages": dialog} | ({"tool_choice": {"type": "tool", "name": "Bash"}} if is_forced else {})
    counted = httpx.post(f"{talker.url}/v1/messages/count_tokens?beta=true", json=asked, headers=CLAUDE_HEADERS)
    assert counted.status_code == 200, counted.text
    events, no_effect = sent(talker, "/v1/messages?beta=true", asked | MORE, CLAUDE_HEADERS)
    assert {"anthropic-beta", "thinking", "context_management", "output_config.effort"} <= no_effect
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    usage = events[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted.json()["input_tokens"]
    kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    reason = events[-2]["delta"]["stop_reason"]
    assert (
        (kinds, reason) == (["tool_use"], "tool_use") if is_forced else reason in ("end_turn", "max_tokens", "tool_use")
    )
