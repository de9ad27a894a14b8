"""The requests of a server's clients, for whoever holds its key: who runs, which blocks are shared, what comes next."""

import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from llamarium.api import Llama
from llamarium.page.extension import page
from llamarium.page.routes import requests
from llamarium.server.prefix import explainer
from serving import CHAT, HELLO, Running, serving

pytestmark = pytest.mark.torch

KEY = "the-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
LONG = (
    "Once upon a time there was a cat that sat on a mat, and a dog that sat on the cat, and a mouse that saw it. " * 4
)
# A list too long for the answer: drawn tokens cannot end it before it has been looked at.
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "list", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 200}},
}


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, extensions=[page(inspects_requests=True)], api_keys=(KEY,)) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, headers=HEADERS, timeout=30) as found:
        yield found


def streaming(client: httpx.Client, **body: Any) -> AbstractContextManager[httpx.Response]:
    return client.stream("POST", CHAT, json={"max_tokens": 300, "stream": True, "return_token_ids": True, **body})


def about(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def begun(answer: httpx.Response) -> tuple[Iterator[dict[str, Any]], list[int], list[int]]:
    """The chunks to come of a stream that has begun, its prompt's ids and those of its first tokens."""
    assert answer.status_code == 200, answer.read()
    told = chunks(answer.iter_lines())
    prompt_ids, ids = next(told)["prompt_token_ids"], list[int]()
    while len(ids) < 3:
        ids += next(told)["choices"][0].get("token_ids", [])
    return told, prompt_ids, ids


def rest_of(told: Iterator[dict[str, Any]]) -> list[int]:
    return [token_id for chunk in told for token_id in chunk["choices"][0].get("token_ids", [])]


@pytest.mark.usefixtures("slow")
def test_two_clients_with_the_same_beginning_share_its_blocks(client: httpx.Client, running: Running) -> None:
    assert client.get("/inspect/requests").json()["requests"] == []
    with streaming(client, **about(LONG + "Who saw it?")) as first:
        held = begun(first)  # a stream that nobody holds is closed
        with streaming(client, **about(LONG + "Who sat?")) as second:
            also, prompt_ids, _ = begun(second)
            told = client.get("/inspect/requests").json()
            one, two = told["requests"]
            assert (told["num_running"], told["num_waiting"], told["block_size"]) == (2, 0, 32)
            assert one["num_shared"] == two["num_shared"] == two["num_cached"] // 32 >= 2
            assert one["blocks"][0] == two["blocks"][0] and one["blocks"][0]["owners"] == 2
            assert two["num_prompt"] == len(prompt_ids) < two["num_tokens"] <= two["limit"] == len(prompt_ids) + 300
            assert told["num_used_blocks"] == one["num_blocks"] + two["num_blocks"] - one["num_shared"]
            assert (one["stage"], one["adapter"], one["row"]) == ("decode", -1, 0)
            later = client.get("/inspect/requests").json()
            assert later["at_s"] > told["at_s"] and later["generated_tokens"] >= told["generated_tokens"]
        running.wait(lambda: len(client.get("/inspect/requests").json()["requests"]) == 1)
        (left,) = client.get("/inspect/requests").json()["requests"]
        assert (left["number"], left["num_shared"]) == (one["number"], 0)
        assert held and also
        gone = client.get(f"/inspect/requests/{two['number']}.0")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "unknown_request")
    running.wait(running.is_idle)


def test_the_view_says_where_a_prompt_parts_from_the_earlier_one_of_its_own_key_alone(llama: Llama) -> None:
    """The matched tokens, the first that differs, its field and the texts around it: as the header, of this key."""
    with serving(llama, extensions=[page(inspects_requests=True)], api_keys=(KEY, "another")) as running:

        def ask(key: str, day: str) -> str:
            text = f"{LONG}<b>Today</b> is the {day}. What happened?"
            answer = httpx.post(running.url + CHAT, json={**about(text), "max_tokens": 1}, headers=bearer(key))
            return answer.headers["x-llamarium-prefix"]

        def prefixes(key: str) -> list[dict[str, Any]]:
            return httpx.get(running.url + "/inspect/requests", headers=bearer(key)).json()["prefixes"]

        assert prefixes(KEY) == []
        ask(KEY, "third of May")
        ask("another", "fourth of June")
        header = ask(KEY, "fourth of June")
        now, first = prefixes(KEY)
        assert (first["reason"], first["matched_tokens"], first["text"]) == ("first", 0, None)
        start = f"matched={now['matched_tokens']}; of={now['num_tokens']}; reason=changed; field=messages[0].content"
        assert header.startswith(start) and now["first_different_token"] == now["matched_tokens"] > 64
        assert now["field"] == "messages[0].content" and now["number"] > first["number"]
        assert now["text_before"].endswith("<b>Today</b> is the")
        assert now["text"].startswith(" fourth of June. What") and now["earlier_text"].startswith(" third of May. What")
        (others,) = prefixes("another")
        assert (others["reason"], others["matched_tokens"]) == ("first", 0)


def test_the_newest_explanations_alone_are_kept(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explainer, "MAX_SHOWN", 3)
    with serving(llama, extensions=[page(inspects_requests=True)]) as running:
        for number in range(5):
            running.post(**about(f"Number {number}"), max_tokens=1)
        told = httpx.get(running.url + "/inspect/requests").json()["prefixes"]
        numbers = [one["number"] for one in told]
        assert len(numbers) == 3 and numbers == sorted(numbers, reverse=True)
        assert "Number" in told[0]["text_before"] and told[0]["text"].lstrip().startswith("4")


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.3, "seed": 2**62 + 1, "top_k": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.7},
        {"temperature": 0, "logit_bias": {"900": 5.0}},
        {"temperature": 1.5, "response_format": FORM},
    ],
    ids=["sampled", "biased", "held to a form"],
)
def test_an_opened_request_gets_the_token_that_the_engine_gives_it(
    client: httpx.Client, running: Running, slow: threading.Event, asked: dict[str, Any]
) -> None:
    """Of the same ids, parameters, seed and place, as of the moment when it is opened; the client's stream goes on."""
    with streaming(client, **about("Tell me"), **asked) as answer:
        told, prompt_ids, ids = begun(answer)
        (one,) = client.get("/inspect/requests").json()["requests"]
        opened = client.get(f"/inspect/requests/{one['number']}.0", params={"k": 5}).json()
        slow.set()
        ids += rest_of(told)
    place = opened["sampler"]["place"]
    assert [token["id"] for token in opened["run"]["tokens"]] == [*prompt_ids, *ids[:place]]
    assert opened["start"] == len(prompt_ids) and 3 <= place < len(ids)
    assert opened["sampler"]["token_id"] == ids[place]
    assert opened["params"]["temperature"] == asked["temperature"]
    assert opened["params"]["seed"] == str(asked.get("seed", opened["sampler"]["seed"]))
    assert opened["params"]["has_form"] == ("response_format" in asked)
    assert opened["params"]["has_logit_bias"] == ("logit_bias" in asked)
    running.wait(running.is_idle)


@pytest.mark.usefixtures("slow")
def test_the_list_is_bounded_and_takes_nobodys_place(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_REQUESTS", 2)
    with (
        serving(llama, extensions=[page(inspects_requests=True)], max_num_seqs=1, max_queue=2) as running,
        httpx.Client(base_url=running.url, timeout=30) as client,
        streaming(client, **HELLO | {"temperature": 1, "n": 3, "max_tokens": 200}) as answer,
    ):
        held = begun(answer)
        assert held and client.post(CHAT, json=HELLO).status_code == 429
        told = client.get("/inspect/requests").json()
        assert (told["num_running"], told["num_waiting"]) == (1, 2)
        assert [one["stage"] for one in told["requests"]] == ["decode", "waiting"]


def test_without_the_option_nobody_is_shown_anything(llama: Llama) -> None:
    with serving(llama, extensions=[page()], api_keys=(KEY,)) as running:
        for path in ("/inspect/requests", "/inspect/requests/0.0"):
            answer = httpx.get(running.url + path, headers=HEADERS)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "requests_not_inspected")
            assert "--inspect-requests" in answer.json()["error"]["message"]
            assert httpx.get(running.url + path).status_code == 401


@pytest.mark.parametrize("name", ["x", "0", "0.0", "0.x", "-1.0", "9" * 30 + ".0", "%F0%9F.0"])
def test_what_names_no_request_is_not_found(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/inspect/requests/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_request")


@pytest.mark.parametrize(("query", "param"), [("k=0", "k"), ("more=1", "more")])
def test_what_an_opening_does_not_take_is_refused_by_its_field(client: httpx.Client, query: str, param: str) -> None:
    answer = client.get(f"/inspect/requests/0.0?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
