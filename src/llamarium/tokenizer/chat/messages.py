"""A dialog's messages as chat templates are given them: any keys, checked JSON values, contents in a form that fits."""

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
    """Reads messages for one template; it has other roles than usual if it compares them."""

    def __init__(self, template: str) -> None:
        self._template = template
        # transformers leaves out keys without a value; some templates look at None itself
        self._keeps_none = re.search(r"content['\"]?\]?\s+is\s+(not\s+)?none", template) is not None

    def read(self, messages: object) -> list[dict[str, Any]]:
        """Check and copy a dialog, results of calls in the order of the calls; ChatFormatError or ToolError."""
        given = [self._check(message, i) for i, message in enumerate(check_list(messages))]
        order = order_of_results(given, [call_list(message, i) for i, message in enumerate(given)])
        return [self._copy(given[i], i) for i in order]

    def _check(self, message: object, i: int) -> Mapping[str, Any]:
        if not isinstance(message, Mapping):
            raise ChatFormatError(f"messages[{i}] is {show_value(message)}; expected an object with role and content")
        given = cast("Mapping[str, Any]", message)
        if not self._is_role(given.get("role")):
            raise ChatFormatError(
                f"messages[{i}].role is {show_value(given.get('role'))}; expected {', '.join(_TEMPLATE_ROLES)}"
            )
        if given.get("content") is None and not given.get("tool_calls"):
            raise ChatFormatError(f"messages[{i}] has no content; expected text")
        check_parts(given.get("content"), f"messages[{i}].content")
        return given

    def _is_role(self, role: object) -> bool:
        """Tell whether a role is a usual one, or a word that the template compares."""
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
    """Check and copy the documents that an answer may draw on: objects with any fields, `title` and `text` by custom.

    ChatFormatError or TokenizerError for anything but a list of such objects.
    """
    checked = plain_value(documents, "documents")
    if not isinstance(checked, list) or not all(isinstance(item, dict) for item in cast("list[object]", checked)):
        raise ChatFormatError(
            f"documents is {show_value(documents)}; expected a list of objects, such as those with title and text"
        )
    return cast("list[dict[str, Any]]", checked)


def fit_forms(messages: Sequence[Mapping[str, Any]], forms: ContentForms) -> list[dict[str, Any]]:
    """Return messages whose contents, and arguments of calls, are in the forms that a template takes."""
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
    """Tell whether a content of a dialog is a list of parts."""
    return any(is_parts(message.get("content")) for message in messages)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give an answer's reasoning under the names that templates read, as transformers does."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _calls_for_template(message: Mapping[str, Any], i: int) -> list[dict[str, Any]]:
    """Return a message's calls as they were given, other keys too, their arguments as values."""
    calls = call_list(message, i)
    return [_as_given(given, call) for given, call in zip(message.get("tool_calls") or (), calls, strict=True)]


def _as_given(given: object, call: ToolCall) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        return call.to_template()
    copied = dict(cast("Mapping[str, Any]", given))
    return copied | {"function": {**copied["function"], "arguments": call.values()}}


def _with_argument_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
