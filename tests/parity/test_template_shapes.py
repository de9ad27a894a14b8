"""What the sandbox writes of 60 templates in the shapes of published ones is what transformers writes."""

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from llamarium.checkpoints.gguf.file import read_gguf
from llamarium.tokenizer.backends.gguf import from_gguf_metadata
from llamarium.tokenizer.base import Tokenizer
from llamarium.tokenizer.chat.content import is_parts, joined
from llamarium.tokenizer.chat.template import TemplateFormat
from llamarium.tokenizer.tools.definition import read_tools
from template_shapes import SHAPES

pytestmark = pytest.mark.torch

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now>, in °C & 'F'",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"type": ["string", "null"]},
                },
                "required": ["city"],
            },
            "return": {"type": "object", "description": "what it is like"},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief. "}
ASK, TELL = {"role": "user", "content": " Hi <b>there</b>?\n"}, {"role": "assistant", "content": "Höllo 😀."}
CALL = {"id": "Ab1Cd2Ef3", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
CALLED = [
    {"role": "user", "content": "And in Köln?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "Ab1Cd2Ef3", "name": "get_weather", "content": '{"celsius": 9}'},
]
PARTS = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
DIALOGS: list[list[dict[str, Any]]] = [
    [ASK],
    [SYSTEM, ASK],
    [SYSTEM, ASK, TELL, ASK],
    [ASK, {"role": "assistant", "content": ""}, ASK],
    [ASK, TELL],
    [ASK, {**TELL, "reasoning_content": "hmm", "refusal": None, "name": "Bot"}, ASK],
    CALLED,
    [SYSTEM, *CALLED, TELL, ASK],
    [PARTS],
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return from_gguf_metadata(read_gguf(smollm2_path).metadata, smollm2_path.name)


def expected(form: TemplateFormat, template: str, dialog: list[dict[str, Any]], tools: Any, *, prompt: bool) -> Any:
    """What transformers writes, or None where the template refuses the dialog; contents in the form that it takes."""
    given = [{key: value for key, value in message.items() if value is not None} for message in copy.deepcopy(dialog)]
    forms = form._forms  # pyright: ignore[reportPrivateUsage]
    for message in given:
        if is_parts(message.get("content")) and message["role"] not in forms.part_roles:
            message["content"] = joined(message["content"])
        elif isinstance(message.get("content"), str) and message["role"] in forms.part_roles - forms.text_roles:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", []) if forms.takes_argument_text else []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    special: dict[str, Any] = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    try:
        texts, _ = render_jinja_template(
            [given], tools=tools, chat_template=template, add_generation_prompt=prompt, **special
        )
    except (TemplateError, TypeError, ValueError, AttributeError):
        return None
    return texts[0]


def written(form: TemplateFormat, dialogs: list[tuple[list[dict[str, Any]], Any, bool]]) -> list[str | None]:
    """What the sandbox writes, all of it in one process; None where the template refuses the dialog."""
    asked: list[Any] = []
    marks: list[str] = []
    for dialog, tools, prompt in dialogs:
        marked = form._marked(dialog, read_tools(tools))  # pyright: ignore[reportPrivateUsage]
        asked.append(marked.call(len(dialog), prompt).variants[0])
        marks.append(marked.mark)
    answers = form._renderer.attempt(asked, datetime.now())  # pyright: ignore[reportPrivateUsage]
    return [answer["text"].replace(mark, "") if "text" in answer else None
            for answer, mark in zip(answers, marks, strict=True)]  # fmt: skip


def cases(template: str) -> list[tuple[list[dict[str, Any]], Any, bool]]:
    """The dialogs that a template can write: one that has nothing for calls refuses them by name."""
    dialogs = [dialog for dialog in DIALOGS if "tool_calls" in template or not any("tool_calls" in m for m in dialog)]
    plain: list[tuple[list[dict[str, Any]], Any, bool]] = [
        (dialog, None, dialog[-1]["role"] != "assistant") for dialog in dialogs
    ]
    return plain + [(dialog, TOOLS, True) for dialog in dialogs if "tools" in template]


@pytest.mark.parametrize("name", SHAPES)
def test_the_sandbox_writes_what_transformers_writes(smollm2: Tokenizer, name: str) -> None:
    template, form = SHAPES[name], TemplateFormat(smollm2, SHAPES[name])
    every = cases(template)
    right = [expected(form, template, dialog, tools, prompt=prompt) for dialog, tools, prompt in every]
    assert written(form, every) == right
    assert any(text for text in right)


def test_there_are_enough_shapes() -> None:
    assert len(SHAPES) >= 50 and len(set(SHAPES.values())) == len(SHAPES)
