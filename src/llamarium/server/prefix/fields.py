"""The request fields that make up a prompt, and their digests. No text is stored.

Digests are keyed with a secret of this process. The `loose` digest ignores what clients often change inadvertently:
white space, a reasoning section, and the formatting of JSON.
"""

import hashlib
import json
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

from llamarium.tokenizer.tools.definition import ToolDefinition

MAX_FIELDS = 4096
"""Maximum number of fields of a prompt that are compared."""

_SECRET = secrets.token_bytes(32)
_REASONING_END = "</think>"
_LAST_INDEX = 2**16 - 1
PACKED = struct.Struct("<QQBBHH")
"""A packed field; the exact digest comes first."""


class FieldKind(IntEnum):
    """The kind of a field, in order of comparison."""

    MODEL = 0
    CACHE_SALT = 1
    INTERVENTIONS = 2
    TEMPLATE_VARIABLES = 3
    TOOL_NAME = 4
    TOOL_DESCRIPTION = 5
    TOOL_PARAMETERS = 6
    TOOL_OTHER = 7
    ROLE = 8
    MESSAGE_OTHER = 9
    REASONING = 10
    CONTENT = 11
    CALL_ID = 12
    CALL_NAME = 13
    CALL_ARGUMENTS = 14
    TOOL_CALL_ID = 15
    PROMPT = 16


_PATHS: Mapping[FieldKind, str] = {
    FieldKind.MODEL: "model",
    FieldKind.CACHE_SALT: "cache_salt",
    FieldKind.INTERVENTIONS: "interventions",
    FieldKind.TEMPLATE_VARIABLES: "chat_template_kwargs",
    FieldKind.TOOL_NAME: "tools[{item}].function.name",
    FieldKind.TOOL_DESCRIPTION: "tools[{item}].function.description",
    FieldKind.TOOL_PARAMETERS: "tools[{item}].function.parameters",
    FieldKind.TOOL_OTHER: "tools[{item}]",
    FieldKind.ROLE: "messages[{item}].role",
    FieldKind.MESSAGE_OTHER: "messages[{item}]",
    FieldKind.REASONING: "messages[{item}].reasoning_content",
    FieldKind.CONTENT: "messages[{item}].content",
    FieldKind.CALL_ID: "messages[{item}].tool_calls[{part}].id",
    FieldKind.CALL_NAME: "messages[{item}].tool_calls[{part}].function.name",
    FieldKind.CALL_ARGUMENTS: "messages[{item}].tool_calls[{part}].function.arguments",
    FieldKind.TOOL_CALL_ID: "messages[{item}].tool_call_id",
    FieldKind.PROMPT: "prompt",
}
_JSON = (FieldKind.TEMPLATE_VARIABLES, FieldKind.TOOL_PARAMETERS, FieldKind.CALL_ARGUMENTS)
_TOOL = range(FieldKind.TOOL_NAME, FieldKind.TOOL_OTHER + 1)
_MESSAGE = range(FieldKind.ROLE, FieldKind.TOOL_CALL_ID + 1)


class Field(NamedTuple):
    """A field with digests instead of its text.

    Attributes:
        exact: Digest of the value.
        loose: Digest that ignores white space, a reasoning section and the formatting of JSON.
        has_reasoning: Whether the text has a reasoning section.
        item: Index of its tool or message.
        part: Index of its tool call or content part in the message.
    """

    exact: int
    loose: int
    kind: FieldKind
    has_reasoning: bool
    item: int
    part: int

    @property
    def place(self) -> tuple[int, bool, int, int, int]:
        """Sort key in order of comparison."""
        return self.group[0], True, self.item, self.part, self.kind

    @property
    def group(self) -> tuple[int, int]:
        """Key of the tool or message that the field belongs to; for other fields, of the kind."""
        first = _TOOL.start if self.kind in _TOOL else _MESSAGE.start if self.kind in _MESSAGE else int(self.kind)
        return first, self.item

    @property
    def is_message(self) -> bool:
        """Whether the field is part of a message."""
        return self.kind in _MESSAGE

    @property
    def is_tool(self) -> bool:
        """Whether the field is part of a tool."""
        return self.kind in _TOOL

    @property
    def path(self) -> str:
        """Path of the field in chat completions."""
        suffix = f"[{self.part}]" if self.kind is FieldKind.CONTENT and self.part else ""
        return _PATHS[self.kind].format(item=self.item, part=self.part) + suffix


Value = tuple[FieldKind, int, int, str]
"""A field's kind, index of the tool or message, index of the tool call or content part, and text."""


class PromptParts(NamedTuple):
    """The request fields that make up a prompt.

    Attributes:
        model: The adapter's name, or "".
        salt: The request's `cache_salt`, or "".
        interventions: Hash of the interventions, or "".
        variables: Variables for the chat template.
        tools: Tool definitions.
        messages: The dialog in OpenAI's format; empty if the prompt is not a dialog.
        answer_start: Beginning of the answer, which the prompt ends with.
    """

    model: str = ""
    salt: str = ""
    interventions: str = ""
    variables: Mapping[str, Any] = {}
    tools: Sequence[ToolDefinition] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    answer_start: str | None = None

    def values(self) -> Iterator[Value]:
        """Yield the fields with their texts, in order of comparison.

        The text of a prompt that is not a dialog is yielded as "", as its tokens are compared instead.
        """
        yield FieldKind.MODEL, 0, 0, self.model
        yield FieldKind.CACHE_SALT, 0, 0, self.salt
        yield FieldKind.INTERVENTIONS, 0, 0, self.interventions
        if self.variables:
            yield FieldKind.TEMPLATE_VARIABLES, 0, 0, _json(self.variables)
        for index, tool in enumerate(self.tools):
            yield FieldKind.TOOL_NAME, index, 0, tool.name
            yield FieldKind.TOOL_DESCRIPTION, index, 0, tool.description
            yield FieldKind.TOOL_PARAMETERS, index, 0, _json(tool.parameters)
        for index, message in enumerate(self.messages):
            yield from message_values(min(index, _LAST_INDEX), message)
        if self.answer_start is not None:
            yield FieldKind.ROLE, len(self.messages), 0, "assistant"
            yield FieldKind.CONTENT, len(self.messages), 0, self.answer_start
        if not self.messages:
            yield FieldKind.PROMPT, 0, 0, ""


def message_values(index: int, message: Mapping[str, Any]) -> Iterator[Value]:
    """Yield the fields of a message in OpenAI's format; `index` is its index in the dialog."""
    yield FieldKind.ROLE, index, 0, str(message["role"])
    if (name := message.get("name")) is not None:
        yield FieldKind.MESSAGE_OTHER, index, 0, str(name)
    if reasoning := message.get("reasoning_content"):
        yield FieldKind.REASONING, index, 0, str(reasoning)
    content = message.get("content")
    for sub, part in enumerate(content if isinstance(content, list) else [content]):
        text = part.get("text") if isinstance(part, Mapping) else part
        if text is not None or isinstance(part, Mapping):  # parts other than text are compared as JSON
            yield FieldKind.CONTENT, index, min(sub, _LAST_INDEX), str(text) if text is not None else _json(part)
    for sub, call in enumerate(message.get("tool_calls") or ()):
        place = index, min(sub, _LAST_INDEX)
        yield FieldKind.CALL_ID, *place, str(call.get("id", ""))
        yield FieldKind.CALL_NAME, *place, str(call["function"]["name"])
        yield FieldKind.CALL_ARGUMENTS, *place, str(call["function"]["arguments"])
    if (call_id := message.get("tool_call_id")) is not None:
        yield FieldKind.TOOL_CALL_ID, index, 0, str(call_id)


def digest_fields(values: Iterable[Value], owner: str = "") -> list[Field]:
    """Return fields with digests instead of texts; equal texts of different owners have different digests."""
    salt = hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def digest(text: str) -> int:
        data = text.encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=_SECRET, salt=salt).digest(), "little")

    fields = list[Field]()
    for kind, index, sub, text in values:
        exact, has_reasoning = digest(text), False
        loose = exact
        if kind in _JSON:
            loose = digest(_normal_json(text))
        elif kind in (FieldKind.CONTENT, FieldKind.REASONING):
            before, mark, after = text.rpartition(_REASONING_END)
            has_reasoning = bool(mark)
            loose = digest("".join((after if mark else before + after).split()))
        fields.append(Field(exact, loose, kind, has_reasoning, min(index, _LAST_INDEX), sub))
    return fields


def pack(fields: Sequence[Field]) -> bytes:
    """Pack fields into 22 bytes each."""
    return b"".join(PACKED.pack(*field) for field in fields)


def unpack(packed: bytes) -> list[Field]:
    """Return the fields that `pack` has packed."""
    return [
        Field(exact, loose, FieldKind(kind), bool(has_reasoning), index, sub)
        for exact, loose, kind, has_reasoning, index, sub in PACKED.iter_unpack(packed)
    ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)


def _normal_json(text: str) -> str:
    """Return JSON with sorted keys and without white space; other text is unchanged."""
    with suppress(ValueError, RecursionError):
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    return text
