"""Input items of a response: messages, tool calls and their results."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from llamarium.server.arguments import as_object
from llamarium.server.dialogs import Dialog
from llamarium.server.fields import Body, by_type, of_table, of_type


@of_table("responses input[].content[]")
class InputPart(Body):
    """A part of a text."""

    type: Literal["input_text", "output_text"] = Field(description="kind of the part")
    text: str = Field(description="text of the part")


@of_table("responses input[] of message")
@of_table("responses input[]")
class MessageItem(Body):
    """A message."""

    type: Literal["message"] = Field(default="message", description="kind of the item")
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="author of the message; `developer` is `system`"
    )
    content: str | list[InputPart] = Field(description="text, or a list of text parts")


@of_table("responses input[]", "responses input[] of call")
class FunctionCallItem(Body):
    """A call of the assistant."""

    type: Literal["function_call"] = Field(description="kind of the item")
    call_id: str = Field(min_length=1, description="id of the call, which its result repeats")
    name: str = Field(description="name of the function")
    arguments: str = Field(description="arguments as the text of a JSON object")


@of_table("responses input[]", "responses input[] of output")
class FunctionCallOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"] = Field(description="kind of the item")
    call_id: str = Field(description="id of the call")
    output: str | list[InputPart] = Field(description="result of the call, as text")


@of_table("responses input[] of reasoning")
@of_table("responses input[]")
class ReasoningItem(Body):
    """What another model thought before its answer; it is no part of the dialog."""

    type: Literal["reasoning"] = Field(description="kind of the item")


Item = Annotated[
    Annotated[MessageItem, of_type("message")]
    | Annotated[FunctionCallItem, of_type("function_call")]
    | Annotated[FunctionCallOutputItem, of_type("function_call_output")]
    | Annotated[ReasoningItem, of_type("reasoning")],
    by_type("message"),
]


ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def add_item(dialog: Dialog, where: str, item: Item) -> None:
    """Append an item to a dialog; a tool call is added to a preceding assistant message, or starts one.

    Args:
        dialog: The dialog.
        where: Path of the item in the request.
        item: The item.
    """
    if isinstance(item, FunctionCallOutputItem):
        dialog.add(where, {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    elif isinstance(item, FunctionCallItem):
        if not dialog.messages or dialog.messages[-1]["role"] != "assistant":
            dialog.add(where, {"role": "assistant", "content": None})
        dialog.add_call(where, item.call_id, item.name, as_object(item.arguments))
    elif isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        dialog.add(where, {"role": role, "content": _text(item.content)})


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
