"""Structured outputs, with the fields of OpenAI (`response_format`), vLLM (`structured_outputs`) and llama-server."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field

from llamarium.sampling.grammar.description import Grammar
from llamarium.server.answering import Form
from llamarium.server.dialogs import misplaced, missing
from llamarium.server.errors import ApiError
from llamarium.server.fields import Body
from llamarium.server.openai.fields import Sampling

_LARK_RULE = re.compile(r"^\s*[?!]?\w+(\.\d+)?\s*:", re.MULTILINE)


class JsonSchema(Body):
    """A schema and its name; it is enforced, except by keywords that the answer's header names.

    `strict` refuses those keywords, and closes objects (`--open-objects`).
    """

    name: str | None = Field(None, description="name of the schema; without effect")  # without effect
    description: str | None = Field(None, description="description of the schema; without effect")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON schema of the answer")
    strict: bool | None = Field(
        None, description="true: reject a schema that cannot be enforced completely, and close objects"
    )


class ResponseFormat(Body):
    """OpenAI's form: any text, any JSON object, or a JSON schema; `schema` is llama-server's place for it."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="any text, any JSON object, or a JSON schema"
    )
    json_schema: JsonSchema | None = Field(None, description="schema of the answer and its name")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="JSON schema of the answer, as in llama-server"
    )


class StructuredOutputs(Body):
    """vLLM's form: one of these; `grammar` is in llama.cpp's notation (GBNF), or in Lark's."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="JSON schema, as an object or its text")
    json_object: Literal[True] | None = Field(None, description="true: any JSON object")
    regex: str | None = Field(None, description="regular expression of the whole answer")
    choice: list[str] | None = Field(None, description="texts of which the answer is one")
    grammar: str | None = Field(None, description="grammar in GBNF, or in Lark's notation")
    lark: str | None = Field(None, description="grammar in Lark's notation")


class Formed(Sampling):
    """The fields of an answer's form, for both kinds of completions."""

    response_format: ResponseFormat | None = Field(None, description="output format, as in OpenAI's API")
    structured_outputs: StructuredOutputs | None = Field(None, description="output format, as in vLLM")
    # llama-server's and SGLang's
    json_schema: dict[str, Any] | str | None = Field(None, description="JSON schema of the answer, as in llama-server")
    grammar: str | None = Field(None, description="grammar of the answer, in GBNF or Lark's notation")
    regex: str | None = Field(None, description="regular expression of the answer, as in SGLang")
    ebnf: str | None = Field(None, description="grammar of the answer, as in SGLang")
    # earlier versions of vLLM
    guided_json: dict[str, Any] | str | None = Field(None, description="earlier name of `structured_outputs.json`")
    guided_regex: str | None = Field(None, description="earlier name of `structured_outputs.regex`")
    guided_choice: list[str] | None = Field(None, description="earlier name of `structured_outputs.choice`")
    guided_grammar: str | None = Field(None, description="earlier name of `structured_outputs.grammar`")


def form_of(body: Formed) -> Form | None:
    """Return the output format of a request, or None for any text; empty values count as not given.

    Raises:
        ApiError: If several fields set a format, or one is incomplete.
    """
    values = {name: value for name in _FORMS if (value := getattr(body, name)) not in (None, "")}
    if body.response_format is not None and body.response_format.type == "text":
        for name in _schemas_in(body.response_format):
            raise misplaced(f"response_format.{name}", "is set, but response_format.type is text")
        del values["response_format"]
    if len(values) > 1:
        first, second = [*values][:2]
        raise ApiError(400, f"{first} and {second} both constrain the answer; set only one", param=second)
    if not values:
        return None
    ((name, value),) = values.items()
    if isinstance(value, ResponseFormat):
        return _of_openai(value)
    if isinstance(value, StructuredOutputs):
        return _only_one(value)
    return name, _READERS[_FORMS[name]](value)


def _schemas_in(response_format: ResponseFormat) -> list[str]:
    values = {"json_schema": response_format.json_schema, "schema": response_format.schema_}
    return [name for name, value in values.items() if value is not None]


def _of_openai(response_format: ResponseFormat) -> Form:
    if len(_schemas_in(response_format)) > 1:
        raise misplaced("response_format.schema", "and response_format.json_schema are both set; set only one")
    if response_format.schema_ is not None:
        return "response_format.schema", schema_reader(response_format.schema_)
    if response_format.json_schema is None:
        if response_format.type == "json_schema":
            raise missing("response_format.json_schema")
        return "response_format", lambda _: Grammar.json_object()
    if response_format.type != "json_schema":
        raise misplaced("response_format.json_schema", f"is set, but response_format.type is {response_format.type}")
    schema = response_format.json_schema.schema_
    if schema is None:
        raise missing("response_format.json_schema.schema")
    return "response_format.json_schema.schema", schema_reader(schema, response_format.json_schema.strict)


def schema_reader(schema: Mapping[str, Any] | str, strict: bool | None = None) -> Callable[[bool], Grammar]:
    """Return the function of a `Form` for a JSON schema."""
    return lambda is_open: Grammar.json_schema(schema, open_objects=is_open and not strict, strict=bool(strict))


def _written_grammar(text: str) -> Callable[[bool], Grammar]:
    """Return the function of a `Form` for a grammar in GBNF, or in Lark, whose rules use `:` instead of `::=`."""
    is_lark = "::=" not in text and _LARK_RULE.search(text) is not None
    return lambda _: Grammar.lark(text) if is_lark else Grammar.gbnf(text)


_READERS: Mapping[str, Callable[[Any], Callable[[bool], Grammar]]] = {
    "json": schema_reader,
    "json_object": lambda _: lambda _: Grammar.json_object(),
    "regex": lambda value: lambda _: Grammar.regex(value),
    "choice": lambda value: lambda _: Grammar.choice(value),
    "grammar": _written_grammar,
    "lark": lambda value: lambda _: Grammar.lark(value),
}
"""Readers of a field's value by vLLM's names of the formats; each returns the function of a `Form`."""

_FORMS: Mapping[str, str] = {
    "response_format": "",
    "structured_outputs": "",
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Fields that set the output format, and the format's name in `_READERS`, if the field's value is a format."""

FORM_FIELDS = frozenset(_FORMS)
"""Fields that set the output format; without any of them, `form_of` need not be called."""


def _only_one(outputs: StructuredOutputs) -> Form:
    names = {field.alias or name: name for name, field in StructuredOutputs.model_fields.items()}
    values = [(name, value) for name, attribute in names.items() if (value := getattr(outputs, attribute)) is not None]
    if len(values) != 1:
        message = f"expected exactly one of {', '.join(names)}; {len(values)} are set"
        raise ApiError(400, message, param="structured_outputs")
    ((name, value),) = values
    return f"structured_outputs.{name}", _READERS[name](value)
