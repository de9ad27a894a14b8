"""What a tool is and what a call of one is: the objects of OpenAI's API, checked.

Here parameters are any JSON object: chat templates describe them as they are. Where calls are held to a schema,
`sampling/grammar/calls.py` reads it, once.
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
        name: Letters, digits, `_` and `-`; 64 at most.
        description: What it does, for the model.
        parameters: The JSON schema of its arguments, an object; by default it has none.
        strict: Arguments must follow the schema, so calls have to be held by a grammar.
        given: The object that it was read from, with keys that only chat templates read (`return`), or None.
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
        """Read OpenAI's object of a function, and what stands `beside` it; None is a field that is not there.

        Other keys are for chat templates, which get all of it. ToolError by the path within the function.
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
        """Return the object that OpenAI's API has for it."""
        return {"type": "function", "function": self.function()}

    def to_template(self) -> dict[str, Any]:
        """Return the object that chat templates expect: as it was given, all keys in their order."""
        return self.to_openai() if self.given is None else dict(self.given)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has made.

    Attributes:
        id: Names the call, so that a result can say what it answers; "" in dialogs that have none.
        arguments: The text of a JSON object.
        is_complete: False if the answer broke off, or went wrong, within the arguments, which are then a part of one.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool = True

    def values(self) -> dict[str, Any]:
        """Return the arguments as values; `ToolError` if they are no JSON object."""
        try:
            found = parse_json(self.arguments or "{}")
        except NotJson as error:
            raise ToolError("arguments", f"are no JSON: {error}; expected a JSON object as text") from None
        _check_json(found, "arguments", Mapping)
        return found

    def to_openai(self) -> dict[str, Any]:
        """Return the object that OpenAI's API has for it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def to_template(self) -> dict[str, Any]:
        """Return the object that chat templates expect: the arguments as values, and no id where there is none."""
        call = {"type": "function", "function": {"name": self.name, "arguments": self.values()}}
        return {"id": self.id, **call} if self.id else call


def new_call_id() -> str:
    """Return a random id, `call_` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def check_number(number: int, where: str = "tools") -> None:
    """Refuse more tools than `MAX_TOOLS`, before they are read."""
    if number > MAX_TOOLS:
        raise ToolError(where, f"has {number:,} tools; at most {MAX_TOOLS} are taken")


def read_tools(tools: object, where: str = "tools") -> tuple[ToolDefinition, ...]:
    """Read the tools of a request: `ToolDefinition`s, or OpenAI's objects; None is none."""
    given = _list(() if tools is None else tools, where)
    check_number(len(given), where)
    found = tuple(_read_tool(tool, f"{where}[{i}]") for i, tool in enumerate(given))
    names = [tool.name for tool in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ToolError(f"{where}[{i}].function.name", f"is {name!r}, as that of another tool; names must differ")
    size = sum(len(json.dumps(tool.to_template())) for tool in found)
    if size > MAX_CHARACTERS:
        raise ToolError(where, f"are {size:,} characters of JSON; at most {MAX_CHARACTERS:,} are taken")
    return found


def _read_tool(tool: object, where: str) -> ToolDefinition:
    if isinstance(tool, ToolDefinition):
        return tool
    given = _mapping(tool, where, "an object")
    if given.get("type", "function") != "function":
        raise ToolError(f"{where}.type", f'is {show_value(given.get("type"))}; expected "function"')
    beside = {key: value for key, value in given.items() if value is not None and key != "function"}
    _check_json(beside, where, Mapping)
    inside = f"{where}.function"
    function = _mapping(given.get("function"), inside, "an object")
    try:
        return ToolDefinition.of_function(function, beside)
    except ToolError as error:
        raise error.inside(inside) from None


def read_calls(calls: object, where: str) -> tuple[ToolCall, ...]:
    """Read the calls of an assistant's message: `ToolCall`s, or OpenAI's objects; None is none.

    In an object the arguments may also be an object rather than its text, and the id may be missing.
    """
    return tuple(_read_call(call, f"{where}[{i}]") for i, call in enumerate(_list(calls or (), where)))


def _read_call(call: object, where: str) -> ToolCall:
    if not isinstance(call, ToolCall):
        given = _mapping(call, where, "an object")
        if given.get("type", "function") != "function":
            raise ToolError(f"{where}.type", f'is {show_value(given["type"])}; expected "function"')
        function = _mapping(given.get("function"), f"{where}.function", "an object")
        arguments = function.get("arguments", "")
        if isinstance(arguments, Mapping):
            _check_json(arguments, f"{where}.function.arguments", Mapping)
            arguments = json.dumps(arguments, ensure_ascii=False)
        _check_json(arguments, f"{where}.function.arguments", str)
        call = ToolCall(given.get("id") or "", function.get("name", ""), arguments)
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
    """Check that a value of a kind is one that JSON has, nested within limits."""
    if not isinstance(value, kind):
        expected = "text" if kind is str else "an object"
        raise ToolError(where, f"is {show_value(value)}; expected {expected}")
    if depth > MAX_DEPTH:
        raise ToolError(where, f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        try:
            check_text(value)
        except TokenizerError as error:
            raise ToolError(where, f"is no text: {error}") from None
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
    """Tell whether JSON has a number; no integer is larger than floating-point numbers go."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and value.bit_length() <= 1024


def _mapping(value: object, path: str, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ToolError(path, f"is {show_value(value)}; expected {expected}")
    return cast("Mapping[str, Any]", value)
