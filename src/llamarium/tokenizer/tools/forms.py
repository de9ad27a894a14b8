"""The three formats of tools and calls."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from llamarium.errors import ToolError, show_value
from llamarium.tokenizer.tools.definition import ToolCall, ToolDefinition

ToolForm = Literal["llama3_json", "pythonic", "hermes"]
"""`{"name": ..., "parameters": {...}}`, `[name(argument='value')]`, or `<tool_call>` blocks."""

PYTHON_TAG = "<|python_tag|>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
TAGS = (PYTHON_TAG, TOOL_CALL, TOOL_CALL_END)
"""Tags that introduce or end a call. Control tokens with these spellings are part of the answer's text."""


def tag_ids(special_tokens: Mapping[str, int]) -> frozenset[int]:
    """Return the ids of control tokens that are part of an answer with calls: `spelled` of `Tokenizer.stream`."""
    return frozenset(special_tokens[tag] for tag in TAGS if tag in special_tokens)


class Turn(NamedTuple):
    """A message of a dialog; `calls` are an assistant's calls after its content, as text."""

    role: str
    content: str
    calls: str = ""

    @property
    def text(self) -> str:
        """Content and calls, without a tag between them."""
        return f"{self.content}\n{self.calls}" if self.content and self.calls else self.content + self.calls


def check_form(form: object) -> None:
    """Validate that a value is None or a `ToolForm`; ToolError otherwise."""
    if form is not None and form not in get_args(ToolForm):
        raise ToolError("tool_form", f"is {show_value(form)}; expected {', '.join(get_args(ToolForm))}")


def form_of_template(template: str) -> ToolForm | None:
    """Return the call format of a chat template, or None if it is unknown."""
    if TOOL_CALL in template and "<function=" not in template:
        return "hermes"
    if '"parameters": ' in template and '{"name": ' in template:
        return "llama3_json"
    return "pythonic" if "func_name1(" in template else None


def introduce(turns: Sequence[Turn], tools: Sequence[ToolDefinition], form: ToolForm) -> list[Turn]:
    """Return the dialog with the tool definitions added where the format puts them."""
    has_system = turns[0].role == "system"
    system, others = (turns[0].content if has_system else ""), turns[1:] if has_system else turns
    return [*_INTRODUCTIONS[form](system, tools), *others]


def _introduce_json(system: str, tools: Sequence[ToolDefinition]) -> list[Turn]:
    """Put the tool definitions into the first user message.

    Source: meta-llama/llama-models, `models/llama3_3/prompt_format.md`, "JSON based tool calling".
    """
    functions = "\n".join(json.dumps(tool.to_openai(), indent=4, ensure_ascii=False) for tool in tools)
    text = (
        "Answer the user's question by making use of the following functions if needed.\n"
        "If none of the function can be used, please say so.\n"
        f"Here is a list of functions in JSON format:\n{functions}\n\n"
        "Return function calls in JSON format."
    )
    return [Turn("system", f"Environment: ipython\n\n{system}"), Turn("user", text)]


def _introduce_pythonic(system: str, tools: Sequence[ToolDefinition]) -> list[Turn]:
    """Put the tool definitions into the system message, whose text replaces Meta's default.

    Source: meta-llama/llama-models, `models/llama3_2/text_prompt_format.md`, "Zero shot function calling".
    """
    functions = json.dumps([tool.function() for tool in tools], indent=4, ensure_ascii=False)
    text = (
        "If you decide to invoke any of the function(s), you MUST put it in the format of "
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\n"
        "You SHOULD NOT include any other text in the response.\n\n"
        f"Here is a list of functions in JSON format that you can invoke.\n\n{functions}"
    )
    return [Turn("system", f"{system or _COMPOSER}\n\n{text}")]


_COMPOSER = (
    "You are an expert in composing functions. You are given a question and a set of possible functions.\n"
    "Based on the question, you will need to make one or more function/tool calls to achieve the purpose.\n"
    "If none of the function can be used, point it out. If the given question lacks the parameters required by the "
    "function,\nalso point it out. You should only return the function call in tools call sections."
)


def _introduce_hermes(system: str, tools: Sequence[ToolDefinition]) -> list[Turn]:
    """Say it in the system's turn, after its own words.

    Source: NousResearch/Hermes-Function-Calling, "Prompt Format for Function Calling".
    """
    functions = "\n".join(json.dumps(tool.to_openai(), ensure_ascii=False) for tool in tools)
    text = (
        "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML "
        "tags. You may call one or more functions to assist with the user query. Don't make assumptions about what "
        f"values to plug into functions. Here are the available tools:\n<tools>\n{functions}\n</tools>\n"
        "For each function call return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags as follows:\n<tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</tool_call>'
    )
    return [Turn("system", f"{system}\n\n{text}" if system else text)]


_INTRODUCTIONS: dict[ToolForm, Callable[[str, Sequence[ToolDefinition]], list[Turn]]] = {
    "llama3_json": _introduce_json,
    "pythonic": _introduce_pythonic,
    "hermes": _introduce_hermes,
}


def write_calls(calls: Sequence[ToolCall], form: ToolForm) -> str:
    """Return calls in the format in which a model writes them; "" for none."""
    if form == "pythonic":
        return f"[{', '.join(map(_write_pythonic, calls))}]" if calls else ""
    if form == "hermes":
        blocks = (f"{TOOL_CALL}\n{_write_json(call, 'arguments')}\n{TOOL_CALL_END}" for call in calls)
        return "\n".join(blocks)
    return "; ".join(_write_json(call, "parameters") for call in calls)


def _write_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.values()}, ensure_ascii=False)


def _write_pythonic(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{check_keyword(key)}={value!r}' for key, value in call.values().items())})"


def check_keyword(name: str) -> str:
    """Return an argument's name; ToolError unless it has only letters, digits, `_` and `-`, as Python calls require."""
    if not re.fullmatch(r"[\w-]+", name):
        raise ToolError(
            "tool_form", f"is pythonic, which cannot express the argument name {show_value(name)}; use llama3_json"
        )
    return name


def join_results(turns: Sequence[Turn], form: ToolForm) -> list[Turn]:
    """Return the dialog with tool results in the format of `form`.

    In the Hermes format, each result is a `<tool_response>` block, and consecutive results are one turn; the other
    formats keep them unchanged.
    """
    if form != "hermes":
        return list(turns)
    joined: list[Turn] = []
    for turn in turns:
        if turn.role != "tool":
            joined.append(turn)
            continue
        block = f"<tool_response>\n{turn.content}\n</tool_response>"
        if joined and joined[-1].role == "tool":
            block = f"{joined.pop().content}\n{block}"
        joined.append(Turn("tool", block))
    return joined
