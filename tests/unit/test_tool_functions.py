"""What a model is told of a function of Python: its signature and its docstring."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Optional

import pytest

from llamarium.errors import ToolError
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.functions import definition_of, described

pytestmark = pytest.mark.quick


def book(
    city: str,
    nights: int,
    budget: float = 1.5,
    *,
    beds: Literal["one", "two"] | None = None,
    tags: list[str] = [],  # noqa: B006 - only its being there counts
    rest: dict[str, int] | None = None,
    anything=None,
) -> str:
    """Book a room.

    It costs what it costs.

    Args:
        city: Where: a city.
        nights (int): How long.

    Returns:
        nights: A word of thanks.
    """
    return "thanks"


def test_a_function_is_told_by_its_signature_and_docstring() -> None:
    assert definition_of(book) == ToolDefinition(
        "book",
        "Book a room.\n\nIt costs what it costs.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where: a city."},
                "nights": {"type": "integer", "description": "How long."},
                "budget": {"type": "number"},
                "beds": {"anyOf": [{"enum": ["one", "two"]}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "rest": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
                "anything": {},
            },
            "required": ["city", "nights"],
            "additionalProperties": False,
        },
    )


def test_a_function_may_say_nothing() -> None:
    def now() -> None: ...

    nothing = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    assert definition_of(now) == ToolDefinition("now", "", nothing)


def test_a_method_is_told_without_its_object() -> None:
    class Clock:
        def read(self, zone: bool, places: Sequence[str], note: Optional[str] = None) -> None:  # noqa: UP045
            """Say how late it is."""

    schema = definition_of(Clock().read).parameters
    assert schema["properties"] == {
        "zone": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    assert schema["required"] == ["zone", "places"]


def test_other_tools_stay_as_they_are() -> None:
    other = {"type": "function", "function": {"name": "f"}}
    assert described([other, book]) == [other, definition_of(book)]
    assert described(None) is None
    assert described(book) is book


def positional(a: int, /) -> None: ...
def several(*a: int) -> None: ...
def of_bytes(a: bytes) -> None: ...
def of_keys(a: dict[int, str]) -> None: ...
def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def literal(a: Literal[b"x"]) -> None: ...


@pytest.mark.parametrize(
    ("function", "param"),
    [
        (positional, "tools[1].a"),
        (several, "tools[1].a"),
        (of_bytes, "tools[1].a"),
        (of_keys, "tools[1].a"),
        (unknown, "tools[1].function"),
        (literal, "tools[1].parameters.properties.a.enum[0]"),
        (lambda: None, "tools[1].name"),
    ],
)
def test_what_cannot_be_told_is_refused(function: Callable[..., Any], param: str) -> None:
    with pytest.raises(ToolError) as caught:
        described([book, function])
    assert caught.value.param == param
