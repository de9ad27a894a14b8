"""Frameworks for agents: a function each, which run.py runs with the name of it.

Each agent calls `join`, has the result, and what it then says is printed.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import sys
from typing import Any

from task import KEY, MODEL, TASK, URL, join


def llama_index() -> None:
    """llama-index: an agent over functions."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, context_window=32768
    )

    async def run() -> Any:
        return await FunctionAgent(tools=[join], llm=model).run(TASK)

    print(asyncio.run(run()))


def _crew(**options: str) -> None:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    model = LLM(model=f"openai/{MODEL}", base_url=URL, api_key=KEY, **options)
    agent = Agent(role="joiner", goal="Join texts", backstory="You join texts.", llm=model, tools=[tool("join")(join)])
    task = Task(description=TASK, expected_output="The joined text", agent=agent)
    print(Crew(agents=[agent], tasks=[task]).kickoff())


def crewai_chat() -> None:
    """crewai: a crew of one agent, over chat completions."""
    _crew()


def crewai_responses() -> None:
    """crewai: a crew of one agent, over responses."""
    _crew(api="responses")


def autogen_agent() -> None:
    """autogen: an agent that reflects on what its tool said."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
    }
    model = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=info)
    agent = AssistantAgent("joiner", model_client=model, tools=[join], reflect_on_tool_use=True)
    print(asyncio.run(agent.run(task=TASK)).messages[-1].content)


def _agno(model_class: Any) -> None:
    from agno.agent import Agent

    agent = Agent(model=model_class(id=MODEL, base_url=URL, api_key=KEY), tools=[join], telemetry=False)
    print(agent.run(TASK).content)


def agno_chat() -> None:
    """agno, with a model of its class for servers like OpenAI's."""
    from agno.models.openai.like import OpenAILike

    _agno(OpenAILike)


def agno_responses() -> None:
    """agno, over responses."""
    from agno.models.openai import OpenAIResponses

    _agno(OpenAIResponses)


def strands_agent() -> None:
    """strands-agents, over chat completions."""
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL)
    print(Agent(model=model, tools=[tool(join)], callback_handler=None)(TASK))


def _haystack(generator: str) -> None:
    from haystack.components.agents import Agent
    from haystack.components.generators import chat
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    model = getattr(chat, generator)(model=MODEL, api_base_url=URL, api_key=Secret.from_token(KEY))
    agent = Agent(chat_generator=model, tools=[create_tool_from_function(join)])
    print(agent.run(messages=[ChatMessage.from_user(TASK)])["messages"][-1].text)


def haystack_chat() -> None:
    """haystack-ai's agent, over chat completions."""
    _haystack("OpenAIChatGenerator")


def haystack_responses() -> None:
    """haystack-ai's agent, over responses."""
    _haystack("OpenAIResponsesChatGenerator")


def semantic_kernel_agent() -> None:
    """semantic-kernel: an agent that calls functions of a plugin."""
    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import KernelFunctionFromMethod, KernelPlugin, kernel_function

    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI())
    function = KernelFunctionFromMethod(kernel_function(join), plugin_name="texts")
    agent = ChatCompletionAgent(
        service=service, name="joiner", plugins=[KernelPlugin("texts", functions={"join": function})]
    )

    async def run() -> Any:
        return await agent.get_response(messages=TASK)

    print(asyncio.run(run()))


def _smolagents(**options: Any) -> None:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)
    print(CodeAgent(tools=[tool(join)], model=model, max_steps=3, **options).run(TASK))


def smolagents_code() -> None:
    """smolagents' agent that writes code and runs it."""
    _smolagents()


def smolagents_code_json() -> None:
    """The same, with the code in a JSON object, by a schema and with stop strings."""
    _smolagents(use_structured_outputs_internally=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
