"""Vectors over HTTP: the model's hidden states, however they are asked for, beside those who are answered."""

import asyncio
import base64
import dataclasses
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from llamarium.api import Llama
from llamarium.attention import CausalAttend
from serving import HELLO, Running, serving

pytestmark = pytest.mark.torch

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["Once upon a time", "x", "The sky is " * 20, "Grüße 🦙", "<|im_end|>"]


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, max_num_seqs=8) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@torch.no_grad()
def expected(llama: Llama, text: str, pooling: str) -> NDArray[np.float64]:
    ids = torch.tensor([llama.tokenizer.encode(text)])
    hidden = llama.model.model(ids, torch.arange(ids.shape[1])[None], CausalAttend())[0].double().numpy()
    vector = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_the_models_hidden_states(client: openai.OpenAI, llama: Llama, pooling: str) -> None:
    made = client.embeddings.create(model="small", input=TEXTS, extra_body={"pooling": pooling})
    assert [one.index for one in made.data] == list(range(len(TEXTS)))
    for one, text in zip(made.data, TEXTS, strict=True):
        np.testing.assert_allclose(one.embedding, expected(llama, text, pooling), rtol=1e-3, atol=1e-4)
    count = sum(len(llama.tokenizer.encode(text)) for text in TEXTS)
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (count, count)
    assert (made.model, made.object) == ("small", "list")


def test_texts_and_ids_floats_and_base64_are_the_same(running: Running, llama: Llama) -> None:
    def vectors(given: Any, **fields: Any) -> list[Any]:
        answer = running.post(EMBEDDINGS, input=given, **fields)
        assert answer.status_code == 200, answer.text
        return [one["embedding"] for one in answer.json()["data"]]

    ids = [llama.tokenizer.encode(text) for text in TEXTS]
    plain = vectors(TEXTS)
    assert vectors(ids) == plain == vectors(TEXTS, pooling="mean", encoding_format="float", dimensions=64)
    assert vectors(TEXTS[0]) == vectors(ids[0]) == plain[:1]
    for told, vector in zip(vectors(TEXTS, encoding_format="base64"), plain, strict=True):
        assert list(struct.unpack("<64f", base64.b64decode(told))) == vector
    assert vectors(TEXTS, cache_salt="mine", user="me") == plain


def test_the_same_bits_beside_others(running: Running) -> None:
    asked = [[f"About {i} and {'more ' * (j % 7)}{j}" for j in range(i % 5 + 1)] for i in range(16)]

    async def together() -> list[list[list[float]]]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> list[list[float]]:
                pooling = {"pooling": "last" if i % 2 else "mean"}
                made = await client.embeddings.create(model="small", input=asked[i], extra_body=pooling)
                return [entry.embedding for entry in made.data]

            async def talk() -> None:
                await client.chat.completions.create(model="small", messages=HELLO["messages"], max_tokens=60)

            *vectors, _, _ = await asyncio.gather(*(one(i) for i in range(len(asked))), talk(), talk())
            return vectors  # type: ignore[return-value]

    beside = asyncio.run(together())
    for i, texts in enumerate(asked):
        for text, vector in zip(texts, beside[i], strict=True):
            alone = running.post(EMBEDDINGS, input=text, pooling="last" if i % 2 else "mean").json()
            assert alone["data"][0]["embedding"] == pytest.approx(vector, abs=0)


def under_way(running: Running) -> int:
    seen = running.engine.snapshot
    return seen.running + seen.waiting


def test_who_comes_behind_many_texts_need_not_wait_for_all(
    running: Running, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, most, passes, run = list[str](), 0, list[int](), llama.runner.run
    both_ask = threading.Event()

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        """Hold the first pass until both ask, and the fiftieth until one of them has its answer."""
        passes.append(len(passes))
        both_ask.wait(10)
        if len(passes) == 50:
            running.wait(lambda: order)
        return run(*args, **kwargs)

    monkeypatch.setattr(llama.runner, "run", in_turn)

    def ask(name: str, path: str, **body: Any) -> None:
        assert running.post(path, **body).status_code == 200
        order.append(name)

    texts = [f"about {i} " * 50 for i in range(200)]
    many = threading.Thread(target=ask, args=("many", EMBEDDINGS), kwargs={"input": texts})
    many.start()
    running.wait(lambda: under_way(running) > 0 or order, 60)
    one = threading.Thread(target=ask, args=("one", "/v1/chat/completions"), kwargs=HELLO)
    one.start()
    running.wait(lambda: running.service.in_flight == 2)
    both_ask.set()
    while many.is_alive():
        most = max(most, under_way(running))
        many.join(0.001)
    one.join()
    assert order == ["one", "many"]
    assert 0 < most <= 2 + 1  # a quarter of the places, and who came behind


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": ["a", ""]}, "input[1]", "no tokens"),
        ({"input": [[1], []]}, "input[1]", "no tokens"),
        ({"input": [1, 10**6]}, "input", "expected 0..49151"),
        ({"input": [[1], [10**6]]}, "input[1]", "expected 0..49151"),
        ({"input": ["a", "word " * 600]}, "input[1]", "maximum context length is 512"),
        ({"input": [[5], [5] * 513]}, "input[1]", "maximum context length is 512 tokens: use a shorter text"),
        ({"input": "a b " * 10**5}, "input", "use a shorter text"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": 5}, "input", ""),
        ({"input": [1, "a"]}, None, ""),
        ({"input": "a", "dimensions": 32}, "dimensions", "64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "a", "pooling": "max"}, "pooling", ""),
        ({"input": "a", "cache_salt": ""}, "cache_salt", ""),
        ({"input": "a", "dimension": 64}, "dimension", "dimensions"),
        ({}, "input", "missing"),
    ],
)
def test_a_refusal_names_the_field(running: Running, fields: dict[str, Any], param: str | None, message: str) -> None:
    answer = running.post(EMBEDDINGS, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"] == param
    assert message in error["message"]
    is_long = "use a shorter text" in error["message"]
    assert (error["code"] == "context_length_exceeded") == is_long


def test_a_text_may_be_as_long_as_the_context(running: Running, llama: Llama) -> None:
    answer = running.post(EMBEDDINGS, input=[[*range(5, 517)], [*range(5, 516)]])
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 512 + 511
    first, second = (one["embedding"] for one in answer.json()["data"])
    assert running.post(EMBEDDINGS, input=[*range(5, 516)]).json()["data"][0]["embedding"] == second != first


def test_a_text_that_has_no_room_is_told_as_such(llama: Llama) -> None:
    limits: list[tuple[dict[str, Any], str]] = [
        ({"max_context": 64}, "maximum context length is 64 tokens"),
        ({"engine": {"kv_memory": 2**15}}, "the text has 65 tokens, but the KV cache has room for 64; use"),
    ]
    for limit, message in limits:
        with serving(llama, **limit) as running:
            assert running.post(EMBEDDINGS, input=[5] * 64).status_code == 200
            error = running.post(EMBEDDINGS, input=[5] * 65).json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert message in error["message"]


def test_who_leaves_and_who_is_late_frees_what_it_had(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, run = threading.Event(), llama.runner.run

    def wait(*args: Any, **kwargs: Any) -> Any:
        gate.wait(0.2)
        return run(*args, **kwargs)

    monkeypatch.setattr(llama.runner, "run", wait)
    with serving(llama) as running:
        with running.begin(EMBEDDINGS, input=["a", "b", "c"]):
            running.wait(lambda: under_way(running) > 0)
        running.wait(running.is_idle, 1)
        settings = running.service.settings
        running.service.settings = dataclasses.replace(settings, request_timeout_s=0.6)
        late = running.post(EMBEDDINGS, input=[f"{i}" for i in range(400)])
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
        running.wait(running.is_idle, 1)
        running.service.settings = settings
        gate.set()
        assert running.post(EMBEDDINGS, input="a").status_code == 200
        told = httpx.get(f"{running.url}/metrics").text
    assert 'request_aborted_total{model_name="small",reason="disconnected"} 1.0' in told
    assert 'request_aborted_total{model_name="small",reason="timeout"} 1.0' in told


def test_hidden_states_that_are_no_numbers_are_an_error(llama: Llama) -> None:
    weight = llama.runner.weights["model.norm.weight"].data  # type: ignore[attr-defined]
    before = weight.copy()
    weight[:] = np.nan
    try:
        with serving(llama) as running:
            answer = running.post(EMBEDDINGS, input="a")
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_error")
            running.wait(running.is_idle)
    finally:
        weight[:] = before


def test_metrics_count_texts_and_their_tokens(llama: Llama) -> None:
    with serving(llama) as running:
        count = running.post(EMBEDDINGS, input=TEXTS).json()["usage"]["prompt_tokens"]
        told = httpx.get(f"{running.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    assert values['llamarium:prompt_tokens_total{model_name="small"}'] == f"{count:.1f}"
    assert values['llamarium:request_success_total{finished_reason="stop",model_name="small"}'] == f"{len(TEXTS):.1f}"
    assert values['llamarium:e2e_request_latency_seconds_count{model_name="small"}'] == "1.0"
