"""The items of a response's input: messages, calls and their results."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llamarium.server.dialogs import Dialog
from llamarium.server.fields import Body, by_type, of_type

Status = Literal["in_progress", "completed", "incomplete"]

_CALLED = {
    "async": "the client calls its functions itself",
    "caller": "the server calls no tools by itself",
    "namespace": "tools have a name, and no more",
}
_TEXT_ALONE = "this server takes and answers text"


class InputPart(Body):
    """A part of a text; annotations and log-probabilities of an earlier answer have no effect."""

    refused: ClassVar[Mapping[str, str]] = {
        "detail": _TEXT_ALONE,
        "file_data": _TEXT_ALONE,
        "file_id": _TEXT_ALONE,
        "file_url": _TEXT_ALONE,
        "filename": _TEXT_ALONE,
        "image_url": _TEXT_ALONE,
        "prompt_cache_breakpoint": "prefixes are found by themselves",
        "refusal": "give it as text",
    }

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[dict[str, Any]] | None = Field(None, max_length=0)
    logprobs: list[dict[str, Any]] | None = None


class MessageItem(Body):
    """A message; its id and status have no effect."""

    refused: ClassVar[Mapping[str, str]] = {"phase": "the model's answers have no phases"}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(Body):
    """A call of the assistant."""

    refused: ClassVar[Mapping[str, str]] = _CALLED

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(Body):
    """The result of a call."""

    refused: ClassVar[Mapping[str, str]] = {**_CALLED, "name": "the call is named by call_id"}

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    id: str | None = None
    status: Status | None = None


Item = Annotated[
    Annotated[MessageItem, of_type("message")]
    | Annotated[FunctionCallItem, of_type("function_call")]
    | Annotated[FunctionCallOutputItem, of_type("function_call_output")],
    by_type("message"),
]


def add_item(dialog: Dialog, where: str, item: Item) -> None:
    """Append an item; a call joins the assistant's message right before it, or begins one."""
    if isinstance(item, FunctionCallOutputItem):
        dialog.add(where, {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    elif isinstance(item, FunctionCallItem):
        if not dialog.messages or dialog.messages[-1]["role"] != "assistant":
            dialog.add(where, {"role": "assistant", "content": None})
        dialog.add_call(where, item.call_id, item.name, item.arguments)
    else:
        role = "system" if item.role == "developer" else item.role
        dialog.add(where, {"role": role, "content": _text(item.content)})


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
