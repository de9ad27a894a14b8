"""Python packages that call tools: a function each, which run.py runs with the name of it.

Each prints what the model says when it has the tool's result.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalIterable=false

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from task import ADDRESS, KEY, MODEL, TASK, TOOL, URL, join


def _agents(make: Any) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="joiner",
        model=make(model=MODEL, openai_client=AsyncOpenAI()),
        tools=[agents.function_tool(join)],
        model_settings=agents.ModelSettings(tool_choice="required"),
    )
    print(asyncio.run(agents.Runner.run(agent, TASK)).final_output)


def openai_agents() -> None:
    """openai-agents, over responses."""
    import agents

    _agents(agents.OpenAIResponsesModel)


def openai_agents_chat() -> None:
    """openai-agents, over chat completions."""
    import agents

    _agents(agents.OpenAIChatCompletionsModel)


def pydantic_ai() -> None:
    """pydantic-ai, over chat completions."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    print(Agent(model, tools=[join]).run_sync(TASK).output)


def pydantic_ai_anthropic() -> None:
    """pydantic-ai, over messages."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ADDRESS, api_key=KEY))
    print(Agent(model, tools=[join]).run_sync(TASK).output)


def smolagents_tools() -> None:
    """smolagents' agent that calls tools; it sends stop strings beside required calls."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)
    print(ToolCallingAgent(tools=[tool(join)], model=model, max_steps=3).run(TASK))


def langchain_openai() -> None:
    """langchain-openai, with a call that has to be made."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    made, model = tool(join), ChatOpenAI(model=MODEL)
    said: list[Any] = [HumanMessage(TASK)]
    said.append(model.bind_tools([made], tool_choice="any").invoke(said))
    said += [made.invoke(call) for call in said[-1].tool_calls]
    print(model.bind_tools([made]).invoke(said).content)


def langgraph_agent() -> None:
    """langgraph's ready-made agent."""
    import warnings

    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    warnings.simplefilter("ignore")
    agent = create_react_agent(ChatOpenAI(model=MODEL), [join])
    print(agent.invoke({"messages": [("user", TASK)]})["messages"][-1].content)


def _call_and_repeat(complete: Callable[..., Any]) -> None:
    """A call that has to be made, its result, and what the model says then; `complete` as `openai`'s `create`."""
    said: list[Any] = [{"role": "user", "content": TASK}]
    message = complete(messages=said, tools=[TOOL], tool_choice="required").choices[0].message
    said.append(message)
    for call in message.tool_calls:
        result = join(**json.loads(call.function.arguments))
        said.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(complete(messages=said, tools=[TOOL]).choices[0].message.content)


def litellm_completion() -> None:
    """litellm in the same process."""
    import litellm

    _call_and_repeat(partial(litellm.completion, model=f"openai/{MODEL}", api_base=URL, api_key=KEY))


def litellm_proxy() -> None:
    """LiteLLM's proxy, whose models are in config.yaml, and the official client before it."""
    from openai import OpenAI

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    proxy = subprocess.Popen(["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", port])
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", max_retries=60)
        _call_and_repeat(partial(client.chat.completions.create, model="proxied"))
    finally:
        proxy.terminate()
        proxy.wait()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
