"""Tools and tool calls: validated objects of OpenAI's API.

Parameters may be any JSON object here, because chat templates print them unchanged. If calls are constrained to the
schema, `sampling/grammar/calls.py` compiles it.
"""

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from llamarium.errors import TokenizerError, ToolError, show_value
from llamarium.strict_json import NotJson, parse_json
from llamarium.tokenizer.special import check_text

MAX_TOOLS = 128  # OpenAI's limit
MAX_CHARACTERS = 2**18  # of all definitions of a request, as JSON
MAX_DEPTH = 32  # of a schema, and of a call's arguments
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_OF_TYPE: Mapping[str, Any] = {"type": "function"}


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that a model may call.

    Attributes:
        name: Up to 64 letters, digits, `_` and `-`.
        description: What it does, for the model.
        parameters: JSON schema of its arguments, an object; by default there are none.
        strict: Whether arguments must match the schema, which a grammar then enforces.
        given: The original object, which may have keys that only chat templates use (`return`), or None.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}, "additionalProperties": False}
    )
    strict: bool = False
    given: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ToolError("name", f"is {show_value(self.name)}; expected 1 to 64 letters, digits, _ and -")
        _check_json(self.description, "description", str)
        if not isinstance(self.strict, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ToolError("strict", f"is {show_value(self.strict)}; expected true or false")
        _check_json(self.parameters, "parameters", Mapping)

    @classmethod
    def of_function(cls, function: Mapping[str, Any], beside: Mapping[str, Any] = _OF_TYPE) -> "ToolDefinition":
        """Return the definition for OpenAI's `function` object; `beside` has the other keys of the tool.

        A field that is None counts as missing. Unknown keys are kept for chat templates, which get the whole object.

        Raises:
            ToolError: If a field is invalid; it names the path within the function.
        """
        present = {key: value for key, value in function.items() if value is not None}
        for key in present.keys() - _FUNCTION_KEYS:
            _check_json(key, "a key", str)
            _check_json(present[key], key, object, 1)
        fields: dict[str, Any] = {"name": None} | {key: present[key] for key in _FUNCTION_KEYS if key in present}
        return cls(**fields, given={**beside, "function": present})

    def function(self) -> dict[str, Any]:
        """Return name, description and parameters as JSON values."""
        return {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}

    def to_openai(self) -> dict[str, Any]:
        """Return it as an object of OpenAI's API."""
        return {"type": "function", "function": self.function()}

    def to_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it: the original object, with its keys in order."""
        return self.to_openai() if self.given is None else dict(self.given)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by a model.

    Attributes:
        id: Id to which the result refers; "" in dialogs without ids.
        name: Name of the tool.
        arguments: A JSON object as text.
        is_complete: False if the answer was cut off or malformed within the arguments, which are then incomplete.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool = True

    def values(self) -> dict[str, Any]:
        """Return the parsed arguments; ToolError if they are not a JSON object."""
        try:
            arguments = parse_json(self.arguments or "{}")
        except NotJson as error:
            raise ToolError("arguments", f"are not valid JSON: {error}; expected a JSON object as text") from None
        _check_json(arguments, "arguments", Mapping)
        return arguments

    def to_openai(self) -> dict[str, Any]:
        """Return it as an object of OpenAI's API."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def to_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it: with parsed arguments, and without an empty id."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.values()}}
        return {"id": self.id, **call} if self.id else call


def new_call_id() -> str:
    """Return a random id: `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def check_number(number: int, where: str = "tools") -> None:
    """Raise a ToolError for more than `MAX_TOOLS` tools."""
    if number > MAX_TOOLS:
        raise ToolError(where, f"has {number:,} tools; expected at most {MAX_TOOLS}")


def read_tools(tools: object, where: str = "tools") -> tuple[ToolDefinition, ...]:
    """Return the tools of a request, given as `ToolDefinition`s or OpenAI's objects; None means no tools."""
    items = _list(() if tools is None else tools, where)
    check_number(len(items), where)
    definitions = tuple(_read_tool(tool, f"{where}[{i}]") for i, tool in enumerate(items))
    names = [tool.name for tool in definitions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ToolError(f"{where}[{i}].function.name", f"is {name!r}, which another tool has; names must be unique")
    size = sum(len(json.dumps(tool.to_template())) for tool in definitions)
    if size > MAX_CHARACTERS:
        raise ToolError(where, f"are {size:,} characters of JSON; expected at most {MAX_CHARACTERS:,}")
    return definitions


def _read_tool(tool: object, where: str) -> ToolDefinition:
    if isinstance(tool, ToolDefinition):
        return tool
    fields = _mapping(tool, where, "an object")
    if fields.get("type", "function") != "function":
        raise ToolError(f"{where}.type", f'is {show_value(fields.get("type"))}; expected "function"')
    beside = {key: value for key, value in fields.items() if value is not None and key != "function"}
    _check_json(beside, where, Mapping)
    path = f"{where}.function"
    function = _mapping(fields.get("function"), path, "an object")
    try:
        return ToolDefinition.of_function(function, beside)
    except ToolError as error:
        raise error.inside(path) from None


def read_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message, given as `ToolCall`s or OpenAI's objects; None means no calls.

    In an object, the arguments may be an object instead of its JSON text, and the id may be missing.
    """
    return tuple(_read_call(call, f"{where}[{i}]") for i, call in enumerate(_list(calls or (), where)))


def _read_call(call: object, where: str) -> ToolCall:
    if not isinstance(call, ToolCall):
        fields = _mapping(call, where, "an object")
        if fields.get("type", "function") != "function":
            raise ToolError(f"{where}.type", f'is {show_value(fields["type"])}; expected "function"')
        function = _mapping(fields.get("function"), f"{where}.function", "an object")
        arguments = function.get("arguments", "")
        if isinstance(arguments, Mapping):
            _check_json(arguments, f"{where}.function.arguments", Mapping)
            arguments = json.dumps(arguments, ensure_ascii=False)
        _check_json(arguments, f"{where}.function.arguments", str)
        call = ToolCall(fields.get("id") or "", function.get("name", ""), arguments)
    if not isinstance(call.id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ToolError(f"{where}.id", f"is {show_value(call.id)}; expected text")
    if not isinstance(call.name, str) or not _NAME.fullmatch(call.name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ToolError(f"{where}.function.name", f"is {show_value(call.name)}; expected a tool's name")
    try:
        call.values()
    except ToolError as error:
        raise error.inside(f"{where}.function") from None
    return call


def _list(value: object, where: str) -> Sequence[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise ToolError(where, f"is {show_value(value)}; expected a list")
    return cast("Sequence[object]", value)


def _check_json(value: object, where: str, kind: type, depth: int = 0) -> None:
    """Validate that a value has the type `kind`, can be represented as JSON, and is not nested too deeply."""
    if not isinstance(value, kind):
        expected = "text" if kind is str else "an object"
        raise ToolError(where, f"is {show_value(value)}; expected {expected}")
    if depth > MAX_DEPTH:
        raise ToolError(where, f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        try:
            check_text(value)
        except TokenizerError as error:
            raise ToolError(where, f"is not valid text: {error}") from None
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            _check_json(key, f"{where}, a key of it,", str)
            _check_json(item, f"{where}.{key}", object, depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(cast("Sequence[object]", value)):
            _check_json(item, f"{where}[{i}]", object, depth + 1)
    elif value is not None and not isinstance(value, bool) and not _is_number(value):
        raise ToolError(where, f"is {show_value(value)}; expected a JSON value")


def _is_number(value: object) -> bool:
    """Return whether a value is a finite number that a double can hold."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value.bit_length() <= 1024


def _mapping(value: object, path: str, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ToolError(path, f"is {show_value(value)}; expected {expected}")
    return cast("Mapping[str, Any]", value)
