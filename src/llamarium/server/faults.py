"""Translates pydantic's errors about a body to a single error with the client's field path."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from llamarium.errors import counted, escape, show_value
from llamarium.server.errors import ApiError

REFUSED = "refused_field"
"""Type of the pydantic error for a known field that is not supported; its context has `field` and `reason`."""

UNKNOWN = "unknown_field"
"""Type of the pydantic error for an unknown field; its context has `field` and `advice`."""

_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")
"""Types of pydantic errors whose messages contain names of Python classes."""

Path = tuple[str | int, ...]


def refusal_of(faults: Sequence[dict[str, Any]], body: Any) -> ApiError:
    """Return a single error for pydantic's faults.

    In a union, each alternative reports faults. The deepest faults belong to the alternative that the client meant.

    Args:
        faults: Pydantic's error dictionaries; `loc` starts with "body" or "query".
        body: The body as JSON, or the query's parameters.
    """
    if not isinstance(body, dict):
        return ApiError(400, "expected a JSON object as the body", code="invalid_json")
    paths = [path_in(fault, body) for fault in faults]
    deepest = max(paths, key=len)
    intended = _meant([fault for fault, path in zip(faults, paths, strict=True) if path == deepest])
    first = next((fault for fault in intended if fault["type"] in (REFUSED, UNKNOWN)), intended[0])
    context = first.get("ctx", {})
    if first["type"] == REFUSED:
        param = spelled((*deepest, context["field"]))
        return ApiError(
            400, f"{param} is not supported: {context['reason']}", code="unsupported_parameter", param=param
        )
    if first["type"] == UNKNOWN:
        return unknown((*deepest, context["field"]), context["advice"])
    if first["type"] == "extra_forbidden":
        return unknown(deepest)
    param = spelled(deepest)
    if first["type"] == "union_tag_invalid":
        param = spelled((*deepest, "type"))
        tag, expected = context["tag"][1:-1], context["expected_tags"].replace("'<", "").replace(">'", "")
        message = f"{param} is {show_value(tag)}; expected {expected}"
        return ApiError(400, message, code="invalid_parameter", param=param)
    if first["type"] in ("missing", "union_tag_not_found"):
        param = spelled(deepest if first["type"] == "missing" else (*deepest, "type"))
        return ApiError(400, f"{param} is missing", code="missing_parameter", param=param)
    if first["type"] in ("too_long", "too_short"):
        bound = f"at most {context['max_length']}" if "max_length" in context else f"at least {context['min_length']}"
        message = f"{param} has {counted(len(first['input']), 'item')}; expected {bound}"
        return ApiError(400, message, code="invalid_parameter", param=param)
    messages = ("expected an object" if fault["type"] in _NO_OBJECT else fault["msg"] for fault in intended)
    reasons = " or: ".join(dict.fromkeys(messages))
    return ApiError(400, f"{param}: {reasons}", code="invalid_parameter", param=param)


def unknown(path: Path, advice: str = "") -> ApiError:
    """Return the error for an unknown field; `advice` is appended to the message."""
    param = spelled(path)
    return ApiError(
        400, f"{escape(param)} is not a field of this request{advice}", code="unknown_parameter", param=param
    )


def _meant(faults: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Drop the faults of union alternatives that the client did not mean.

    A wrong length means a list, and a wrong or missing `type` of an object means an object.
    """
    if sized := [fault for fault in faults if fault["type"] in ("too_long", "too_short")]:
        return sized
    tagged = [fault for fault in faults if fault["type"].startswith("union_tag_")]
    if any(isinstance(fault["input"], dict) for fault in tagged):
        return tagged
    return [fault for fault in faults if not fault["type"].startswith("union_tag_")] or faults


def path_in(fault: Mapping[str, Any], body: Any) -> Path:
    """Return a fault's path in the body, without the names of union alternatives that pydantic inserts."""
    path: list[str | int] = []
    for part in fault["loc"][1:]:
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and part in range(len(body))):
            body = cast(Any, body)[part]
            path.append(part)
    return (*path, fault["loc"][-1]) if fault["type"] == "missing" else tuple(path)


def spelled(path: Path, *, numbers: bool = True) -> str:
    """Return a path as text, e.g. `messages[0].content`, or `messages[].content` without numbers."""
    parts = [f".{part}" if isinstance(part, str) else f"[{part}]" if numbers else "[]" for part in path]
    return "".join(parts).removeprefix(".")
