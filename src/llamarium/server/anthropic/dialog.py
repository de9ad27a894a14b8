"""Converts a request for a message to a prompt: dialog, tools, and the beginning of the answer."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llamarium.server.anthropic import requests
from llamarium.server.dialogs import Dialog, check_answer_start, encode_dialog, misplaced, missing
from llamarium.server.lifecycle.service import Service
from llamarium.server.other_tools import functions_of
from llamarium.tokenizer.tools.request import ToolRequest

_BLOCK = r"(messages\[\d+\]\.content\[\d+\])"
_NAMES = {
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    rf"{_BLOCK}\.function\.arguments": r"\1.input",
    rf"(tools\[\d+\]|tool_choice|{_BLOCK})\.function": r"\1",
    rf"{_BLOCK}\.tool_call_id": r"\1.tool_use_id",
    r"parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    r"stop(?!_)": "stop_sequences",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt.

    Attributes:
        dialog: The dialog.
        tools: The tools.
        answer_start: Beginning of the answer, which the model continues, or None.
        effort: Reasoning effort for the chat template, or None.
    """

    dialog: Dialog
    tools: ToolRequest
    answer_start: str | None
    effort: str | None

    def ids(self, service: Service) -> list[int]:
        """Return the prompt's token ids."""
        return encode_dialog(
            service, self.dialog.messages, self.tools.offered, answer_start=self.answer_start, effort=self.effort
        )


def read_prompt(body: requests.CountRequest) -> Prompt:
    """Return a request's prompt.

    Raises:
        ApiError: If the dialog or the tools are invalid.
    """
    dialog = Dialog(_NAMES)
    if body.system is not None:
        dialog.add("system", {"role": "system", "content": _text(body.system)})
    *earlier, last = body.messages
    for i, message in enumerate(earlier if last.role == "assistant" else body.messages):
        _add(dialog, f"messages[{i}]", message)
    functions, path_of = functions_of(body.tools)
    tools = dialog.tools(functions, *_choice(body.tool_choice), path_of)
    config = body.output_config or requests.OutputConfig()
    answer_start = None
    if last.role == "assistant":
        where = f"messages[{len(earlier)}]"
        answer_start = _answer_start(last, where)
        check_answer_start(where, config.format and "output_config.format", tools, is_alone=not dialog.messages)
    return Prompt(dialog, tools, answer_start, config.effort)


def _add(dialog: Dialog, where: str, message: requests.MessageParam) -> None:
    """Append a message; tool results become separate messages before its text."""
    content = message.content
    blocks: Sequence[requests.Block] = [] if isinstance(content, str) else content
    has_text = isinstance(content, str) or any(isinstance(block, requests.TextBlock) for block in blocks)
    has_text = has_text or all(isinstance(block, requests.ThinkingBlock) for block in blocks)
    for k, block in enumerate(blocks):
        if isinstance(block, requests.ToolResultBlock):
            _check_role(message, "user", f"{where}.content[{k}]")
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
            dialog.add(f"{where}.content[{k}]", result)
        elif not isinstance(block, requests.TextBlock):
            _check_role(message, "assistant", f"{where}.content[{k}]")
    if has_text or not any(isinstance(block, requests.ToolResultBlock) for block in blocks):
        dialog.add(where, {"role": message.role, "content": _text(content) if has_text else None})
    for k, block in enumerate(blocks):
        if isinstance(block, requests.ToolUseBlock):
            dialog.add_call(f"{where}.content[{k}]", block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def _check_role(message: requests.MessageParam, role: str, where: str) -> None:
    if message.role != role:
        raise misplaced(f"{where}.type", f"is only allowed with role {role}; this message has role {message.role}")


def _text(content: str | Sequence[requests.Block]) -> str:
    """Return the text, without tool calls and their results."""
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, requests.TextBlock))


def _result(block: requests.ToolResultBlock) -> str:
    """Return a tool result as text; errors get a prefix, as OpenAI's format cannot mark them."""
    text = _text(block.content or "")
    return f"Error: {text}" if block.is_error else text


def _answer_start(message: requests.MessageParam, where: str) -> str:
    """Return the text that the answer continues; ApiError if the message contains tool calls."""
    if not isinstance(message.content, str):
        for k, block in enumerate(message.content):
            if not isinstance(block, requests.TextBlock | requests.ThinkingBlock):
                raise misplaced(f"{where}.content[{k}]", "is the last message; expected the call's result after it")
    return _text(message.content)


def _choice(choice: requests.AnthropicToolChoice | None) -> tuple[object, bool | None]:
    """Return `tool_choice` and `parallel_tool_calls` in OpenAI's format."""
    if choice is None:
        return None, None
    if choice.type == "tool" and choice.name is None:
        raise missing("tool_choice.name")
    if choice.type != "tool" and choice.name is not None:
        raise misplaced("tool_choice.name", f"is set, but tool_choice.type is {choice.type}")
    if choice.type == "none" and choice.disable_parallel_tool_use is not None:
        param = "tool_choice.disable_parallel_tool_use"
        raise misplaced(param, "has no effect; tool_choice.type is none")
    named_function = {"type": "function", "function": {"name": choice.name}}
    parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    return (named_function if choice.type == "tool" else _CHOICES[choice.type]), parallel
