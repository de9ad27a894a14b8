"""Structured output over HTTP: the official client's `.parse()`, schemas, and vLLM's forms, whole and streamed."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from serving import CHAT, HELLO, Running

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class Colour(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: Literal["red", "green"]
    shade: Literal[1, 2, 3]
    is_warm: bool


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 22, 333]}},
    "required": ["word", "count"],
    "additionalProperties": False,
}
WILD: dict[str, Any] = HELLO | {"temperature": 1.5, "max_tokens": 150}


def test_the_official_client_parses_answers(client: openai.OpenAI) -> None:
    for seed in range(3):
        made = client.chat.completions.parse(
            model="small", messages=HELLO["messages"], response_format=Colour, temperature=1.5, seed=seed
        )
        assert isinstance(made.choices[0].message.parsed, Colour)
        assert made.choices[0].finish_reason == "stop"


def test_a_streamed_answer_keeps_to_its_schema_and_is_the_whole_one(running: Running, client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    for seed in range(3):
        whole = running.post(**WILD, seed=seed, n=2, response_format=form).json()["choices"]
        texts = ["", ""]
        stream = client.chat.completions.create(
            model="small", **WILD, seed=seed, n=2, response_format=form, stream=True
        )  # type: ignore[call-overload]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice["message"]["content"] for choice in whole]
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-f]{4}-[0-9]{2}"}, "[a-f]{4}-[0-9]{2}"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= "a" [xyz]+ "."'}, r"a[xyz]+\."),
        ({"lark": 'start: "b" /[uvw]{2}/'}, "b[uvw]{2}"),
        ({"json": {"const": [1, "x"]}}, r'\s*\[\s*1\s*,\s*"x"\s*\]'),
    ],
)
def test_forms_as_vllm_has_them_hold_everywhere(running: Running, form: dict[str, Any], pattern: str) -> None:
    chat = running.post(**WILD, structured_outputs=form, seed=1).json()["choices"][0]
    assert re.fullmatch(pattern, chat["message"]["content"]) or chat["finish_reason"] == "length"
    body = {"prompt": "A", "temperature": 1.5, "max_tokens": 150, "structured_outputs": form, "seed": 1}
    plain = running.post("/v1/completions", **body).json()["choices"][0]
    assert re.fullmatch(pattern, plain["text"]) or plain["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"json_schema": {"const": [1, "x"]}}, r'\s*\[\s*1\s*,\s*"x"\s*\]'),
        ({"json_schema": '{"const": [1, "x"]}'}, r'\s*\[\s*1\s*,\s*"x"\s*\]'),
        ({"response_format": {"type": "json_object", "schema": {"const": [1, "x"]}}}, r'\s*\[\s*1\s*,\s*"x"\s*\]'),
        ({"response_format": {"type": "json_schema", "schema": {"const": [1, "x"]}}}, r'\s*\[\s*1\s*,\s*"x"\s*\]'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {"const": 1}}}},
            r"\s*1",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}}, r"\s*1"),
        ({"grammar": 'root ::= "a" [xy] "."'}, r"a[xy]\."),
        ({"ebnf": 'root ::= "a" [xy] "."', "grammar": ""}, r"a[xy]\."),
        ({"ebnf": 'start: "a" /[xy]/ "."'}, r"a[xy]\."),
        ({"regex": "[a-f]{4}-[0-9]{2}", "json_schema": None}, "[a-f]{4}-[0-9]{2}"),
    ],
)
def test_forms_as_llama_server_and_sglang_have_them(running: Running, fields: dict[str, Any], pattern: str) -> None:
    chat = running.post(**WILD, **fields, seed=1).json()["choices"][0]["message"]["content"]
    plain = running.post("/v1/completions", prompt="A", temperature=1.5, max_tokens=150, **fields).json()
    assert re.fullmatch(pattern, chat) and re.fullmatch(pattern, plain["choices"][0]["text"])


def test_an_object_that_says_nothing_of_others_is_closed_by_strict_and_opened_by_the_server(running: Running) -> None:
    service, schema = running.service, {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}

    def num_others(strict: bool | None) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": strict}}
        choices = running.post(**WILD, response_format=form, n=8, seed=1).json()["choices"]
        return sum(choice["finish_reason"] == "length" for choice in choices)

    own = service.settings
    try:
        assert num_others(True) == num_others(None) == 0
        service.settings = dataclasses.replace(own, open_objects=True)
        assert num_others(None) > 0 and num_others(True) == 0
    finally:
        service.settings = own


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema is missing"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
            "is set, but response_format.type is json_object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"uniqueItems": True}},
                }
            },
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "type is text"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "x", "schema": {}}}},
            "response_format.schema",
            "set only one",
        ),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema", "compiled"),
        ({"structured_outputs": {"regex": "(", "choice": ["a"]}}, "structured_outputs", "2 are set"),
        ({"json_schema": {"not": {}}}, "json_schema", "cannot be compiled"),
        ({"grammar": "root"}, "grammar", "cannot be read"),
        (
            {"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}},
            "grammar",
            "response_format and grammar",
        ),
        ({"json_schema": {}, "response_format": {"type": "json_object"}}, "json_schema", "set only one"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group, at ("),
        ({"structured_outputs": {"grammar": 'root ::= ("a"?){x}'}}, "structured_outputs.grammar", "Expected integer"),
        ({"structured_outputs": {"json": '{"type": "object", "type": "object"}'}}, "structured_outputs.json", "twice"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "set only one",
        ),
    ],
)
def test_a_form_that_cannot_be_held_is_refused_by_its_name(
    running: Running, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = running.post(CHAT, **HELLO, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], message in error["message"]) == (400, param, True), error
