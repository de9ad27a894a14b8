"""No field is ignored: each one of the official client is honoured or refused by its name."""

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import anthropic.types as claude
import openai.types.chat as chat
import openai.types.responses as responses
import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params, embedding_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params, response_input_param
from pydantic import BaseModel, ValidationError

from llamarium.errors import ToolError
from llamarium.page.schema.clients import ParametersView
from llamarium.page.schema.sampling import SamplerRequest
from llamarium.sampling.grammar.calls import grammar_of_answer
from llamarium.sampling.grammar.description import OPTIONS as GRAMMAR_OPTIONS
from llamarium.sampling.grammar.description import Grammar
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.parameter import Taker
from llamarium.sampling.params import PARAMETERS, parameters_of
from llamarium.server.answering import AnswerOptions, AnswerRequest, Constraint, FieldNames, Prompts, refusal_of
from llamarium.server.anthropic import requests as messages
from llamarium.server.anthropic.dialog import _NAMES as CLAUDES_NAMES
from llamarium.server.dialogs import Dialog
from llamarium.server.field_table import GENERATION, TABLE, Hint, Refused
from llamarium.server.fields import Body, _meant_by
from llamarium.server.lifecycle.service import ModelChoice
from llamarium.server.openai import fields, tools
from llamarium.server.openai.embeddings import EmbeddingRequest
from llamarium.server.openai.fields import Message, StreamFields, TextPart
from llamarium.server.openai.forms import JsonSchema, ResponseFormat, StructuredOutputs
from llamarium.server.openai.requests import ChatRequest, CompletionRequest
from llamarium.server.openai.responses import items
from llamarium.server.openai.responses import requests as response_requests
from llamarium.server.plain import texts
from llamarium.tokenizer.tools.definition import ToolDefinition
from llamarium.tokenizer.tools.request import ToolRequest

pytestmark = pytest.mark.torch

MESSAGES = (
    chat.ChatCompletionSystemMessageParam,
    chat.ChatCompletionDeveloperMessageParam,
    chat.ChatCompletionUserMessageParam,
    chat.ChatCompletionAssistantMessageParam,
    chat.ChatCompletionToolMessageParam,
    chat.ChatCompletionFunctionMessageParam,
)
FORMATS = (
    shared_params.ResponseFormatText,
    shared_params.ResponseFormatJSONObject,
    shared_params.ResponseFormatJSONSchema,
)
CALLS = chat.ChatCompletionMessageFunctionToolCallParam, chat.ChatCompletionMessageCustomToolCallParam
CHOICES = (
    chat.ChatCompletionNamedToolChoiceParam,
    chat.ChatCompletionAllowedToolChoiceParam,
)
COMPLETIONS: list[tuple[type[Body], tuple[Any, ...]]] = [
    (ChatRequest, (chat_create_params.CompletionCreateParamsStreaming,)),
    (CompletionRequest, (completion_create_params.CompletionCreateParamsStreaming,)),
    (StreamFields, (chat.ChatCompletionStreamOptionsParam,)),
    (Message, (*MESSAGES, chat.ChatCompletionMessage)),  # an answer becomes a part of the dialog
    (TextPart, (chat.ChatCompletionContentPartTextParam,)),
    (ResponseFormat, FORMATS),
    (JsonSchema, (shared_params.response_format_json_schema.JSONSchema,)),
    (tools.Tool, (chat.ChatCompletionFunctionToolParam,)),
    (tools.Function, (shared_params.FunctionDefinition,)),
    (tools.ChosenTools, CHOICES),
    (tools.AllowedTools, (chat.ChatCompletionAllowedToolsParam,)),
    (fields.MessageToolCall, CALLS),
    (fields.CalledFunction, (chat.chat_completion_message_function_tool_call_param.Function,)),
]
PARTS = (
    responses.ResponseInputTextParam,
    responses.ResponseInputImageParam,
    responses.ResponseInputFileParam,
    responses.ResponseOutputTextParam,
    responses.ResponseOutputRefusalParam,
)
SPOKEN = responses.EasyInputMessageParam, responses.ResponseOutputMessageParam, response_input_param.Message
TEXT_FORMATS = (
    shared_params.ResponseFormatText,
    shared_params.ResponseFormatJSONObject,
    responses.ResponseFormatTextJSONSchemaConfigParam,
)
RESPONSES: list[tuple[type[Body], tuple[Any, ...]]] = [
    (response_requests.ResponseRequest, (response_create_params.ResponseCreateParamsStreaming,)),
    (response_requests.ResponseStreamFields, (response_create_params.StreamOptions,)),
    (response_requests.Reasoning, (shared_params.Reasoning,)),
    (response_requests.TextConfig, (responses.ResponseTextConfigParam,)),
    (response_requests.TextFormat, TEXT_FORMATS),
    (items.InputPart, PARTS),
    (items.MessageItem, SPOKEN),
    (items.FunctionCallItem, (responses.ResponseFunctionToolCallParam,)),
    (items.FunctionCallOutputItem, (response_input_param.FunctionCallOutput,)),
    (items.ReasoningItem, (responses.ResponseReasoningItemParam,)),
    (response_requests.FunctionTool, (responses.FunctionToolParam,)),
    (response_requests.NamedFunction, (responses.ToolChoiceFunctionParam,)),
    (response_requests.AllowedFunctions, (responses.ToolChoiceAllowedParam,)),
]
CLAUDE_CHOICES = (
    claude.ToolChoiceAutoParam,
    claude.ToolChoiceAnyParam,
    claude.ToolChoiceToolParam,
    claude.ToolChoiceNoneParam,
)
MESSAGE_BODIES: list[tuple[type[Body], tuple[Any, ...]]] = [
    (messages.MessagesRequest, (message_create_params.MessageCreateParamsStreaming,)),
    (messages.CountRequest, (claude.MessageCountTokensParams,)),
    (messages.MessageParam, get_args(claude.MessageParam)),
    (messages.TextBlock, (claude.TextBlockParam,)),
    (messages.ToolUseBlock, (claude.ToolUseBlockParam,)),
    (messages.ToolResultBlock, (claude.ToolResultBlockParam,)),
    (messages.OutputConfig, (claude.OutputConfigParam,)),
    (messages.JsonFormat, (claude.JSONOutputFormatParam,)),
    (messages.ThinkingBlock, (claude.ThinkingBlockParam, claude.RedactedThinkingBlockParam)),
    (messages.AnthropicTool, (claude.ToolParam,)),
    (messages.AnthropicToolChoice, CLAUDE_CHOICES),
]
EMBEDDINGS: list[tuple[type[Body], tuple[Any, ...]]] = [
    (EmbeddingRequest, (embedding_create_params.EmbeddingCreateParams,))
]
PLAIN: list[tuple[type[Body], tuple[Any, ...]]] = [  # no client's of OpenAI
    (body, ()) for body in (texts.TokenizeRequest, texts.DetokenizeRequest, texts.TemplateRequest)
]
BODIES = [*COMPLETIONS, *RESPONSES, *MESSAGE_BODIES, *EMBEDDINGS]
SECTIONS = {
    "### `/v1/responses`": RESPONSES,
    "### `/v1/messages`": MESSAGE_BODIES,
    "### `/v1/embeddings`": EMBEDDINGS,
    "### `/tokenize`, `/detokenize` and `/apply-template`": PLAIN,
}
"""What the reference has a section of its own for; the others are about both kinds of completions."""


@pytest.mark.parametrize(("body", "params"), BODIES)
def test_every_field_of_the_official_client_is_known(body: type[Body], params: tuple[Any, ...]) -> None:
    theirs = {name for param in params for name in param.__annotations__}
    ours = {field.alias or name for name, field in body.model_fields.items()}
    assert theirs - ours - body.refused.keys() - body.hints == set()


@pytest.mark.parametrize("body", [body for body, _ in BODIES])
def test_no_field_is_both_honoured_and_refused(body: type[Body]) -> None:
    assert body.model_fields.keys() & body.refused.keys() == set()
    assert all(known.reason and not known.reason.endswith(".") for known in body.refused.values())


def test_unknown_names_take_little_time_and_memory() -> None:
    def body(names: Iterable[str]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x"}], **dict.fromkeys(names, 1)}

    start, size = time.process_time(), _meant_by.cache_info().currsize
    ChatRequest.model_validate(body(f"{'x' * 10_000}{i}" for i in range(900)))
    assert _meant_by.cache_info().currsize == size  # long names are not kept
    for round_ in range(5):
        ChatRequest.model_validate(body(f"a_long_name_of_no_{round_}_field_{i}" for i in range(1000)))
    assert time.process_time() - start < 2
    with pytest.raises(ValidationError):
        ChatRequest.model_validate(body(f"own_{i}" for i in range(1001)))


def test_every_parameter_of_the_sampler_can_be_asked_for() -> None:
    otherwise = {"max_new_tokens", *GRAMMAR_OPTIONS, "logits_processor"}  # a name of max_tokens; forms; code
    known = set(SamplingKeywords.__annotations__) - otherwise
    for body in (ChatRequest, CompletionRequest):
        assert known - body.model_fields.keys() == set()


def test_every_form_of_an_answer_can_be_asked_for() -> None:
    makers = {name for name in vars(Grammar) if isinstance(vars(Grammar)[name], classmethod)} - {"from_options"}
    names = {"json": "json_schema", "grammar": "gbnf"}  # vLLM's, and ours
    ours = {field.alias or name for name, field in StructuredOutputs.model_fields.items()}
    assert {names.get(name, name) for name in ours} == makers


@pytest.mark.parametrize(
    ("taker", "model", "more"),
    [
        ("openai", ChatRequest, {"n", "prompt_logprobs"}),
        ("openai", CompletionRequest, {"n", "prompt_logprobs"}),
        ("responses", response_requests.ResponseRequest, set()),
        ("anthropic", messages.MessagesRequest, set()),
        ("page", SamplerRequest, set()),
        ("page", ParametersView, set()),
    ],
)
def test_a_protocol_takes_its_parameters_of_the_table(taker: Taker, model: type[BaseModel], more: set[str]) -> None:
    """Those of the table that it takes, and no other number of the sampler."""
    expected = {one.name for one in parameters_of(taker)} | more
    has = model.model_fields.keys() & {one.name for one in PARAMETERS.values()} - {"logprobs", "max_tokens"}
    assert has | more == expected and model.__doc__


def test_what_a_request_gives_reaches_the_sampler_under_its_name() -> None:
    given = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **given, "n": 2, "stop": "a"})
    options = {name: value for name, value in fields.sampler_options(body).items() if value is not None}
    assert options == {**given, "n": 2, "stop": "a"}


def test_a_protocol_may_call_a_tools_field_otherwise() -> None:
    def path_of(path: str) -> str:
        return path.replace(".function.parameters", ".input_schema")

    tool = ToolDefinition("f", parameters={"properties": {"a": {"uniqueItems": True}}}, strict=True)
    tools = ToolRequest((tool,), "required")
    asked = AnswerRequest(
        model=ModelChoice("small"),
        prompts=Prompts(encode=lambda _: []),
        options=AnswerOptions(sampler={}, max_tokens=None),
        names=FieldNames("messages", "max_tokens", path_of),
        constraint=Constraint.of(None, tools),
    )
    with pytest.raises(ToolError) as caught:
        grammar_of_answer(tools, "hermes")
    refusal = refusal_of(caught.value, asked, "")
    assert refusal.param == "tools[0].input_schema" and refusal.message.startswith("tools[0].input_schema cannot be")


OWN = "properties.function.type.allowed_tools.tool_call_id.stop.parallel_tool_calls"  # a client's own names
CLAUDES_PATHS = {
    f"tools[0].function.parameters.{OWN}": f"tools[0].input_schema.{OWN}",
    "tools[12].function.name": "tools[12].name",
    "tool_choice.function.name": "tool_choice.name",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop[1]": "stop_sequences[1]",
    f"messages[0].tool_calls[0].function.arguments.{OWN}": f"messages[7].content[2].input.{OWN}",
    "messages[0].tool_calls[0].function.name": "messages[7].content[2].name",
    "messages[0].tool_call_id": "messages[7].content[2].tool_use_id",
}
RESPONSES_PATHS = {
    f"tools[0].function.parameters.{OWN}": f"tools[0].parameters.{OWN}",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.mode": "tool_choice.mode",
    "tool_choice.allowed_tools.tools[1].function.name": "tool_choice.tools[1].name",
    "messages[0].tool_calls[0].function.name": "input[7].name",
    "messages[0].tool_call_id": "input[7].call_id",
}


@pytest.mark.parametrize(
    ("names", "where", "paths"),
    [
        (CLAUDES_NAMES, "messages[7].content[2]", CLAUDES_PATHS),
        (response_requests.NAMES, "input[7]", RESPONSES_PATHS),
    ],
)
def test_a_path_is_renamed_where_it_is_the_protocols_and_not_within_a_clients_schema(
    names: Mapping[str, str], where: str, paths: dict[str, str]
) -> None:
    dialog = Dialog(names)
    dialog.add(where, {"role": "assistant", "content": None})
    dialog.add_call(where, "call_1", "f", "{}")
    assert {path: dialog.path_of(path) for path in paths} == paths


def test_roles_of_the_official_client_are_known() -> None:
    theirs = {role for param in MESSAGES for role in get_args(_unwrapped(param.__annotations__["role"]))}
    ours = set(get_args(Message.model_fields["role"].annotation))
    assert theirs - ours == {"function"}  # deprecated, with functions


def reference() -> str:
    return (Path(__file__).parents[2] / "docs/reference/server.md").read_text(encoding="utf-8")


def names_of(bodies: list[type[Body]]) -> set[str]:
    fields = {field.alias or name for body in bodies for name, field in body.model_fields.items()}
    names = fields - {name for body in bodies for name in body.hints}
    return names | ({name for body in bodies for name in body.refused} - GENERATION.keys())


def test_the_reference_lists_every_field() -> None:
    text = reference().partition("### `/v1/responses`")[0]
    names = names_of([*(body for body, _ in COMPLETIONS), StructuredOutputs])
    in_examples = {"schema"}
    assert {name for name in names if f"`{name}`" not in text} == in_examples


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_reference_lists_every_field_of_a_protocol(heading: str) -> None:
    section = re.split("\n##", reference().partition(f"\n{heading}\n")[2])[0]
    quoted = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", section))))
    assert names_of([body for body, _ in SECTIONS[heading]]) - quoted == set()


def test_the_reference_lists_every_hint() -> None:
    section = re.split("\n##", reference().partition("\n### Hints\n")[2])[0]
    rows = [re.findall("`([^`]*)`", line) for line in section.splitlines() if line.startswith("| `")]
    expected = {
        holder: {name for name, known in row.items() if isinstance(known, Hint)} for holder, row in TABLE.items()
    }
    assert {holder: set(names) for holder, *names in rows} == {
        holder: names for holder, names in expected.items() if names
    }


def test_the_reference_lists_every_name_of_other_servers_that_is_refused() -> None:
    section = re.split("\n##", reference().partition("\n### Names of other servers\n")[2])[0]
    rows = [re.findall("`([^`]*)`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]
    assert {name for names in rows for name in names} == {
        name for name, known in GENERATION.items() if isinstance(known, Refused)
    }


def test_every_row_of_the_table_is_of_a_body() -> None:
    """What nothing takes is no row."""
    for holder, row in TABLE.items():
        known = (body.hints | body.refused.keys() for body, _ in BODIES)
        assert holder == "headers" or any(row.keys() <= names for names in known), holder


def test_types_of_the_official_clients_that_are_not_taken_are_known() -> None:
    """A new one is looked at by somebody, and then written down here."""

    def types(union: Any) -> set[str]:
        hints = (_unwrapped(one.__annotations__["type"]) for one in get_args(union) if "type" in one.__annotations__)
        return {name for hint in hints for name in get_args(hint)}

    taken = {"text", "tool_use", "tool_result", "thinking", "redacted_thinking"}
    assert types(claude.ContentBlockParam) - taken == {
        "image",
        "document",
        "search_result",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "container_upload",
    }
    assert types(claude.ThinkingConfigParam) == {"enabled", "disabled", "between_tools", "adaptive"}
    assert types(claude.ToolChoiceParam) == {"auto", "any", "tool", "none"}


def _unwrapped(hint: Any) -> Any:
    """Return the Literal in a Required[Literal[...]], which may be a string."""
    if hasattr(hint, "__forward_arg__"):
        import typing_extensions

        names = {"Required": typing_extensions.Required, "Literal": typing_extensions.Literal}
        hint = eval(hint.__forward_arg__, names)
    return get_args(hint)[0]
