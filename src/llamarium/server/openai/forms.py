"""The form of an answer, as OpenAI (`response_format`), vLLM (`structured_outputs`) and llama-server have it."""

from collections.abc import Callable, Mapping
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
    """A schema and its name; it is always enforced, and `strict` closes its objects (`--open-objects`)."""

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
    # as llama-server has them
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None


def form_of(body: Formed) -> Form | None:
    """Return the form of a request's answer, or None for any text."""
    asked, wanted, schema, grammar = body.response_format, body.structured_outputs, body.json_schema, body.grammar
    if asked is not None and asked.type == "text" and asked.json_schema is None:
        asked = None
    fields = {"response_format": asked, "structured_outputs": wanted, "json_schema": schema, "grammar": grammar}
    given = [name for name, value in fields.items() if value is not None]
    if len(given) > 1:
        raise ApiError(400, f"{given[0]} and {given[1]} both ask for a form; give one", param=given[1])
    if wanted is not None:
        return _only_one(wanted)
    if schema is not None:
        return "json_schema", schema_reader(schema)
    if grammar is not None:
        return "grammar", lambda _: Grammar.gbnf(grammar)
    return None if asked is None else _of_openai(asked)


def _of_openai(asked: ResponseFormat) -> Form:
    if asked.json_schema is None:
        if asked.type == "json_schema":
            raise missing("response_format.json_schema")
        return "response_format", lambda _: Grammar.json_object()
    if asked.type != "json_schema":
        raise misplaced("response_format.json_schema", f"is given, and response_format.type is {asked.type}")
    schema = asked.json_schema.schema_
    if schema is None:
        raise ApiError(400, "the schema is missing", param="response_format.json_schema.schema")
    return "response_format.json_schema.schema", schema_reader(schema, asked.json_schema.strict)


def schema_reader(schema: Mapping[str, Any] | str, strict: bool | None = None) -> Callable[[bool], Grammar]:
    """Return the reader of a `Form`."""
    return lambda is_open: Grammar.json_schema(schema, open_objects=is_open and not strict, strict=bool(strict))


def _only_one(wanted: StructuredOutputs) -> Form:
    readers: dict[str, Callable[[Any], Callable[[bool], Grammar]]] = {
        "json_": schema_reader,
        "json_object": lambda _: lambda _: Grammar.json_object(),
        "regex": lambda value: lambda _: Grammar.regex(value),
        "choice": lambda value: lambda _: Grammar.choice(value),
        "grammar": lambda value: lambda _: Grammar.gbnf(value),
        "lark": lambda value: lambda _: Grammar.lark(value),
    }
    given = [(name, value) for name in readers if (value := getattr(wanted, name)) is not None]
    if len(given) != 1:
        names = ", ".join(name.rstrip("_") for name in readers)
        raise ApiError(400, f"expected one of {names}; {len(given)} are given", param="structured_outputs")
    ((name, value),) = given
    return f"structured_outputs.{name.rstrip('_')}", readers[name](value)
