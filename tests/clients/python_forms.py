"""Python packages that ask for an answer with a form: a function each, which run.py runs with the name of it.

Each gets the two texts to join from one answer, tells the model their result in the next, and prints what it says.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import sys
from typing import Any

from task import KEY, MODEL, TASK, URL, Join, join


def _repeat(made: Join) -> None:
    from openai import OpenAI

    said: Any = [{"role": "user", "content": made.told()}]
    print(OpenAI().chat.completions.create(model=MODEL, messages=said).choices[0].message.content)


def instructor_tools() -> None:
    """instructor: an object, by a call that has to be made."""
    import instructor
    from openai import OpenAI
    from pydantic import create_model

    form: type[Join] = create_model("join", __base__=Join)
    client: Any = instructor.from_openai(OpenAI())
    said = [{"role": "user", "content": TASK}]
    _repeat(client.chat.completions.create(model=MODEL, response_model=form, messages=said))


def _outlines(server: str) -> None:
    import outlines
    from openai import OpenAI

    model: Any = getattr(outlines, f"from_{server}")(OpenAI(), MODEL)
    made = Join.model_validate_json(model(TASK, Join))
    print(model(made.told()))


def outlines_openai() -> None:
    """outlines: an object, by a schema."""
    _outlines("openai")


def outlines_vllm() -> None:
    """The same, as outlines asks vLLM."""
    _outlines("vllm")


def outlines_sglang() -> None:
    """The same, as outlines asks SGLang."""
    _outlines("sglang")


def guidance_program() -> None:
    """guidance: a program whose parts are a JSON value and a text."""
    import guidance

    model: Any = guidance.models.OpenAI(MODEL, base_url=URL, api_key=KEY, echo=False)
    with guidance.user():
        model += TASK
    with guidance.assistant():
        model += guidance.json(name="made", schema=Join)
    made = Join.model_validate_json(model["made"])
    with guidance.user():
        model += made.told()
    with guidance.assistant():
        model += guidance.gen(name="said", max_tokens=100)
    print(model["said"])


def _dspy_agent(adapter: str) -> None:
    import dspy

    model = dspy.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False)
    dspy.configure(lm=model, adapter=getattr(dspy, adapter)())
    print(dspy.ReAct("question -> answer", tools=[join], max_iters=3)(question=TASK).answer)


def dspy_json() -> None:
    """dspy's agent, over JSON Schema: a call that a form holds, its result, and the answer."""
    _dspy_agent("JSONAdapter")


def dspy_chat() -> None:
    """dspy's agent with its own marks in the text, which is what it takes by itself."""
    _dspy_agent("ChatAdapter")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
