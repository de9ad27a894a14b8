"""What the page's questions may take and find: odd models, large numbers, other caches, clients who leave."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import llamarium
from llamarium.api import Llama
from llamarium.errors import InputError
from llamarium.page.extension import page
from serving import serving, small_llama, small_model

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"
LONG = list(range(100, 124))
ZERO = 7  # the row of the odd model that nothing has trained


@pytest.fixture(scope="module")
def odd(smollm2_path: Path) -> Llama:
    """Widths that no block of 32 divides, a row of zeros, bfloat16: the modules run it."""
    model = small_model(hidden_size=40).to(torch.bfloat16)
    model.model.embed_tokens.get_parameter("weight")[ZERO] = 0
    return Llama("odd", model, llamarium.load_tokenizer(smollm2_path))


@pytest.fixture(scope="module")
def odd_client(odd: Llama) -> Iterator[httpx.Client]:
    with serving(odd, extensions=[page()], max_context=64) as running, httpx.Client(base_url=running.url) as found:
        yield found


def named(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/inspect/passes", json=body or {"text": TEXT})
    assert answer.status_code == 200, answer.text
    return f"/inspect/passes/{answer.json()['id']}"


def ask(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def numbers(told: Any) -> Iterator[Any]:
    if isinstance(told, dict):
        told = list(told.values())
    if isinstance(told, list):
        for one in told:
            yield from numbers(one)
    else:
        yield told


def test_a_stream_of_zeros_has_no_error(odd_client: httpx.Client) -> None:
    path = named(odd_client, ids=[ZERO])
    runs = ask(odd_client, f"{path}/errors", quantize="NF4")["runs"]
    assert [set(layer["relative"]) for layer in runs[0]["layers"]] == [{0.0}, {0.0}]
    assert None not in list(numbers(runs))


def test_rounded_inputs_are_left_out_where_the_kernels_round_none(odd_client: httpx.Client) -> None:
    told = ask(odd_client, f"{named(odd_client)}/errors", quantize="NF4")
    assert [one["what"] for one in told["runs"]] == ["pass", "weights"]


def test_types_that_do_not_fit_are_no_sides(odd_client: httpx.Client) -> None:
    sides = [one["id"] for one in ask(odd_client, "/inspect/compare")["sides"]]
    assert "Q4_1" not in sides and "float32" in sides
    ask(odd_client, f"{named(odd_client)}/compare", side="float32", against="model")


def test_a_token_of_a_model_that_rounds_is_drawn_as_its_answer_draws_it(odd_client: httpx.Client, odd: Llama) -> None:
    """PyTorch rounds a batch of tokens differently from single ones: the answer is made again token by token."""
    steps = odd.inspect.sampler_steps(LONG[:2], answer_ids=LONG[2:], temperature=1.0, seed=3)
    answer = odd_client.post(f"{named(odd_client, ids=LONG)}/sampler", json={"start": 2, "temperature": 1.0, "seed": 3})
    assert answer.status_code == 200, answer.text
    told = answer.json()["steps"][0]["candidates"]
    assert [one["logit"] for one in told] == [one.logit for one in steps.steps[0].candidates]


def test_a_model_whose_numbers_are_none_is_told_as_such(smollm2_path: Path) -> None:
    """No number of an answer is left out silently."""
    llama = small_llama(smollm2_path)
    llama.model.model.layers[1].mlp.down_proj.get_parameter("weight").fill_(float("nan"))
    with serving(llama, extensions=[page()]) as running, httpx.Client(base_url=running.url) as client:
        for route in ("lens", "attribution?token_id=1", "next", "score", "heads?layer=1"):
            answer = client.get(f"{named(client)}/{route}")
            finite = route.startswith("heads")  # attention comes before what is broken
            assert answer.status_code == (200 if finite else 500), (route, answer.text)
            assert finite or answer.json()["error"]["code"] == "model_error"


def test_ids_are_bound_by_what_a_request_may_have(odd_client: httpx.Client) -> None:
    status, param, message = refusal(odd_client.post("/inspect/passes", json={"ids": [1] * 65}))
    assert (status, param) == (400, "ids") and "65" in message and "64" in message


def test_words_are_bound(odd_client: httpx.Client) -> None:
    body = {"word": 1, "minus": [2] * 33}
    assert refusal(odd_client.post("/inspect/neighbors", json=body))[:2] == (400, "minus")


@pytest.mark.parametrize("number", [2**31, 2**63, 10**30])
def test_no_number_of_a_query_is_too_large_to_be_refused(odd_client: httpx.Client, number: int) -> None:
    """Each whole number that a question takes, asked for far beyond any model's sizes."""
    path, asked = named(odd_client), 0
    for route, methods in odd_client.get("/openapi.json").json()["paths"].items():
        found = methods.get("get", {}).get("parameters", ())
        fields = [one["name"] for one in found if one["in"] == "query" and "integer" in str(one["schema"])]
        for field in fields if route.startswith("/inspect") else ():
            query = {one["name"]: 0 for one in found if one.get("required") and one["in"] == "query"}
            url = route.replace("/inspect/passes/{pass_id}", path).replace("{name}", "q")
            answer = odd_client.get(url, params={**query, field: number})
            assert 400 <= answer.status_code < 500, (route, field, answer.text)
            asked += 1
    assert asked > 30


def test_what_is_sampled_is_the_engines_own_cache(smollm2_path: Path) -> None:
    """With keys and values in 8 bits the page shows the pass that answers, and says so."""
    llama = small_llama(smollm2_path)
    with (
        serving(llama, engine={"kv_cache_dtype": "int8"}, extensions=[page()]) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        made = client.post("/inspect/passes", json={"text": TEXT}).json()
        assert (made["kv_dtype"], made["dtype"]) == ("int8", "float32")
        body = {"model": "small", "prompt": TEXT, "max_tokens": 1, "logprobs": 1, "temperature": 0}
        answered = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
        (best,) = ask(client, f"/inspect/passes/{made['id']}/next", k=1)["candidates"]
        assert best["logprob"] == pytest.approx(answered[0], abs=1e-6)
        other = llama.inspect.sampler_steps(TEXT, temperature=0.0).steps[0].candidates[0].logit
        assert best["logit"] != other, "8 bits differ"
        cost = ask(client, f"/inspect/passes/{made['id']}/cost")["cache_bytes_per_token"]
        assert cost < 2 * 2 * 32 * 4, "less than two layers' keys and values in float32"


def test_ids_are_words_where_there_is_no_tokenizer(odd: Llama) -> None:
    bare = Llama("bare", odd.model, None)
    assert bare.inspect.attribution([1, 2, 3], 5).target_id == 5
    with pytest.raises(InputError, match="within 0"):
        bare.inspect.attribution([1, 2, 3], odd.config.vocab_size)


def test_a_variant_says_its_own_config(odd: Llama) -> None:
    assert not odd.inspect.variant("random-head").config.tie_word_embeddings


def test_who_leaves_ends_what_waits(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that wait for another one's end are not begun when nobody wants their answers any more."""
    began, goes_on, ran = threading.Event(), threading.Event(), list[str]()

    def slow(*_: Any, **__: Any) -> Any:
        ran.append("errors")
        began.set()
        assert goes_on.wait(20)
        raise InputError("enough")

    monkeypatch.setattr("llamarium.page.probes.weights.streams_as", slow)
    with serving(small_llama(smollm2_path), extensions=[page()]) as running:
        with httpx.Client(base_url=running.url) as client:
            path = named(client)
        asking = [running.begin(f"{path}/errors") for _ in range(3)]
        assert began.wait(20)
        running.wait(lambda: running.service.in_flight == 3)
        for one in asking:
            one.close()
        running.wait(lambda: not running.server.server_state.tasks)
        assert httpx.get(f"{running.url}/health").status_code == 200  # the server's loop has seen them leave
        goes_on.set()
        running.wait(lambda: running.service.in_flight == 0)
    assert ran == ["errors"]
