"""The tools of a request, and whether they must be called."""

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
    """The tools of a request.

    Attributes:
        tools: All tools.
        choice: "auto" (the model decides), "none" (tools are hidden) or "required" (at least one call).
        allowed: Names of the tools that are described and may be called; None for all.
        parallel: Whether an answer may have several calls, up to `MAX_CALLS`; a tool required by name is called once.
    """

    tools: tuple[ToolDefinition, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True

    @classmethod
    def read(
        cls, tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None
    ) -> "ToolRequest":
        """Return the request for the three fields of OpenAI's API; None means that a field is missing."""
        definitions = read_tools(tools)
        parallel = True if parallel_tool_calls is None else parallel_tool_calls
        if not isinstance(parallel, bool):
            raise ToolError("parallel_tool_calls", f"is {show_value(parallel)}; expected true or false")
        choice: Any = "auto" if tool_choice is None else tool_choice
        allowed = None
        if isinstance(choice, Mapping):
            parallel &= cast("Mapping[str, Any]", choice).get("type") != "function"
            choice, allowed = _read_choice(cast("Mapping[str, Any]", choice), definitions)
        if choice not in _CHOICES:
            raise ToolError("tool_choice", f"is {show_value(choice)}; expected {', '.join(_CHOICES)} or an object")
        if choice == "required" and not definitions:
            raise ToolError("tool_choice", "requires a call, but there are no tools")
        return cls(definitions, choice, allowed, parallel)

    @property
    def offered(self) -> tuple[ToolDefinition, ...]:
        """The tools described to the model."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def is_held(self) -> bool:
        """Whether a grammar constrains calls to their schemas: if a call is required, or a tool is strict."""
        return any(self.choice == "required" or tool.strict for tool in self.offered)

    def after(self, messages: Sequence[Mapping[str, Any]]) -> "ToolRequest":
        """Return the tools for a constrained answer after a dialog: none once a call was made twice in this turn.

        Small models that cannot answer in free text may otherwise repeat a call whose result they already have.
        """
        calls: list[tuple[str, str]] = []
        for message in messages:
            calls = [] if message["role"] == "user" else calls
            calls += [(call.name, call.arguments) for call in read_calls(message.get("tool_calls"), "tool_calls")]
        return replace(self, choice="none") if self.choice == "auto" and len(set(calls)) < len(calls) else self

    @property
    def max_calls(self) -> int:
        """Maximum number of calls in an answer."""
        return MAX_CALLS if self.parallel else 1

    def grammar(
        self, form: ToolForm | None, answer: str | None = None, note: Note = lambda i, place, keyword: None
    ) -> str | None:
        """Return the grammar of the answer as Lark text, or None if the answer is free (see `is_held`).

        Args:
            form: The call format: the request's, or the `tool_form` of the tokenizer's `chat_format`.
            answer: Body of a rule for an answer without calls, if none is required.
            note: Called for each schema keyword that is not enforced.

        Raises:
            ToolError: If the call format is unknown, or a schema cannot be compiled.
        """
        if not self.is_held and answer is None:
            return None
        check_form(form)
        if form is None:
            raise ToolError(
                "tool_choice" if self.choice == "required" else "tools",
                "needs a known call format, and this model's chat template has none; pass tool_form",
            )
        may_talk = self.choice != "required"
        beside = answer if may_talk else None
        return call_grammar(
            self.tools, form, only=self.allowed, may_talk=may_talk, most=self.max_calls, answer=beside, note=note
        )

    def parser(self, openings: tuple[str, ...] = ()) -> ToolCallParser | None:
        """Return a parser for an answer's calls, or None if there are no tools."""
        if not self.offered:
            return None
        only_calls = self.choice == "required"
        return ToolCallParser(self.offered, most=self.max_calls, only_calls=only_calls, openings=openings)


def _read_choice(
    choice: Mapping[str, Any], tools: tuple[ToolDefinition, ...]
) -> tuple[Literal["auto", "required"], tuple[str, ...]]:
    """Return whether a choice, given as an object, requires a call, and the names of its tools."""
    if choice.get("type") == "function":
        return "required", (_named(choice, "tool_choice", tools),)
    allowed_tools = choice.get("allowed_tools")
    if choice.get("type") != "allowed_tools" or not isinstance(allowed_tools, Mapping) or choice.keys() - _ALLOWED:
        raise ToolError(
            "tool_choice",
            f'is {show_value(choice)}; expected {{"type": "function", "function": {{"name": ...}}}}, or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        )
    path, allowed = "tool_choice.allowed_tools", cast("Mapping[str, Any]", allowed_tools)
    mode, tool_choices = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or allowed.keys() - {"mode", "tools"}:
        raise ToolError(f"{path}.mode", f"is {show_value(mode)}; expected auto or required, and tools beside it")
    if not isinstance(tool_choices, list | tuple) or not tool_choices:
        raise ToolError(f"{path}.tools", f"is {show_value(tool_choices)}; expected a list of at least one function")
    listed = enumerate(cast("Sequence[object]", tool_choices))
    return mode, tuple(_named(tool_choice, f"{path}.tools[{i}]", tools) for i, tool_choice in listed)


def _named(choice: object, where: str, tools: tuple[ToolDefinition, ...]) -> str:
    """Return the name in `{"type": "function", "function": {"name": ...}}`; ToolError if there is no such tool."""
    fields = cast("Mapping[str, Any]", choice) if isinstance(choice, Mapping) else {}
    function = fields.get("function")
    if fields.get("type") != "function" or not isinstance(function, Mapping) or fields.keys() - {"type", "function"}:
        raise ToolError(where, f'is {show_value(choice)}; expected {{"type": "function", "function": {{"name": ...}}}}')
    name = cast("Mapping[str, Any]", function).get("name")
    if name not in [tool.name for tool in tools]:
        raise ToolError(f"{where}.function.name", f"is {show_value(name)}; there is no such tool")
    return cast("str", name)
