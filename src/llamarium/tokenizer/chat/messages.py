"""Prepare a dialog's messages for chat templates: any keys, validated JSON values, contents in a supported form."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from llamarium.errors import ChatFormatError, show_value
from llamarium.tokenizer.chat.content import ContentForms, check_parts, is_parts
from llamarium.tokenizer.chat.turns import ROLES, call_list, check_list, order_of_results
from llamarium.tokenizer.chat.values import plain_value
from llamarium.tokenizer.tools.definition import ToolCall

_TEMPLATE_ROLES = (*ROLES, "ipython", "developer", "function")
_ROLE = re.compile(r"[a-z][a-z_]{0,31}")
REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateMessages:
    """Validates and copies messages for a template, which may have additional roles that it compares."""

    def __init__(self, template: str) -> None:
        self._template = template
        # transformers omits keys that are None, but some templates test for None
        self._keeps_none = re.search(r"content['\"]?\]?\s+is\s+(not\s+)?none", template) is not None

    def read(self, messages: object) -> list[dict[str, Any]]:
        """Return a validated copy of a dialog, with results in the order of the calls; ChatFormatError or ToolError."""
        checked = [self._check(message, i) for i, message in enumerate(check_list(messages))]
        order = order_of_results(checked, [call_list(message, i) for i, message in enumerate(checked)])
        return [self._copy(checked[i], i) for i in order]

    def _check(self, message: object, i: int) -> Mapping[str, Any]:
        if not isinstance(message, Mapping):
            raise ChatFormatError(f"messages[{i}] is {show_value(message)}; expected an object with role and content")
        fields = cast("Mapping[str, Any]", message)
        if not self._is_role(fields.get("role")):
            raise ChatFormatError(
                f"messages[{i}].role is {show_value(fields.get('role'))}; expected {', '.join(_TEMPLATE_ROLES)}"
            )
        if fields.get("content") is None and not fields.get("tool_calls"):
            raise ChatFormatError(f"messages[{i}] has no content; expected text")
        check_parts(fields.get("content"), f"messages[{i}].content")
        return fields

    def _is_role(self, role: object) -> bool:
        """Return whether a role is a standard one, or a word that the template compares."""
        if role in _TEMPLATE_ROLES:
            return True
        is_word = isinstance(role, str) and _ROLE.fullmatch(role) is not None
        return is_word and any(f"{quote}{role}{quote}" in self._template for quote in "'\"")

    def _copy(self, message: Mapping[str, Any], i: int) -> dict[str, Any]:
        calls = _calls_for_template(message, i)
        copied: dict[str, Any] = {}
        for key, value in message.items():
            if key == "tool_calls":
                copied |= {"tool_calls": calls} if calls else {}
            elif value is not None or (key == "content" and self._keeps_none):
                copied[key] = value
        return plain_value(_with_reasoning(copied), f"messages[{i}]")


def check_documents(documents: object) -> list[dict[str, Any]]:
    """Return a validated copy of `documents`: a list of objects, usually with `title` and `text`.

    Raises:
        ChatFormatError or TokenizerError: If it is something else.
    """
    checked = plain_value(documents, "documents")
    if not isinstance(checked, list) or not all(isinstance(item, dict) for item in cast("list[object]", checked)):
        raise ChatFormatError(
            f"documents is {show_value(documents)}; expected a list of objects, such as those with title and text"
        )
    return cast("list[dict[str, Any]]", checked)


def fit_forms(messages: Sequence[Mapping[str, Any]], forms: ContentForms) -> list[dict[str, Any]]:
    """Return messages with contents and call arguments in the forms that a template supports."""
    fitted: list[dict[str, Any]] = []
    for message in messages:
        changed = dict(message)
        if "content" in changed:
            changed["content"] = forms.fitted(changed["content"], changed["role"])
        if forms.takes_argument_text and "tool_calls" in changed:
            changed["tool_calls"] = [_with_argument_text(call) for call in changed["tool_calls"]]
        fitted.append(changed)
    return fitted


def has_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any content of a dialog is a list of parts."""
    return any(is_parts(message.get("content")) for message in messages)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Add an answer's reasoning under the names that templates read, as transformers does."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _calls_for_template(message: Mapping[str, Any], i: int) -> list[dict[str, Any]]:
    """Return a message's calls with all their original keys, and with parsed arguments."""
    calls = call_list(message, i)
    return [_as_given(original, call) for original, call in zip(message.get("tool_calls") or (), calls, strict=True)]


def _as_given(original: object, call: ToolCall) -> dict[str, Any]:
    if not isinstance(original, Mapping):
        return call.to_template()
    copied = dict(cast("Mapping[str, Any]", original))
    return copied | {"function": {**copied["function"], "arguments": call.values()}}


def _with_argument_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
