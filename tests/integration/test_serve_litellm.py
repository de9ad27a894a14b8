"""The server as LiteLLM sees it, pointed at it as at any server that speaks OpenAI's protocol."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

from llamarium.api import Llama
from quiet_clients import quiet_litellm
from serving import HELLO, Running

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings(  # it looks at every attribute of a chunk
        "ignore:Accessing the 'model_.*' attribute on the instance:pydantic.warnings.PydanticDeprecatedSince211"
    ),
]

DIALOG: list[dict[str, Any]] = HELLO["messages"]
PAINT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}, "coats": {"enum": [1, 2]}},
            "required": ["colour", "coats"],
            "additionalProperties": False,
        },
    },
}


class Colour(pydantic.BaseModel):
    name: Literal["red", "green"]
    shade: Literal[1, 2, 3]


@pytest.fixture
def litellm() -> Iterator[Any]:
    with quiet_litellm() as litellm:
        yield litellm


@pytest.fixture
def asked(running: Running) -> dict[str, Any]:
    """How LiteLLM is pointed at the server, and a question."""
    at = {"model": "openai/small", "api_base": f"{running.url}/v1", "api_key": "none", "max_retries": 0}
    return at | {"messages": DIALOG, "temperature": 0}


def test_an_answer_is_what_the_library_says(litellm: Any, asked: dict[str, Any], llama: Llama) -> None:
    answer = litellm.completion(**asked, max_tokens=8)
    expected = llama.chat(DIALOG, temperature=0.0, max_tokens=8)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)


def test_a_stream_joined_is_the_whole_answer(litellm: Any, asked: dict[str, Any], llama: Llama) -> None:
    chunks = list(litellm.completion(**asked, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == llama.chat(DIALOG, temperature=0.0, max_tokens=8).text
    assert len([text for text in texts if text]) > 1
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [8]


def test_several_at_once_from_an_event_loop(litellm: Any, asked: dict[str, Any], llama: Llama) -> None:
    async def answers() -> list[str]:
        some = (litellm.acompletion(**asked, max_tokens=n) for n in (3, 5, 8))
        stream = await litellm.acompletion(**asked, max_tokens=8, stream=True)
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [*(answer.choices[0].message.content for answer in await asyncio.gather(*some)), "".join(streamed)]

    expected = [llama.chat(DIALOG, temperature=0.0, max_tokens=n).text for n in (3, 5, 8, 8)]
    assert asyncio.run(answers()) == expected


def test_text_completions(litellm: Any, asked: dict[str, Any], llama: Llama) -> None:
    del asked["messages"]
    answer = litellm.text_completion(**asked, prompt="Once upon a time", max_tokens=6)
    assert answer.choices[0].text == llama.generate("Once upon a time", temperature=0.0, max_tokens=6).text


def test_a_tool_is_called_and_its_result_goes_back_in(litellm: Any, asked: dict[str, Any], llama: Llama) -> None:
    called = litellm.completion(**asked, tools=[PAINT], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "paint"
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is dry."}
    asked["messages"] = [*DIALOG, called.choices[0].message, result]
    told = litellm.completion(**asked, tools=[PAINT], tool_choice="none", max_tokens=8)
    plain = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    expected = llama.chat([*DIALOG, plain, result], temperature=0.0, max_tokens=8)
    assert told.choices[0].message.content == expected.text
    assert told.usage.prompt_tokens == len(expected.prompt_ids)


def test_a_streamed_call_is_the_whole_one(litellm: Any, asked: dict[str, Any]) -> None:
    asked |= {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**asked).choices[0].message.tool_calls
    joined = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    assert [call.function for call in joined.choices[0].message.tool_calls] == [call.function for call in whole]


def test_the_form_of_an_answer_is_held(litellm: Any, asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, response_format=Colour).choices[0].message.content
    Colour.model_validate_json(answer)


def test_errors_keep_their_class_and_message(litellm: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError, match=r"asks for 600 more.* length is 512 tokens"):
        litellm.completion(**asked, max_tokens=600)
    with pytest.raises(litellm.ContextWindowExceededError, match=r"length is 512 tokens"):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "word " * 10**5}]})
    with pytest.raises(litellm.NotFoundError, match="model 'large' does not exist; available: small, alias"):
        litellm.completion(**asked | {"model": "openai/large"})
    with pytest.raises(litellm.BadRequestError, match="functions is not supported: use tools"):
        litellm.completion(**asked, extra_body={"functions": [{"name": "paint"}]})
