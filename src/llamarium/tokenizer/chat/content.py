"""Detect in which form a template expects the content of messages and the arguments of calls.

Some templates write `message.content` as text; others loop over its parts, `{"type": "text", "text": ...}`, and would
write nothing for a text. Some accept both, or differ by role. So the template renders small dialogs in both forms once;
it supports the forms in which the text of the message appears. The same is done for calls, whose arguments are an
object in most templates and JSON text in some (DeepSeek's).

vLLM and SGLang inspect the template's syntax tree for a loop over `content`, for all roles at once; llama.cpp renders,
as here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llamarium.errors import ChatFormatError, show_value
from llamarium.tokenizer.chat.rendering import Answer

_NEEDLE = "Qxz7needle"
_MENTIONS_PARTS = re.compile(r"\btext\b")  # a template that writes parts reads their `text`
_ASKED_ROLES = ("system", "user", "assistant", "tool")
_CALL_ID = "Ab1Cd2Ef3"  # nine letters and digits, as Mistral's templates require


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms that a template supports.

    Attributes:
        text_roles: Roles whose content may be text.
        part_roles: Roles whose content may be a list of parts.
        takes_argument_text: Whether the arguments of calls are JSON text instead of an object.
    """

    text_roles: frozenset[str] = frozenset(_ASKED_ROLES)
    part_roles: frozenset[str] = frozenset()
    takes_argument_text: bool = False

    def fitted(self, content: Any, role: str) -> Any:
        """Return a message's content in a form that the template supports for this role."""
        tested_role = role if role in self.text_roles | self.part_roles else "user"
        if isinstance(content, str):
            is_wrapped = tested_role in self.part_roles and tested_role not in self.text_roles
            return [{"type": "text", "text": content}] if is_wrapped else content
        return content if tested_role in self.part_roles else joined(content)


def may_differ(template: str) -> bool:
    """Return whether a template might use parts, so that its forms must be detected."""
    return _MENTIONS_PARTS.search(template) is not None


def is_parts(content: object) -> bool:
    """Return whether a content is a list of parts."""
    items = cast("list[object] | tuple[object, ...]", content) if isinstance(content, list | tuple) else ()
    return bool(items) and all(isinstance(item, Mapping) and "type" in item for item in items)


def joined(content: Any) -> Any:
    """Return the text of a content's parts; any other content as it is."""
    return "".join(part["text"] for part in content) if is_parts(content) else content


def check_parts(content: object, where: str) -> None:
    """Raise a ChatFormatError for parts that are not text, which the answer would ignore."""
    if not is_parts(content):
        return
    for k, part in enumerate(cast("Sequence[Mapping[str, Any]]", content)):
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise ChatFormatError(
                f"{where}[{k}] is {show_value(dict(part))}; this model reads text: "
                'expected {"type": "text", "text": ...}'
            )


def probes() -> list[dict[str, Any]]:
    """Return the test dialogs' variables: per role, content as text and as parts; then arguments as object and text."""
    dialogs = [_dialog(role, parts=parts) for role in _ASKED_ROLES for parts in (False, True)]
    dialogs += [_called({"q": _NEEDLE}), _called(f'{{"q": "{_NEEDLE}"}}')]
    return [{"messages": dialog, "tools": None, "add_generation_prompt": True} for dialog in dialogs]


def read_forms(answers: Sequence[Answer]) -> ContentForms:
    """Return the forms that the renderings of `probes` show; the defaults if the template refuses all of them."""
    arrived = [_NEEDLE in (text := answer.get("text", "")) and not _is_dumped(text) for answer in answers]
    if not arrived:  # the template was stopped; rendering the dialog will report it
        return ContentForms()
    as_text = frozenset(role for i, role in enumerate(_ASKED_ROLES) if arrived[2 * i])
    as_parts = frozenset(role for i, role in enumerate(_ASKED_ROLES) if arrived[2 * i + 1])
    return ContentForms(as_text, as_parts, takes_argument_text=arrived[-1] and not arrived[-2])


def _is_dumped(text: str) -> bool:
    """Return whether a value was written as Python or JSON source."""
    return any(mark in text for mark in ("'type'", '"type"', "'text'", "{'q'"))


def _dialog(role: str, *, parts: bool) -> list[dict[str, Any]]:
    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}

    user_message = message("user", "x")
    match role:
        case "system":
            return [message("system", _NEEDLE), user_message]
        case "user":
            return [message("user", _NEEDLE)]
        case "assistant":
            return [user_message, message("assistant", _NEEDLE), user_message]
        case _:
            result = {**message("tool", _NEEDLE), "tool_call_id": _CALL_ID, "name": "f"}
            return [user_message, _calling({"q": "x"}), result]


def _called(arguments: object) -> list[dict[str, Any]]:
    result = {"role": "tool", "content": "x", "tool_call_id": _CALL_ID, "name": "f"}
    return [{"role": "user", "content": "x"}, _calling(arguments), result]


def _calling(arguments: object) -> dict[str, Any]:
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
