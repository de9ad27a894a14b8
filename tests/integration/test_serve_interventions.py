"""Interventions by request: what an edited model answers, beside others that do not notice; and what is inside."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from llamarium.api import Llama
from llamarium.inspect.interventions.edits import ablate
from llamarium.runtime.intervention import Edit
from serving import CHAT, HELLO, Running, serving

pytestmark = pytest.mark.torch

COMPLETION: dict[str, Any] = {
    "prompt": "The sky over the sea is " * 6, "temperature": 0, "max_tokens": 10, "logprobs": 3,
    "return_token_ids": True,
}  # fmt: skip
VECTOR = np.random.default_rng(0).normal(0, 2, 64).astype(np.float32)
GIVEN: dict[str, Any] = {"layer": 0, "vector": VECTOR.tolist(), "strength": 1.5}
PAIR: dict[str, Any] = {"layer": 1, "toward": "Love and joy", "away": "Hate", "strength": 3.0}


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, allow_interventions=True) as found:
        yield found


def choice(running: Running, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = running.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize(
    ("fields", "edits"),
    [
        ({"steer": GIVEN}, [Edit("residual", 0, add=1.5 * VECTOR)]),
        ({"steer": [GIVEN | {"positions": [3, 50]}]}, [Edit("residual", 0, None, (3, 50), add=1.5 * VECTOR)]),
        ({"ablate": {"heads": ["0.1"], "mlps": [1]}}, [ablate("head", layer=0, head=1), ablate("mlp", layer=1)]),
    ],
    ids=["steer", "steer some", "ablate"],
)
def test_the_answer_is_the_edited_models(llama: Llama, running: Running, fields: Any, edits: list[Edit]) -> None:
    found = choice(running, **COMPLETION, **fields)
    with llama.inspect.edited(*edits) as other:
        expected = other.generate(COMPLETION["prompt"], temperature=0.0, max_tokens=10, logprobs=3).completions[0]
    plain = choice(running, **COMPLETION)
    assert found["token_ids"] == list(expected.token_ids) != plain["token_ids"]
    logprobs = [one.logprob for one in expected.logprobs or ()]
    np.testing.assert_allclose(found["logprobs"]["token_logprobs"], logprobs, atol=2e-4)


@pytest.mark.parametrize("edit", [{"steer": GIVEN}, {"steer": PAIR}, {"ablate": {"mlps": [1]}}])
def test_an_explanation_knows_of_edits(running: Running, edit: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "The sky over the sea is " * 6}]}
    found = running.post("/v1/cache/explain", earlier=body, now=body | edit).json()
    assert (found["reason"], found["matched_tokens"]) == ("interventions", 0)
    same = running.post("/v1/cache/explain", earlier=body | edit, now=body | edit).json()
    assert same["reason"] == "contained"


def test_neighbours_do_not_notice_and_keys_are_never_shared(llama: Llama) -> None:
    company: list[dict[str, Any]] = [
        {"steer": GIVEN}, {"ablate": {"heads": ["1.0"]}}, {"steer": PAIR}, {"hidden_states": {"layers": [0]}},
    ]  # fmt: skip
    with serving(llama, allow_interventions=True) as running:
        alone = choice(running, **COMPLETION, cache_salt="alone")
        each = [choice(running, **COMPLETION, cache_salt=f"{i}", **fields) for i, fields in enumerate(company)]
        with ThreadPoolExecutor(8) as pool:
            bodies = [COMPLETION | fields for fields in (*company, {}, {}, *company)]
            together = list(pool.map(lambda body: choice(running, **body), bodies))
        assert together == [*each, alone, alone, *each]
        counts: list[int] = []
        for fields in ({}, company[0], company[0]):
            answer = running.post("/v1/completions", **COMPLETION, cache_salt="new", **fields)
            counts.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert counts == [0, 0, len(llama.encode(COMPLETION["prompt"])) - 1]


def test_a_direction_is_the_difference_of_two_prompts_at_their_last_tokens(llama: Llama, running: Running) -> None:
    seen = [llama.trace(PAIR[name], names=["resid"], layers=[1], positions=[-1]) for name in ("toward", "away")]
    toward, away = (np.asarray(one["layers.1.resid"][0]) for one in seen)
    given = {"layer": 1, "vector": (toward - away).tolist(), "strength": 3.0}
    assert choice(running, **COMPLETION, steer=PAIR) == choice(running, **COMPLETION, steer=given)
    edit = llama.inspect.steer(PAIR["toward"], PAIR["away"], 1, scale=3.0)
    np.testing.assert_allclose(3 * (toward - away), np.asarray(edit.add), atol=1e-4)


@pytest.mark.parametrize("streams", [False, True])
def test_hidden_states_and_the_lens_are_those_of_a_trace(llama: Llama, running: Running, streams: bool) -> None:
    last = len(llama.tokenizer.chat(HELLO["messages"])) - 1
    of_prompt, of_answer = (
        {"layers": [1, 0], "positions": [-1, 2]},
        {"layers": [0], "positions": [-1, last + 3], "k": 3},
    )
    body = HELLO | {"hidden_states": of_prompt, "lens": of_answer, "return_token_ids": True}
    body |= {"n": 2, "temperature": 1.0, "seed": 4}
    whole = running.post(CHAT, **body).json()
    shown: list[dict[str, Any]] = whole["choices"]
    if streams:
        shown = [{"hidden_states": [], "lens": []}, {"hidden_states": [], "lens": []}]
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            for chunk in client.chat.completions.create(model="small", stream=True, messages=[], extra_body=body):
                for one in chunk.model_dump()["choices"]:
                    for name, states in shown[one["index"]].items():
                        states += one.get(name) or []
    for choice, one in zip(whole["choices"], shown, strict=True):
        ids = [*whole["prompt_token_ids"], *choice["token_ids"]]
        seen = llama.trace(ids, names=["resid"])
        found = {(state["position"], state["layer"]): state["values"] for state in one["hidden_states"]}
        assert sorted(found) == [(2, 0), (2, 1), (last, 0), (last, 1)] and len(one["hidden_states"]) == 4
        for (position, layer), values in found.items():
            assert (np.array(values, np.float32) == np.asarray(seen[f"layers.{layer}.resid"][position])).all()
        read = llama.inspect.lens(ids, k=3, layers=[0], positions=[last, last + 3], after="mlp").layers[0]
        assert [state["position"] for state in one["lens"]] == [last, last + 3]
        for state, candidates in zip(one["lens"], read.candidates, strict=True):
            tokens = [(token["id"], token["probability"]) for token in state["tokens"]]
            assert tokens == [(token.token_id, pytest.approx(token.probability)) for token in candidates]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"steer": GIVEN | {"vector": [1.0, 2.0]}}, "steer.vector", "2 numbers; expected 64"),
    ({"steer": [GIVEN, GIVEN | {"layer": 2}]}, "steer[1].layer", "is 2; expected 0 to 1"),
    ({"steer": GIVEN | {"layer": -1}}, "steer.layer", "is -1"),
    ({"steer": GIVEN | {"vector": None}}, "steer", "expected vector, or toward and away"),
    ({"steer": GIVEN | {"toward": "a", "away": "b"}}, "steer", "expected vector, or toward and away"),
    ({"steer": {"layer": 0, "toward": "a"}}, "steer", "expected vector, or toward and away"),
    ({"steer": PAIR | {"away": "x" * 9999}}, "steer.away", "too long"),
    ({"steer": GIVEN | {"positions": [512]}}, "steer.positions[0]", "expected 0 to 511"),
    ({"steer": GIVEN | {"strength": 1e9}}, "steer.strength", "less than"),
    ({"steer": GIVEN | {"strenght": 1}}, "steer.strenght", "strength"),
    ({"steer": []}, "steer", "steer has 0 items; expected at least 1"),
    ({"ablate": {}}, "ablate", "no heads and no mlps; expected at least one"),
    ({"ablate": {"heads": []}}, "ablate", "no heads and no mlps"),
    ({"ablate": {"heads": ["0.2"]}}, "ablate.heads[0]", "the head of ablate.heads[0] is 2"),
    ({"ablate": {"heads": ["2.0"]}}, "ablate.heads[0]", "the layer of ablate.heads[0] is 2"),
    ({"ablate": {"heads": ["mlp"]}}, "ablate.heads[0]", "pattern"),
    ({"ablate": {"mlps": [7]}}, "ablate.mlps[0]", "expected 0 to 1"),
    ({"hidden_states": {"layers": [2]}}, "hidden_states.layers[0]", "expected 0 to 1"),
    ({"hidden_states": {"layers": []}}, "hidden_states.layers", "at least 1"),
    ({"hidden_states": {"layers": [0], "positions": [500]}}, "hidden_states.positions[0]", "is 500"),
    ({"lens": {"layers": [0], "positions": [-500]}}, "lens.positions[0]", "is -500; expected -37 to 45"),
    ({"steer": [GIVEN] * 17}, "steer", "steer has 17 items; expected at most 16"),
    ({"lens": {"layers": [0], "k": 51}}, "lens.k", "less than or equal to 50"),
    ({"lens": {"layers": [0] * 200, "positions": [0, 1]}}, "lens", "the maximum is 256"),
    ({"hidden_states": {"layers": [0] * 200, "positions": list(range(30))}}, "hidden_states", "request fewer"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_there_is_not_is_refused_by_name(running: Running, fields: Any, param: str, words: str) -> None:
    error = running.post("/v1/completions", **COMPLETION | {"logprobs": None} | fields)
    assert (error.status_code, error.json()["error"]["param"]) == (400, param), error.text
    assert words in error.json()["error"]["message"]
    wait_idle(running)


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity", "1e300"])
def test_numbers_that_are_none_are_refused(running: Running, number: str) -> None:
    body = json.dumps(COMPLETION | {"steer": GIVEN | {"vector": [0.25] * 64}}).replace("0.25", number, 1)
    error = httpx.post(f"{running.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error.status_code == 400, error.text


@pytest.mark.parametrize(("number", "layer"), [(3e38, 0), (1e20, 0), (1e20, 1)])
def test_logits_that_are_not_finite_end_that_answer_alone(running: Running, number: float, layer: int) -> None:
    """Also where the stream is finite, and float32 does not hold the sum of its squares."""
    at, plain = {"layers": [1]}, choice(running, **COMPLETION)
    broken = COMPLETION | {"steer": {"layer": layer, "vector": [number] * 64}, "hidden_states": at, "lens": at}
    with ThreadPoolExecutor(4) as pool:
        ended, *answers = pool.map(
            lambda body: running.post("/v1/completions", **body), [broken, COMPLETION, COMPLETION]
        )
    assert (ended.status_code, ended.json()["error"]["code"]) == (400, "not_finite")
    held = choice(running, **broken | {"steer": {"layer": layer, "vector": [1e18] * 64}})
    assert held["lens"][0]["tokens"][0]["probability"] > 1e-3, "not one of 49,152 alike"
    assert [one.json()["choices"][0] for one in answers] == [plain, plain]


def test_without_the_option_each_field_is_refused_with_its_name(llama: Llama) -> None:
    at = {"layers": [0]}
    with serving(llama) as off:
        for fields in ({"steer": GIVEN}, {"ablate": {"mlps": [0]}}, {"hidden_states": at}, {"lens": at}):
            for path, body in (("/v1/completions", COMPLETION), (CHAT, HELLO)):
                error = off.post(path, **body, **fields)
                assert error.status_code == 400 and error.json()["error"]["param"] == next(iter(fields))
                assert "--allow-interventions" in error.json()["error"]["message"]


def wait_idle(running: Running) -> None:
    running.wait(lambda: running.is_idle)
