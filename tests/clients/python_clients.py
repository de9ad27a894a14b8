"""Python packages, one function each: a tool is called, and its result used; run by `run.py` with the server's address.

The address is in OPENAI_BASE_URL, which ends with /v1.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalIterable=false

import asyncio
import os
import sys
from typing import Any

URL, MODEL = os.environ["OPENAI_BASE_URL"], "small"
ADDRESS = URL.removesuffix("/v1")
TASK = "Join llamarium and 7421 by a hyphen, and repeat the result."
SCHEMA = {
    "type": "object",
    "properties": {"left": {"type": "string"}, "right": {"type": "string"}},
    "required": ["left", "right"],
}
TOOL = {"type": "function", "function": {"name": "join", "description": "Join two texts", "parameters": SCHEMA}}


def join(left: str, right: str) -> str:
    """Join two texts by a hyphen.

    Args:
        left: The first text.
        right: The second text.
    """
    return f"{left}-{right}"


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

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    print(Agent(model, tools=[join]).run_sync(TASK).output)


def pydantic_ai_anthropic() -> None:
    """pydantic-ai, over messages."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ADDRESS, api_key="none"))
    print(Agent(model, tools=[join]).run_sync(TASK).output)


def smolagents_tools() -> None:
    """smolagents' agent that calls tools; it sends stop strings beside required calls."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key="none")
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


def litellm_completion() -> None:
    """litellm, as its proxy asks."""
    import json

    import litellm

    how: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "tools": [TOOL]}
    said: list[Any] = [{"role": "user", "content": TASK}]
    message = litellm.completion(messages=said, tool_choice="required", **how).choices[0].message
    said.append(message)
    for call in message.tool_calls:
        result = join(**json.loads(call.function.arguments))
        said.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(litellm.completion(messages=said, **how).choices[0].message.content)


def instructor_object() -> None:
    """instructor: an object by a call that has to be made, and a dialog that repeats it."""
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, create_model

    asked: type[BaseModel] = create_model("join", left=(str, ...), right=(str, ...), __base__=BaseModel)
    client = OpenAI()
    made: Any = instructor.from_openai(client).chat.completions.create(
        model=MODEL, response_model=asked, messages=[{"role": "user", "content": TASK}]
    )
    told = f"The result is {join(made.left, made.right)}."
    print(client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": told}]).choices[0].message)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
