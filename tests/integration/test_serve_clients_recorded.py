"""Sessions of the programs that speak responses and messages, as tests/clients/ records them, in our own words.

A session is two requests: one whose answer has to be a call, and the next turn, with the call and its result in the
program's own way. `talker` shows that the call is made and follows the tool's schema; the scripted server, whose
second answer repeats the result only if it stands in the prompt, that the result is used.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from clients.scripted_server import CALLS, PRINTED, scripted_server
from serving import Running

pytestmark = pytest.mark.torch

NO_EFFECT = "x-llamarium-no-effect"
JsonObject = dict[str, Any]
QUESTION = "Use a tool to find out what is printed, and repeat that."
TEXT: JsonObject = {"type": "string"}
CLOSED = {"additionalProperties": False}
ZOD = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
MOST_SAFE = 2**53 - 1  # zod writes it as the bounds of every integer


def closed(properties: JsonObject, *required: str, **more: Any) -> JsonObject:
    """The schema of an object."""
    return {"type": "object", "properties": properties, "required": [*required], **CLOSED, **more}


@dataclass(frozen=True)
class Call:
    """What an answer calls."""

    id: str
    name: str
    arguments: str
    item_id: str = ""

    @property
    def values(self) -> Any:
        return json.loads(self.arguments)


@dataclass(frozen=True)
class Session:
    """How a program asks.

    Attributes:
        path: Of its requests.
        headers: Those that say something of the program or its protocol.
        request: Beside the dialog and the tools.
        tools: As they are sent; the first one that `CALLS` names is called.
        opening: The dialog before the call.
        turn: Returns what is added to the dialog, for a call and its result.
        no_effect: What the server names of the second request.
    """

    path: str
    request: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    opening: Sequence[Mapping[str, Any]]
    turn: Callable[[Call, str], list[JsonObject]]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    no_effect: frozenset[str] = frozenset()

    @property
    def is_messages(self) -> bool:
        return self.path.startswith("/v1/messages")

    @property
    def tool(self) -> Mapping[str, Any]:
        return next(tool for tool in self.tools if tool.get("name") in CALLS)

    def body(self, dialog: Sequence[Mapping[str, Any]], **more: Any) -> JsonObject:
        """A request."""
        place = "messages" if self.is_messages else "input"
        return {"model": "small", **self.request, "tools": [*self.tools], place: [*dialog], **more}

    def forced(self) -> JsonObject:
        """What forces a call of the tool."""
        name = self.tool["name"]
        if self.is_messages:
            return {"tool_choice": {"type": "tool", "name": name}, "max_tokens": 192}
        return {"tool_choice": {"type": "function", "name": name}, "max_output_tokens": 192}


# --- responses --------------------------------------------------------------------------------------------------------

LEFT_RIGHT = {"left": TEXT, "right": TEXT}
SAID: JsonObject = {"role": "user", "content": QUESTION}
PARTS: JsonObject = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}


def item(kind: str, role: str, *texts: str) -> JsonObject:
    """A message of Codex's."""
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{kind}", "role": role, "content": content}


def returned(
    call: Call,
    result: str,
    *,
    keys: str = "call_id name arguments",
    parts: bool = False,
    more: JsonObject | None = None,
) -> list[JsonObject]:
    """A call and its result as items, the call with these keys."""
    known = {"id": call.item_id, "call_id": call.id, "name": call.name, "status": "completed"}
    known["arguments"] = json.dumps(call.values, separators=(",", ":"))
    output: Any = [{"type": "input_text", "text": result}] if parts else result
    called = {"type": "function_call", **{key: known[key] for key in keys.split()}}
    return [called, {"type": "function_call_output", "call_id": call.id, "output": output, **(more or {})}]


def codex_turn(call: Call, result: str) -> list[JsonObject]:
    """Codex sends its own id of an output, and says how the command went."""
    told = f"Chunk ID: e8933d\nWall time: 0.0000 seconds\nProcess exited with code 0\nOutput:\n{result}\n"
    return returned(call, told, keys="status id name arguments call_id", more={"id": "fco_01a2"})


RUNS = closed(
    {
        "cmd": {**TEXT, "description": "The command"},
        "login": {"type": "boolean", "description": "Start a login shell"},
        "prefix_rule": {"type": "array", "items": TEXT},
        "sandbox_permissions": {**TEXT, "enum": ["use_default", "require_escalated"]},
        "yield_time_ms": {"type": "number"},
    },
    "cmd",
)
ASKS = closed(
    {
        "questions": {
            "type": "array",
            "items": closed(
                {"id": TEXT, "options": {"type": "array", "items": closed({"label": TEXT}, "label")}}, "id", "options"
            ),
        }
    },
    "questions",
)
CODEX = Session(
    "/v1/responses",
    {
        "stream": True,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a223fa-ced2-7503",
        "client_metadata": {"session_id": "01a223fa", "x-codex-turn-metadata": '{"request_kind":"turn"}'},
    },
    [
        {"type": "function", "name": "exec_command", "description": "Runs it", "strict": False, "parameters": RUNS},
        {"type": "function", "name": "request_user_input", "strict": False, "parameters": ASKS},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Other agents",
            "tools": [{"type": "function", "name": "send_input", "strict": False, "parameters": closed({"id": TEXT})}],
        },
        {"type": "function", "name": "get_goal", "strict": False, "parameters": closed({})},
    ],
    [
        item("1", "developer", "You are a coding agent in a terminal."),
        item("2", "developer", "<skills_instructions>\nNone.", "<permissions instructions>\nAll is allowed."),
        item("3", "user", "<environment_context>\n  <cwd>/tmp</cwd>\n</environment_context>"),
        item("4", "user", QUESTION),
    ],
    codex_turn,
    {
        "originator": "codex_exec",
        "user-agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.171.0)",
        "session-id": "01a223fa",
        "x-codex-window-id": "01a223fa:0",
        "x-codex-turn-metadata": '{"request_kind":"turn"}',
        "accept": "text/event-stream",
    },
    frozenset(
        "client_metadata include input[].id input[].status prompt_cache_key reasoning.summary store "
        "tools[].namespace".split()
    ),
)
AGENTS = {
    "name": "join",
    "parameters": closed(
        {name: {"description": "A text.", "title": name.title(), **TEXT} for name in LEFT_RIGHT},
        *LEFT_RIGHT,
        title="join_args",
    ),
    "strict": True,
    "type": "function",
    "description": "Join two texts.",
}
AI_SDK = closed(
    {**LEFT_RIGHT, "labels": {"type": "object", "propertyNames": TEXT, "additionalProperties": TEXT}},
    *LEFT_RIGHT,
    **{"$schema": "http://json-schema.org/draft-07/schema#"},
)
JOIN: JsonObject = {"type": "function", "name": "join", "description": "Join two texts"}
OPEN = {"type": "object", "properties": LEFT_RIGHT, "required": [*LEFT_RIGHT]}
RESPONSES = {
    "agno": Session(
        "/v1/responses",
        {"reasoning": {}},
        [{"name": "join", "description": "Join two texts", "parameters": OPEN, "type": "function"}],
        [SAID],
        partial(returned, keys="call_id name arguments status id"),
        no_effect=frozenset({"input[].id", "input[].status"}),
    ),
    "ai-sdk": Session("/v1/responses", {}, [{**JOIN, "parameters": AI_SDK}], [PARTS], returned),
    "codex": CODEX,
    "haystack": Session(
        "/v1/responses",
        {"stream": False},
        [{**JOIN, "parameters": closed(LEFT_RIGHT, *LEFT_RIGHT), "strict": False}],
        [PARTS],
        partial(returned, keys="name arguments id call_id", parts=True),
        no_effect=frozenset({"input[].id"}),
    ),
    "openai-agents": Session(
        "/v1/responses",
        {"include": []},
        [AGENTS],
        [SAID],
        partial(returned, keys="arguments call_id name id status"),
        {"user-agent": "Agents/Python 0.24.0", "x-stainless-async": "async:asyncio"},
        frozenset({"input[].id", "input[].status"}),
    ),
}

# --- messages ---------------------------------------------------------------------------------------------------------

CACHED: JsonObject = {"cache_control": {"type": "ephemeral"}}


def blocks(call: Call, result: str, *, parts: bool = False, at_end: bool = False, **more: Any) -> list[JsonObject]:
    """A call and its result as blocks of two messages."""
    content: Any = [{"text": result, "type": "text"}] if parts else result
    used = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.values}
    told = {"tool_use_id": call.id, "type": "tool_result", "content": content, **more, **(CACHED if at_end else {})}
    return [{"role": "assistant", "content": [used]}, {"role": "user", "content": [told]}]


def zod(name: str, properties: JsonObject, *required: str) -> JsonObject:
    """A tool of Claude Code's, whose schemas zod writes."""
    schema = {**ZOD, "properties": properties, **({"required": [*required]} if required else {}), **CLOSED}
    return {"name": name, "description": f"{name}, as the program describes it", "input_schema": schema}


POSITIVE = {"type": "integer", "exclusiveMinimum": 0, "maximum": MOST_SAFE}
CLAUDE_TOOLS = [
    zod(
        "Agent",
        {"prompt": TEXT, "model": {**TEXT, "enum": ["small", "large"]}, "run_in_background": {"type": "boolean"}},
        "prompt",
    ),
    zod("Bash", {"command": TEXT, "timeout": {"type": "number"}, "description": TEXT}, "command"),
    zod("CronList", {}),
    zod("Edit", {"path": TEXT, "replace_all": {"default": False, "type": "boolean"}}, "path"),
    zod("Read", {"path": TEXT, "offset": {"type": "integer", "minimum": 0, "maximum": MOST_SAFE}, "limit": POSITIVE}),
    zod("ReportFindings", {"findings": {"type": "array", "maxItems": 32, "items": closed({"file": TEXT}, "file")}}),
    zod("SendMessage", {"to": TEXT, "message": {**TEXT, "maxLength": 100}}, "to"),
    zod("TaskCreate", {"metadata": {"type": "object", "propertyNames": TEXT, "additionalProperties": {}}}),
    zod(
        "TaskUpdate",
        {"status": {"anyOf": [{**TEXT, "enum": ["pending", "completed"]}, {**TEXT, "const": "deleted"}]}},
        "status",
    ),
    zod("WebFetch", {"url": {**TEXT, "format": "uri"}, "prompt": TEXT}, "url"),
    zod("WebSearch", {"query": {**TEXT, "minLength": 2}, "allowed_domains": {"type": "array", "items": TEXT}}, "query"),
    zod("Workflow", {"args": {"description": "Anything"}, "resume": {**TEXT, "pattern": "^wf_[a-z0-9-]{6,}$"}}),
]
CLAUDE = Session(
    "/v1/messages?beta=true",
    {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "\nYou help with a program.", **CACHED},
        ],
        "metadata": {"user_id": '{"device_id":"9f72","session_id":"6b2f"}'},
        "max_tokens": 4096,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    },
    CLAUDE_TOOLS,
    [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe date.\n</system-reminder>\n"},
                {"type": "text", "text": QUESTION, **CACHED},
            ],
        },
        {"role": "system", "content": "Available agent types for the Agent tool:\n- claude: for anything"},
    ],
    partial(blocks, is_error=False, at_end=True),
    {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,mid-conversation-system-2026-04-07",
        "anthropic-dangerous-direct-browser-access": "true",
        "authorization": "Bearer none",
        "user-agent": "claude-cli/2.1.197 (external, sdk-cli)",
        "x-app": "cli",
        "x-claude-code-session-id": "6b2f6fec",
        "x-stainless-lang": "js",
    },
    frozenset(
        "anthropic-beta context_management messages[].content[].cache_control metadata output_config.effort "
        "system[].cache_control thinking".split()
    ),
)
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
MESSAGES = {
    "ai-sdk": Session(
        "/v1/messages",
        {"max_tokens": 4096},
        [{"name": "join", "description": "Join two texts", "input_schema": AI_SDK}],
        BLOCKS,
        blocks,
        {"anthropic-version": "2023-06-01", "x-api-key": "none", "sec-fetch-mode": "cors"},
    ),
    "claude-code": CLAUDE,
    "continue": Session(
        "/v1/messages",
        {"system": [{"type": "text", "text": "You are an agent.", **CACHED}], "max_tokens": 4096, "stream": True},
        [
            {
                "name": "Read",
                "input_schema": {"type": "object", "required": ["filepath"], "properties": {"filepath": TEXT}},
            },
            {
                "name": "Bash",
                "description": "Runs a command",
                "input_schema": {
                    "type": "object",
                    "required": ["command"],
                    "properties": {"command": TEXT, "timeout": {"type": "number"}},
                },
                **CACHED,
            },
        ],
        [{"role": "user", "content": [{"type": "text", "text": QUESTION, **CACHED}]}],
        blocks,
        {"anthropic-beta": "prompt-caching-2024-07-31", "anthropic-version": "2023-06-01", "x-api-key": "none"},
        frozenset(
            "anthropic-beta messages[].content[].cache_control system[].cache_control tools[].cache_control".split()
        ),
    ),
    "pydantic-ai": Session(
        "/v1/messages",
        {"max_tokens": 4096, "stream": False, "tool_choice": {"type": "auto"}},
        [{"name": "join", "description": "Join two texts.", "input_schema": closed(LEFT_RIGHT, *LEFT_RIGHT)}],
        BLOCKS,
        partial(blocks, parts=True, is_error=False),
        {"anthropic-version": "2026-10-21", "user-agent": "pydantic-ai/2.68.0"},
    ),
}
SESSIONS = {f"responses of {name}": session for name, session in RESPONSES.items()} | {
    f"messages of {name}": session for name, session in MESSAGES.items()
}

# --- what comes back --------------------------------------------------------------------------------------------------


def ask(running: Running, session: Session, body: JsonObject) -> tuple[str, list[Call], str, set[str]]:
    """The text of an answer, its calls, how it ended, and what had no effect; of a stream by its events."""
    got = httpx.post(running.url + session.path, json=body, headers=dict(session.headers), timeout=60)
    assert got.status_code == 200, got.text
    events = [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: {")]
    if session.is_messages:
        found = from_events(events) if body.get("stream") else got.json()
        read = [(block["type"], block) for block in found["content"]]
        text = "".join(block["text"] for kind, block in read if kind == "text")
        calls = [Call(b["id"], b["name"], json.dumps(b["input"])) for kind, b in read if kind == "tool_use"]
        ended = found["stop_reason"]
    else:
        found = events[-1]["response"] if body.get("stream") else got.json()
        items = [(one["type"], one) for one in found["output"]]
        text = "".join(part["text"] for kind, one in items if kind == "message" for part in one["content"])
        called = [one for kind, one in items if kind == "function_call"]
        calls = [Call(one["call_id"], one["name"], one["arguments"], one["id"]) for one in called]
        ended = found["status"]
    return text, calls, ended, set(got.headers.get(NO_EFFECT, "").split(",")) - {""}


def from_events(events: Sequence[JsonObject]) -> JsonObject:
    """Put a message together, as a client does."""
    content: list[JsonObject] = []
    written: dict[int, str] = {}
    reason = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                content.append(dict(event["content_block"]))
            case "content_block_delta":
                delta = event["delta"]
                piece = delta.get("text", delta.get("partial_json"))
                written[event["index"]] = written.get(event["index"], "") + piece
            case "message_delta":
                reason = event["delta"]["stop_reason"]
            case _:
                pass
    for index, block in enumerate(content):
        said = written.get(index, "")
        block.update({"text": said} if block["type"] == "text" else {"input": json.loads(said or "{}")})
    return {"content": content, "stop_reason": reason}


@pytest.fixture(scope="module")
def scripted(smollm2_path: Path) -> Iterator[Running]:
    with scripted_server(smollm2_path) as (running, _):
        yield running


@pytest.mark.parametrize("name", SESSIONS)
def test_a_call_that_is_forced_follows_the_tools_schema(talker: Running, name: str) -> None:
    session = SESSIONS[name]
    body = session.body(session.opening, temperature=0) | session.forced()
    _, (call,), ended, _ = ask(talker, session, body)
    assert (call.name, ended) == (session.tool["name"], "tool_use" if session.is_messages else "completed")
    schema = session.tool.get("input_schema") or session.tool.get("parameters")
    jsonschema.validate(call.values, schema)


@pytest.mark.parametrize("name", SESSIONS)
def test_a_call_is_executed_and_its_result_is_used(scripted: Running, name: str) -> None:
    session = SESSIONS[name]
    text, (call,), _, _ = ask(scripted, session, session.body(session.opening))
    assert (text, call.name, call.values) == ("", session.tool["name"], CALLS[call.name])
    assert PRINTED not in json.dumps(session.body(session.opening)) + call.arguments, "only the result has it"

    dialog = [*session.opening, *session.turn(call, PRINTED)]
    text, calls, ended, no_effect = ask(scripted, session, session.body(dialog))
    assert PRINTED in text and calls == []
    assert ended == ("end_turn" if session.is_messages else "completed")
    assert no_effect == session.no_effect
