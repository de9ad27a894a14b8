"""Clients for answers with a form: instructor, and Simon Willison's `llm`, a program for the shell."""

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import anthropic
import click.testing
import instructor
import llm.cli
import openai
import pydantic
import pytest

from serving import Running

pytestmark = pytest.mark.torch

QUESTION = "Extract: Jason is 25 years old."


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int
    mood: Literal["glad", "sad"]


OF_OPENAI = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS]
MODES = [*(("openai", mode) for mode in OF_OPENAI), ("anthropic", instructor.Mode.TOOLS)]


@pytest.fixture(params=MODES, ids=lambda mode: f"{mode[0]}-{mode[1].name}")
def asking(talker: Running, request: pytest.FixtureRequest) -> Iterator[tuple[Any, dict[str, Any]]]:
    """instructor's client in one of its modes, and a question to it."""
    whose, mode = request.param
    options = {"api_key": "none", "max_retries": 0}
    asked: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}
    with (
        closing(openai.OpenAI(base_url=f"{talker.url}/v1", **options)) as ours,
        closing(anthropic.Anthropic(base_url=talker.url, **options)) as theirs,
    ):
        if whose == "anthropic":
            yield instructor.from_anthropic(theirs, mode=mode), asked | {"max_tokens": 128}
        else:
            yield instructor.from_openai(ours, mode=mode), asked | {"temperature": 0, "max_tokens": 128}


def test_instructor_gets_an_object(asking: tuple[Any, dict[str, Any]]) -> None:
    client, asked = asking
    person, raw = client.create_with_completion(response_model=Person, **asked)
    assert isinstance(person, Person)
    assert raw.model == "small"


def test_instructor_gets_an_object_piece_by_piece(asking: tuple[Any, dict[str, Any]]) -> None:
    client, asked = asking
    *begun, whole = client.create_partial(response_model=Person, **asked)
    assert begun, "a part of it was there before the whole"
    Person.model_validate(whole.model_dump())


@pytest.fixture
def shell(talker: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., click.testing.Result]:
    """Run `llm` with arguments to its good end."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    models = [
        {"model_id": "here", "model_name": "small", "api_base": f"{talker.url}/v1"},
        {"model_id": "responses", "model_name": "small", "api_base": f"{talker.url}/v1", "responses": True},
    ]
    can = {"supports_schema": True, "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model | can for model in models]))

    def run(*arguments: str) -> click.testing.Result:
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # it ends with its process
            result = click.testing.CliRunner().invoke(llm.cli.cli, [*arguments, "-o", "temperature", "0", "--no-log"])
            assert result.exit_code == 0, result.output
            gc.collect()
        return result

    return run


@pytest.mark.parametrize(("model", "how"), [("here", []), ("here", ["--no-stream"]), ("responses", [])])
def test_llm_answers(shell: Callable[..., click.testing.Result], model: str, how: list[str]) -> None:
    assert "Paris" in shell("-m", model, "What is the capital of France?", *how).stdout


@pytest.mark.parametrize("model", ["here", "responses"])
def test_llm_holds_a_schema(shell: Callable[..., click.testing.Result], model: str) -> None:
    answer = shell("-m", model, QUESTION, "--schema", "name, age int", "-o", "max_tokens", "128")
    found = json.loads(answer.stdout)
    assert found.keys() == {"name", "age"} and isinstance(found["age"], int)


CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL = """
def get_weather(city: str) -> str:
    "The weather in a city now."
    return f"sunny in {city}"
"""


@pytest.mark.parametrize("model", ["here", "responses"])
def test_llm_runs_a_tool_that_the_model_chose_to_call(shell: Callable[..., click.testing.Result], model: str) -> None:
    """A small model calls where it may, if it is asked to copy the call; its result goes back in."""
    asked = f"Repeat this and nothing else: {CALL}"
    answer = shell("-m", model, asked, "--functions", TOOL, "--tools-debug", "-o", "max_tokens", "96")
    assert "Tool call: get_weather({'city': 'Paris'})" in answer.stderr
    assert "sunny in Paris" in answer.stdout
