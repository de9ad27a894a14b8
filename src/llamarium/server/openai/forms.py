"""The form of an answer: `response_format` as OpenAI has it, `structured_outputs` as vLLM does."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from llamarium.sampling.grammar.description import Grammar
from llamarium.server.answering import Form
from llamarium.server.dialogs import misplaced, missing
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body
from llamarium.server.openai.fields import Sampling

_MAX_NAME_CHARACTERS = 64


class JsonSchema(Body):
    """A schema and its name; it is always enforced, whatever `strict` says."""

    name: str = Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{_MAX_NAME_CHARACTERS}}}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's form: any text, any JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's form: one of these; `grammar` is llama.cpp's notation (GBNF)."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    lark: str | None = None


class Formed(Sampling):
    """The fields of an answer's form, for both kinds of completions."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def form_of(body: Formed) -> Form | None:
    """Return the form of a request's answer, or None for any text."""
    asked, wanted = body.response_format, body.structured_outputs
    if asked is not None and asked.type == "text" and asked.json_schema is None:
        asked = None
    if asked is not None and wanted is not None:
        raise ApiError(
            400, "response_format and structured_outputs both ask for a form; give one", param="structured_outputs"
        )
    if wanted is not None:
        return "structured_outputs", _only_one(wanted)
    if asked is None:
        return None
    if asked.json_schema is None:
        if asked.type == "json_schema":
            raise missing("response_format.json_schema")
        return "response_format", Grammar.json_object
    if asked.type != "json_schema":
        raise misplaced("response_format.json_schema", f"is given, and response_format.type is {asked.type}")
    schema = asked.json_schema.schema_
    if schema is None:
        raise ApiError(400, "the schema is missing", param="response_format.json_schema.schema")
    return "response_format.json_schema.schema", lambda: Grammar.json_schema(schema)


def _only_one(wanted: StructuredOutputs) -> Callable[[], Grammar]:
    readers: dict[str, Callable[[Any], Grammar]] = {
        "json_": Grammar.json_schema,
        "json_object": lambda _: Grammar.json_object(),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.gbnf,
        "lark": Grammar.lark,
    }
    given = [(name, value) for name in readers if (value := getattr(wanted, name)) is not None]
    if len(given) != 1:
        names = ", ".join(name.rstrip("_") for name in readers)
        raise ApiError(400, f"expected one of {names}; {len(given)} are given", param="structured_outputs")
    ((name, value),) = given
    return lambda: readers[name](value)
