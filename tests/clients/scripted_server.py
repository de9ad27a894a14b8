"""A server whose answers are written down: the first calls a tool of the client, the next repeats what the tool said.

A client without tools gets an edit, code or a JSON value instead, by which it comes to the same result. So a client
passes if it does what the first answer says and sends the result back, whatever a small model would have chosen. The
model is random and small, and a grammar with one text holds each answer; everything else is the server itself.
"""

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamarium.generation.answers import Answers
from llamarium.generation.text_engine import TextEngine
from llamarium.sampling.grammar.description import Grammar
from llamarium.server.app import Extension
from llamarium.server.lifecycle.service import Service
from llamarium.server.settings import Settings
from llamarium.tokenizer.tools.request import ToolRequest

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving import Running, small_llama

PRINTED = "llamarium-7421"
"""What the tool says; a call holds it in another spelling, so that only a result has this one."""

SAID = f"The tool printed {PRINTED}."

COMMAND = "echo llamarium-$((7000+421))"

CALLS: Mapping[str, Mapping[str, Any]] = {
    "exec_command": {"cmd": COMMAND},
    "shell": {"command": ["bash", "-lc", COMMAND]},
    "shell_command": {"command": COMMAND},
    "Bash": {"command": COMMAND, "description": "Print a word"},
    "bash": {"command": COMMAND, "description": "Print a word"},
    "run_shell_command": {"command": COMMAND, "is_background": False, "description": "Print a word"},
    "join": {"left": "llamarium", "right": "7421"},
    "final_answer": {"answer": PRINTED},
}
"""The call of each tool that a client may offer; the first one that it does is made."""

FORMS: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]] = (
    (CALLS["join"], {}),
    (
        {"next_thought": "Join them.", "next_tool_name": "join", "next_tool_args": CALLS["join"]},
        {"next_thought": "That is all.", "next_tool_name": "finish", "next_tool_args": {}},
    ),
    ({}, {"reasoning": "The tool said it.", "answer": PRINTED}),
    (
        {"thought": "Join them.", "code": 'print(join("llamarium", "7421"))'},
        {"thought": "That is all.", "code": f'final_answer("{PRINTED}")'},
    ),
)
"""Values, before and after the result is there, for schemas and prompts that name all their properties."""

EDIT = """\
app.py
```python
<<<<<<< SEARCH
print("nothing")
=======
raise SystemExit("llamarium-" + str(7000 + 421))
>>>>>>> REPLACE
```"""
TEXTS: Mapping[str, tuple[str, str]] = {
    "*SEARCH/REPLACE*": (EDIT, SAID),
    "<code>": (
        '<code>\njoined = join("llamarium", "7421")\nprint(joined)\n</code>',
        f'<code>\nfinal_answer("{PRINTED}")\n</code>',
    ),
}
"""Texts, before and after the result is there, for prompts that have a mark."""


def answer_to(prompt: str, tools: ToolRequest | None, form: str = "") -> str:
    """Return the answer to a prompt.

    Args:
        prompt: With the tools' definitions.
        tools: Those of the request, if it has any.
        form: The grammar of the answer as text, where it has one.
    """
    is_said = PRINTED in prompt
    names = [tool.name for tool in tools.offered] if tools else []
    offered = {name.rpartition("-")[2]: name for name in names}  # semantic-kernel's have a plugin's before them
    for name, arguments in CALLS.items():
        if name in offered and (name == "final_answer") == is_said:
            call = {"name": offered[name], "arguments": arguments}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    for value in (values[is_said] for values in FORMS):
        if value and form and all(f'"{name}"' in form + prompt for name in value):
            return json.dumps(value)
        if value and all(f"## {name} ##" in prompt for name in value):  # dspy's marks
            return "\n\n".join(f"[[ ## {name} ## ]]\n{part}" for name, part in {**value, "completed": ""}.items())
    for mark, texts in TEXTS.items():
        if mark in prompt:
            return texts[is_said]
    return SAID if is_said else "Hello."


class ScriptedEngine(TextEngine):
    """An engine whose answers are those of `answer_to`."""

    def begin(self, prompt_ids: Sequence[int], params: Any, **options: Any) -> Answers:
        """Answer with one text."""
        model: Any = self._model
        form = params.grammar.text if params.grammar else ""
        text = answer_to(model.tokenizer.decode(prompt_ids, skip_special_tokens=False), options.get("tools"), form)
        grammar = Grammar.lark(f"start: {json.dumps(text)}")
        options["grammar"] = model.grammars.compile(grammar)
        return super().begin(
            prompt_ids, params.derived(grammar=grammar, stop=(), max_tokens=200, min_tokens=0), **options
        )


class Recorder:
    """Keeps the bodies that an application is sent."""

    def __init__(self, app: ASGIApp, bodies: list[dict[str, Any]]) -> None:
        self._app, self._bodies = app, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        whole = b""

        async def noted() -> Message:
            nonlocal whole
            message = await receive()
            whole += message.get("body", b"")
            return message

        kept: dict[str, Any] = {"path": scope.get("path"), "query": scope.get("query_string", b"").decode()}
        kept["headers"] = {name.decode(): value.decode() for name, value in scope.get("headers", ())}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {name.decode(): value.decode() for name, value in message["headers"]}
                kept.update(status=message["status"], no_effect=headers.get("x-llamarium-no-effect", ""))
                if whole:
                    kept["body"] = json.loads(whole)
                    self._bodies.append(kept)
            await send(message)

        await self._app(scope, noted, sending)


@contextmanager
def scripted_server(tokenizer_path: Path) -> Generator[tuple[Running, list[dict[str, Any]]]]:
    """Run the server while the body runs; the list has every request that came, with its status and header."""
    llama = small_llama(tokenizer_path, max_position_embeddings=2**17)
    bodies: list[dict[str, Any]] = []
    settings = Settings(port=0, drain_timeout_s=0, tool_form="hermes")

    def record(app: FastAPI) -> None:
        app.add_middleware(Recorder, bodies=bodies)

    def load(_: object) -> tuple[Any, TextEngine]:
        return llama, ScriptedEngine(llama, kv_memory=2**29, max_num_seqs=8)

    running = Running(load, settings, [Extension(record)])
    service: Service = running.service
    try:
        running.wait(lambda: service.state != "loading" and running.server.started)
        yield running, bodies
    finally:
        running.stop()
