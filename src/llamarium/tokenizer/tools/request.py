"""The tools of a request, and whether they have to be called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from llamarium.errors import ToolError, show_value
from llamarium.tokenizer.tools.definition import ToolDefinition, read_calls, read_tools
from llamarium.tokenizer.tools.forms import ToolForm, check_form
from llamarium.tokenizer.tools.grammar import Note, call_grammar
from llamarium.tokenizer.tools.parser import MAX_CALLS, ToolCallParser

_CHOICES = ("auto", "none", "required")
_ALLOWED = {"type", "allowed_tools"}


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of one request.

    Attributes:
        choice: "auto" leaves it to the model, "none" hides the tools, "required" demands a call.
        allowed: The names of those that may be called and are described; None is all.
        parallel: There may be several calls in one answer, `MAX_CALLS` at most; a tool that is named is called once.
    """

    tools: tuple[ToolDefinition, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True

    @classmethod
    def read(
        cls, tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None
    ) -> "ToolRequest":
        """Read the three fields of OpenAI's API; None is a field that is not there."""
        found = read_tools(tools)
        parallel = True if parallel_tool_calls is None else parallel_tool_calls
        if not isinstance(parallel, bool):
            raise ToolError("parallel_tool_calls", f"is {show_value(parallel)}; expected true or false")
        choice: Any = "auto" if tool_choice is None else tool_choice
        allowed = None
        if isinstance(choice, Mapping):
            parallel &= cast("Mapping[str, Any]", choice).get("type") != "function"
            choice, allowed = _read_choice(cast("Mapping[str, Any]", choice), found)
        if choice not in _CHOICES:
            raise ToolError("tool_choice", f"is {show_value(choice)}; expected {', '.join(_CHOICES)} or an object")
        if choice == "required" and not found:
            raise ToolError("tool_choice", "requires a call, and there are no tools")
        return cls(found, choice, allowed, parallel)

    @property
    def offered(self) -> tuple[ToolDefinition, ...]:
        """The tools described to the model."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def is_held(self) -> bool:
        """Whether calls are held to their schemas: where one is wanted, or a tool is strict."""
        return any(self.choice == "required" or tool.strict for tool in self.offered)

    def after(self, messages: Sequence[Mapping[str, Any]]) -> "ToolRequest":
        """Return what an answer with a form may call after a dialog: nothing once a call was made twice in this turn.

        Where they cannot answer in their own words, small models call for a result that they have, again and again.
        """
        made: list[tuple[str, str]] = []
        for message in messages:
            made = [] if message["role"] == "user" else made
            made += [(call.name, call.arguments) for call in read_calls(message.get("tool_calls"), "tool_calls")]
        return replace(self, choice="none") if self.choice == "auto" and len(set(made)) < len(made) else self

    @property
    def max_calls(self) -> int:
        """How many calls an answer has at most."""
        return MAX_CALLS if self.parallel else 1

    def grammar(
        self, form: ToolForm | None, answer: str | None = None, note: Note = lambda i, place, keyword: None
    ) -> str | None:
        """Return the Lark text that has to hold the answer, or None if it is free (`is_held`).

        Held calls follow their schemas, and an answer that begins as a call does is one. The form is the
        request's, or the `tool_form` of the tokenizer's `chat_format`. `answer` is the body of a rule for an answer
        without calls, where none have to be made. `note` is told what the form does not hold of the schemas.
        """
        if not self.is_held and answer is None:
            return None
        check_form(form)
        if form is None:
            raise ToolError(
                "tool_choice" if self.choice == "required" else "tools",
                "needs calls of a known form, and this model's chat template does not tell its own; name a tool_form",
            )
        may_talk = self.choice != "required"
        beside = answer if may_talk else None
        return call_grammar(
            self.tools, form, only=self.allowed, may_talk=may_talk, most=self.max_calls, answer=beside, note=note
        )

    def parser(self, openings: tuple[str, ...] = ()) -> ToolCallParser | None:
        """Return a parser of one answer's calls, or None if there are no tools for it."""
        if not self.offered:
            return None
        only_calls = self.choice == "required"
        return ToolCallParser(self.offered, most=self.max_calls, only_calls=only_calls, openings=openings)


def _read_choice(
    choice: Mapping[str, Any], tools: tuple[ToolDefinition, ...]
) -> tuple[Literal["auto", "required"], tuple[str, ...]]:
    """Read a choice that is an object: whether there has to be a call, and the names of the tools."""
    if choice.get("type") == "function":
        return "required", (_named(choice, "tool_choice", tools),)
    given = choice.get("allowed_tools")
    if choice.get("type") != "allowed_tools" or not isinstance(given, Mapping) or choice.keys() - _ALLOWED:
        raise ToolError(
            "tool_choice",
            f'is {show_value(choice)}; expected {{"type": "function", "function": {{"name": ...}}}}, or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        )
    inside, allowed = "tool_choice.allowed_tools", cast("Mapping[str, Any]", given)
    mode, named = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or allowed.keys() - {"mode", "tools"}:
        raise ToolError(f"{inside}.mode", f"is {show_value(mode)}; expected auto or required, and tools beside it")
    if not isinstance(named, list | tuple) or not named:
        raise ToolError(f"{inside}.tools", f"is {show_value(named)}; expected a list of at least one function")
    listed = enumerate(cast("Sequence[object]", named))
    return mode, tuple(_named(one, f"{inside}.tools[{i}]", tools) for i, one in listed)


def _named(choice: object, where: str, tools: tuple[ToolDefinition, ...]) -> str:
    """Return the name of the tool that `{"type": "function", "function": {"name": ...}}` names."""
    given = cast("Mapping[str, Any]", choice) if isinstance(choice, Mapping) else {}
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, Mapping) or given.keys() - {"type", "function"}:
        raise ToolError(where, f'is {show_value(choice)}; expected {{"type": "function", "function": {{"name": ...}}}}')
    name = cast("Mapping[str, Any]", function).get("name")
    if name not in [tool.name for tool in tools]:
        raise ToolError(f"{where}.function.name", f"is {show_value(name)}; there is no such tool")
    return cast("str", name)
