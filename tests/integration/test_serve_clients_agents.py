"""Agents that call tools and end with a form: openai-agents and pydantic-ai, against a small model that can talk."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import agents
import anthropic
import openai
import pydantic
import pydantic_ai
import pytest
from agents.models.interface import Model as AgentsModel
from pydantic_ai.models import Model as PydanticModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from serving import Running

pytestmark = pytest.mark.torch

QUESTION = "What is the weather in Paris?"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 128}
UNTRACED = agents.RunConfig(tracing_disabled=True)


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green"]
    shade: Literal[1, 2, 3]


class Weather:
    """A tool that remembers for which cities it was called; a coroutine, as for others clients keep threads."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    async def get_weather(self, city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city now."""
        self.cities.append(city)
        return f"{city}: sunny, 25 C"


@pytest.fixture
def weather() -> Weather:
    return Weather()


@asynccontextmanager
async def openai_at(running: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


AGENTS: dict[str, type[Any]] = {
    "chat": agents.OpenAIChatCompletionsModel,
    "responses": agents.OpenAIResponsesModel,
}


@pytest.fixture(params=AGENTS)
def agents_run(talker: Running, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run a coroutine function of the model of openai-agents that speaks one of the protocols."""

    def run(ask: Callable[[AgentsModel], Awaitable[Any]]) -> Any:
        async def with_model() -> Any:
            async with openai_at(talker) as client:
                return await ask(AGENTS[request.param]("small", client))

        return asyncio.run(with_model())

    return run


def agent(model: AgentsModel, settings: dict[str, Any], **options: Any) -> agents.Agent[Any]:
    return agents.Agent("Guide", model=model, model_settings=agents.ModelSettings(**GREEDY, **settings), **options)


@pytest.mark.parametrize(("form", "is_streamed"), [(None, True), (Colour, False)])
def test_openai_agents_call_first_and_answer_then(
    agents_run: Callable[..., Any], weather: Weather, form: Any, is_streamed: bool
) -> None:
    """A call that has to be made, its result, and an answer that is free or has a form, beside the same tools."""

    async def ask(model: AgentsModel) -> Any:
        tool = agents.function_tool(weather.get_weather)
        guide = agent(model, {"tool_choice": "required"}, tools=[tool], output_type=form)
        if not is_streamed:
            return await agents.Runner.run(guide, QUESTION, run_config=UNTRACED)
        result = agents.Runner.run_streamed(guide, QUESTION, run_config=UNTRACED)
        assert {event.type async for event in result.stream_events()} >= {"raw_response_event", "run_item_stream_event"}
        return result

    result = agents_run(ask)
    assert weather.cities and set(weather.cities) <= {"Paris", "Rome"}
    *kinds, last = [item.type for item in result.new_items]
    assert kinds[0] == "tool_call_item" and last == "message_output_item"
    assert Counter(kinds) == dict.fromkeys(("tool_call_item", "tool_call_output_item"), len(weather.cities))
    assert isinstance(result.final_output, form or str) and result.final_output


def test_openai_agents_may_answer_in_a_form_without_a_call(agents_run: Callable[..., Any], weather: Weather) -> None:
    async def ask(model: AgentsModel) -> Any:
        tool = agents.function_tool(weather.get_weather)
        guide = agent(model, {}, tools=[tool], output_type=Colour)
        return await agents.Runner.run(guide, QUESTION, run_config=UNTRACED)

    assert isinstance(agents_run(ask).final_output, Colour)


def test_openai_agents_hand_over(agents_run: Callable[..., Any]) -> None:
    async def ask(model: AgentsModel) -> Any:
        painter = agents.Agent("Painter", model=model, model_settings=agents.ModelSettings(**GREEDY))
        guide = agent(model, {"tool_choice": "required"}, handoffs=[painter])
        return await agents.Runner.run(guide, QUESTION, run_config=UNTRACED)

    result = agents_run(ask)
    assert result.last_agent.name == "Painter"
    assert isinstance(result.final_output, str)


def test_openai_agents_remember_a_dialog(agents_run: Callable[..., Any]) -> None:
    async def ask(model: AgentsModel) -> list[str]:
        session, guide = agents.SQLiteSession("dialog"), agent(model, {})
        try:
            asked = ("What is the capital of France?", "And of Italy?")
            return [
                (await agents.Runner.run(guide, text, session=session, run_config=UNTRACED)).final_output
                for text in asked
            ]
        finally:
            session.close()

    first, second = agents_run(ask)
    assert "Paris" in first and "Rome" in second


def test_openai_agents_settings_that_change_no_answer(agents_run: Callable[..., Any]) -> None:
    """What it sends of reasoning, storing and counting, for models that are not this one."""
    hints = {
        "reasoning": {"effort": "low", "summary": "auto"},
        "verbosity": "low",
        "store": False,
        "metadata": {"run": "1"},
        "include_usage": True,
        "prompt_cache_retention": "24h",
        "response_include": ["reasoning.encrypted_content"],
    }

    async def ask(model: AgentsModel) -> list[str]:
        question = "What is the capital of France?"
        some = (agent(model, settings) for settings in ({}, hints))
        return [(await agents.Runner.run(one, question, run_config=UNTRACED)).final_output for one in some]

    plain, hinted = agents_run(ask)
    assert plain == hinted


@asynccontextmanager
async def chat_model(running: Running) -> AsyncIterator[PydanticModel]:
    async with openai_at(running) as client:
        yield OpenAIChatModel("small", provider=OpenAIProvider(openai_client=client))


@asynccontextmanager
async def responses_model(running: Running) -> AsyncIterator[PydanticModel]:
    async with openai_at(running) as client:
        yield OpenAIResponsesModel("small", provider=OpenAIProvider(openai_client=client))


@asynccontextmanager
async def messages_model(running: Running) -> AsyncIterator[PydanticModel]:
    async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        profile = ModelProfile(supports_json_schema_output=True)  # it knows Anthropic's models by their names
        yield AnthropicModel("small", provider=AnthropicProvider(anthropic_client=client), profile=profile)


MODELS = {"chat": chat_model, "responses": responses_model, "messages": messages_model}


@pytest.fixture(params=MODELS)
def pydantic_run(talker: Running, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run a coroutine function of the model of pydantic-ai that speaks one of the protocols."""

    def run(ask: Callable[[PydanticModel], Awaitable[Any]]) -> Any:
        async def with_model() -> Any:
            async with MODELS[request.param](talker) as model:
                return await ask(model)

        return asyncio.run(with_model())

    return run


@pytest.mark.parametrize(
    ("form", "then"), [(str, "auto"), (Colour, ["final_result"]), (pydantic_ai.NativeOutput(Colour), "auto")]
)
def test_pydantic_ai_calls_first_and_answers_then(
    pydantic_run: Callable[..., Any], weather: Weather, form: Any, then: Any
) -> None:
    """The answer is text, a call of a tool that stands for it, or a form beside the tools."""

    def settings(context: pydantic_ai.RunContext[Any]) -> Any:
        return GREEDY | {"tool_choice": ["get_weather"] if context.run_step == 1 else then}

    async def ask(model: PydanticModel) -> Any:
        guide = pydantic_ai.Agent(model, output_type=form, tools=[weather.get_weather], model_settings=settings)
        return await guide.run(QUESTION, usage_limits=pydantic_ai.UsageLimits(request_limit=3))

    result = pydantic_run(ask)
    assert weather.cities and set(weather.cities) <= {"Paris", "Rome"}
    assert isinstance(result.output, str if form is str else Colour) and result.output
    assert result.usage.output_tokens > 0


@pytest.mark.parametrize("form", [str, Colour])
def test_pydantic_ai_streams(pydantic_run: Callable[..., Any], form: Any) -> None:
    async def ask(model: PydanticModel) -> list[Any]:
        guide = pydantic_ai.Agent(model, output_type=form, model_settings=GREEDY)
        async with guide.run_stream("What is the capital of France?") as result:
            if form is str:
                return [text async for text in result.stream_text(delta=True, debounce_by=None)]
            return [output async for output in result.stream_output(debounce_by=None)]

    pieces = pydantic_run(ask)
    assert len(pieces) > 1
    assert ("Paris" in "".join(pieces)) if form is str else isinstance(pieces[-1], Colour)
