"""Python functions as tools, described by their signatures and docstrings."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from llamarium.errors import ToolError, show_value
from llamarium.tokenizer.tools.definition import ToolDefinition

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_ARGUMENTS = re.compile(r"\n\s*Args:\s*\n")
_ARGUMENT = re.compile(r"^ +(\w+)(?: \([^)]*\))?: (.+)$", re.MULTILINE)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def described(tools: object) -> object:
    """Return the tools with each Python function replaced by its definition."""
    if not isinstance(tools, list | tuple):
        return tools
    definitions: list[object] = []
    for i, tool in enumerate(cast("Sequence[object]", tools)):
        try:
            definitions.append(definition_of(tool) if inspect.isroutine(tool) else tool)
        except ToolError as error:
            raise error.inside(f"tools[{i}]") from None
    return definitions


def definition_of(function: Callable[..., Any]) -> ToolDefinition:
    """Return the tool definition of a Python function.

    The description is the docstring up to a Google-style `Args:` section, which describes the arguments. Arguments
    without a default are required.

    Args:
        function: A function whose arguments have JSON types: str, int, float, bool, None, lists, dicts with str keys,
            `Literal`, and unions of these. An argument without a type accepts any value.

    Raises:
        ToolError: If an argument cannot be passed by keyword, or has another type.
    """
    hints, signature = _read(function)
    schemas, required = dict[str, Any](), list[str]()
    text, arguments = _divided(inspect.getdoc(function) or "")
    descriptions = dict(_ARGUMENT.findall(arguments))
    for name, parameter in signature.parameters.items():
        if parameter.kind not in _NAMED:
            raise ToolError(name, "cannot be passed by keyword, as models do; expected an ordinary parameter")
        schema = _schema(hints.get(name, Any), name)
        schemas[name] = schema | ({"description": descriptions[name]} if name in descriptions else {})
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": schemas, "required": required, "additionalProperties": False}
    return ToolDefinition(function.__name__, text.strip(), parameters)


def _read(function: Callable[..., Any]) -> tuple[dict[str, Any], inspect.Signature]:
    try:
        return get_type_hints(function), inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ToolError("function", f"is {show_value(function)}, which has no readable signature: {error}") from None


def _divided(doc: str) -> tuple[str, str]:
    match = _ARGUMENTS.search(doc)
    return (doc[: match.start()], doc[match.end() :].partition("\n\n")[0]) if match else (doc, "")


def _schema(hint: Any, name: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(member, name) for member in inner]}
    if origin in (list, Sequence):
        return {"type": "array", **({"items": _schema(inner[0], name)} if inner else {})}
    if origin in (dict, Mapping) and inner[:1] in ((), (str,)):
        return {"type": "object", **({"additionalProperties": _schema(inner[1], name)} if inner else {})}
    raise ToolError(
        name, f"is {show_value(hint)}; expected str, int, float, bool, None, list, dict, Literal, or a union of them"
    )
