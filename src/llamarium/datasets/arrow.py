"""Conversion of Arrow rows: removal of the nulls that their schema adds."""

from collections.abc import Mapping
from typing import Any, cast

from llamarium.strict_json import NotJson, parse_json, without_nulls


def arrow_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table without the nulls that its schema adds.

    All structs of an Arrow column have the same keys, so the arguments of a tool call also have those of all other
    calls, as nulls. A null is kept if one of the row's tools has a parameter of that name.
    """
    parameters = _parameters(row.get("tools"))
    return {key: _without_added(value, parameters) for key, value in row.items()}


def _without_added(value: Any, parameters: set[str]) -> Any:
    if isinstance(value, dict):
        kept: dict[str, Any] = {}
        for key, item in cast("dict[str, Any]", value).items():
            if key == "arguments" and isinstance(item, dict):
                arguments = cast("dict[str, Any]", item)
                kept[key] = {
                    k: v if v is None else without_nulls(v)
                    for k, v in arguments.items()
                    if v is not None or k in parameters
                }
            elif item is not None:
                kept[key] = _without_added(item, parameters)
        return kept
    return [_without_added(item, parameters) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _parameters(tools: Any) -> set[str]:
    """Return the names of all parameters of a row's tools; tools of an unknown form are ignored."""
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except NotJson:
            return set()
    names: set[str] = set()
    for tool in cast("list[Any]", tools) if isinstance(tools, list) else ():
        function: Any = cast("dict[str, Any]", tool).get("function", tool) if isinstance(tool, dict) else None
        schema: Any = cast("dict[str, Any]", function).get("parameters") if isinstance(function, dict) else None
        properties: Any = cast("dict[str, Any]", schema).get("properties") if isinstance(schema, dict) else None
        if isinstance(properties, dict):
            described = cast("dict[str, Any]", properties)
            names.update(key for key, value in described.items() if value is not None)
    return names
