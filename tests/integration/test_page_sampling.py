"""How the page's next token is chosen, what was probable, and what one costs: the library's own numbers."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from llamarium.api import Llama
from llamarium.cost import flops
from llamarium.inspect.probes.cost import token_cost
from llamarium.inspect.score import score
from llamarium.page.extension import page
from serving import serving

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "one", "schema": {"type": "array", "items": {"type": "integer"}}},
}
FUNCTION = {
    "name": "get_weather",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
STRICT = {"type": "function", "function": FUNCTION}
OPTIONS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 4,
}


@pytest.fixture(scope="module")
def client(llama: Llama) -> Iterator[httpx.Client]:
    with serving(llama, extensions=[page()]) as running, httpx.Client(base_url=running.url, timeout=30) as found:
        yield found


def path_of(client: httpx.Client, **body: Any) -> str:
    return f"/inspect/passes/{client.post('/inspect/passes', json=body).json()['id']}"


def error_of(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


@pytest.mark.parametrize("options", [OPTIONS, {"temperature": 0.0}, {"temperature": 1.5, "seed": 9}])
def test_the_sampler_is_the_answers(client: httpx.Client, llama: Llama, options: dict[str, Any]) -> None:
    """Step by step as `sampler_steps` tells it, and at each place the token that `generate` gives."""
    prompt = llama.encode(TEXT)
    answer = llama.generate(prompt, max_tokens=4, **options).completions[0].token_ids
    for place, token_id in enumerate(answer):
        path = path_of(client, ids=[*prompt, *answer])
        asked = {"position": len(prompt) + place - 1, "start": len(prompt), "k": 7, **options}
        told = client.post(f"{path}/sampler", json=asked).json()
        expected = llama.inspect.sampler_steps(prompt, answer_ids=answer[:place], k=7, **options).to_dict()
        assert told["token_id"] == token_id
        if "seed" not in options:
            expected["seed"] = told["seed"]
        assert told["place"] == place
        assert told == {**expected, "steps": list(map(as_json, expected["steps"])), "draw": listed(expected["draw"])}


def as_json(step: dict[str, Any]) -> dict[str, Any]:
    return {**step, "candidates": list(step["candidates"])}


def listed(draw: Any) -> Any:
    return None if draw is None else list(draw)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"position": 6}, "position"),
        ({"position": 2, "start": 4}, "start"),
        ({"start": 0}, "start"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"top_k": "many"}, "top_k"),
        ({"k": 0}, "k"),
        ({"n": 2}, "n"),
    ],
)
def test_what_a_sampler_does_not_take_is_refused_by_its_field(
    client: httpx.Client, body: dict[str, Any], param: str
) -> None:
    answer = client.post(f"{path_of(client, text=TEXT)}/sampler", json=body)
    assert error_of(answer) == (400, param)


def test_tokens_are_scored_as_the_library_scores_them(client: httpx.Client, llama: Llama) -> None:
    ids = llama.encode(TEXT)
    told = client.get(f"{path_of(client, text=TEXT)}/score", params={"start": 2}).json()["tokens"]
    expected = score(llama.runner, ids).tokens[2:]
    assert [(one["token_id"], one["rank"]) for one in told] == [(one.token_id, one.rank) for one in expected]
    assert [one["logprob"] for one in told] == pytest.approx([one.logprob for one in expected], rel=1e-6)
    assert [one["position"] for one in told] == list(range(2, len(ids)))


def test_a_score_of_nothing_or_of_too_much_is_refused(client: httpx.Client) -> None:
    assert error_of(client.get(f"{path_of(client, text=TEXT)}/score", params={"start": 6})) == (400, "start")
    assert error_of(client.get(f"{path_of(client, ids=[5] * 200)}/score", params={"start": 71})) == (400, "start")
    assert client.get(f"{path_of(client, ids=[5] * 200)}/score", params={"start": 72}).status_code == 200


def test_the_cost_of_a_token_follows_from_the_shapes(client: httpx.Client, llama: Llama) -> None:
    told = client.get(f"{path_of(client, text=TEXT)}/cost").json()
    ids = llama.encode(TEXT)
    assert (told["flops"], told["flops_without"]) == (flops(llama.config, 1, 5), flops(llama.config, 6))
    expected = token_cost(llama.runner, ids)
    for field in ("num_tokens", "flops", "flops_without", "cache_bytes_per_token"):
        assert told[field] == getattr(expected, field)
    assert told["largest_difference"] == 0  # this runner is exact by rows


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {"temperature": 0.0},
        {**OPTIONS, "response_format": FORM},
        {**OPTIONS, "tools": [STRICT]},
        {**OPTIONS, "tools": [STRICT], "response_format": FORM},
    ],
    ids=["sampled", "greedy", "held to a schema", "held to calls", "held to both"],
)
def test_every_token_of_a_streamed_answer_is_chosen_again(client: httpx.Client, options: dict[str, Any]) -> None:
    """By what the stream told: the ids of prompt and answer, and by the seed and the parameters that were asked for."""
    asked = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 12, **options}
    events = client.post("/v1/chat/completions", json={**asked, "stream": True, "return_token_ids": True}).text
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    prompt = chunks[0]["prompt_token_ids"]
    answer = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])]
    assert 3 < len(answer) <= 12
    for place, token_id in enumerate(answer):
        path = path_of(client, ids=[*prompt, *answer[:place]])
        told = client.post(f"{path}/sampler", json={"start": len(prompt), **options}).json()
        assert (told["token_id"], told["place"]) == (token_id, place)


def test_what_does_not_have_its_form_is_refused(client: httpx.Client, llama: Llama) -> None:
    def ask(text: str, **body: Any) -> tuple[int, str | None]:
        ids = [5, *llama.tokenizer.encode(text, add_special_tokens=False)]
        return error_of(client.post(f"{path_of(client, ids=ids)}/sampler", json={"start": 1, **body}))

    assert ask("[1, yes", response_format=FORM) == (400, "start")
    ended = client.post(f"{path_of(client, ids=[5, 7042, 2])}/sampler", json={"start": 1, "response_format": FORM})
    assert error_of(ended) == (400, "start")
    bad = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "int"}}}
    assert ask("[", response_format=bad) == (400, "response_format.json_schema.schema")
    assert ask("[", tools=[{"type": "function", "function": {**FUNCTION, "name": "a b"}}])[0] == 400
    regex = {"type": "regex", "regex": "[0-9]+"}
    assert ask("[", response_format=regex, tools=[STRICT])[0] == 400
