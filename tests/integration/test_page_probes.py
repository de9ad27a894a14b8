"""Questions to a pass, asked over HTTP: the numbers are those of `llama.inspect`."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from llamarium.api import Llama
from llamarium.inspect.probes.rope import rope_pairs, score_by_distance
from llamarium.page import passes as kept_passes
from llamarium.page.extension import page
from llamarium.page.probes import layers
from llamarium.presets import PRESETS
from serving import Running, serving

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"
TOKEN = 900


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, extensions=[page()]) as found:
        yield found


@pytest.fixture(scope="module", params=[kept_passes._AHEAD_BYTES, 0], ids=["kept", "asked for alone"])
def client(request: pytest.FixtureRequest, running: Running) -> Iterator[httpx.Client]:
    """Once with a trace that holds everything, and once with one of what is asked for alone."""
    with pytest.MonkeyPatch.context() as patch, httpx.Client(base_url=running.url, timeout=30) as found:
        patch.setattr(kept_passes, "_AHEAD_BYTES", request.param)
        yield found


@pytest.fixture
def path(client: httpx.Client) -> str:
    answer = client.post("/inspect/passes", json={"text": TEXT})
    assert answer.status_code == 200, answer.text
    return f"/inspect/passes/{answer.json()['id']}"


def ask(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_heads_joined(client: httpx.Client, path: str, llama: Llama) -> None:
    found = llama.inspect.heads(TEXT, 1, positions=[3])
    told = ask(client, f"{path}/heads", layer=1, position=3)
    expected = found.to_dict()
    assert told == {
        "layer": 1,
        "position": 3,
        "norms": expected["norms"][0],
        "shares": expected["shares"][0],
        "rounding": expected["rounding"][0],
    }
    answer = client.get(f"{path}/heads/added", params={"layer": 1, "position": 3})
    assert (answer.headers["x-axes"], answer.headers["x-shape"]) == ("ND", "2,64")
    added_ND = np.frombuffer(answer.content, "<f4").reshape(2, 64)
    assert np.array_equal(added_ND, found.added_TND[0])
    out_D = llama.trace(TEXT)["layers.1.attn_out"][3].numpy()
    assert np.abs(added_ND.sum(0) - out_D).max() < 1e-5


def test_kinds_of_heads(client: httpx.Client, llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three one two three"
    one = client.post("/inspect/passes", json={"text": text}).json()["id"]
    told = ask(client, f"/inspect/passes/{one}/head_kinds")
    expected = llama.inspect.head_kinds(text).to_dict()
    assert told == {**expected, "token_ids": list(expected["token_ids"]), "heads": list(expected["heads"])}
    assert told["num_repeated"] == 2 and len(told["heads"]) == 4  # the first "one" has no space before it
    monkeypatch.setattr(layers, "MAX_KINDS_TOKENS", 5)
    refused = client.get(f"/inspect/passes/{one}/head_kinds")
    assert refused.status_code == 400 and "6 tokens; heads are sorted on 5 at most" in refused.text


def test_neurons(client: httpx.Client, path: str, llama: Llama) -> None:
    expected = llama.inspect.neurons(TEXT, 0, position=4, k=7).to_dict()
    told = ask(client, f"{path}/neurons", layer=0, position=4, k=7)
    assert told["neurons"] == [{**one, "by_token": list(one["by_token"])} for one in expected["neurons"]]
    for stride in (2, 3):  # 4 is a token of the one, and none of the other
        told = ask(client, f"{path}/neurons", layer=0, position=4, k=7, stride=stride)
        assert told["positions"][: -(-len(told["token_ids"]) // stride)] == list(
            range(0, len(told["token_ids"]), stride)
        )
        assert told["neurons"] == [
            {**one, "by_token": [one["by_token"][at] for at in told["positions"]]} for one in expected["neurons"]
        ]
    assert (told["layer"], told["position"]) == (0, 4)


@pytest.mark.parametrize("against_id", [None, 901])
def test_who_wrote_a_logit(client: httpx.Client, path: str, llama: Llama, against_id: int | None) -> None:
    expected = llama.inspect.attribution(TEXT, TOKEN, against=against_id, position=2).to_dict()
    query = {} if against_id is None else {"against_id": against_id}
    told = ask(client, f"{path}/attribution", token_id=TOKEN, position=2, **query)
    assert told == {name: list(x) if isinstance(x, tuple) else x for name, x in expected.items()}
    logits = llama.trace(TEXT)["logits"][2]
    assert told["logit"] == pytest.approx(float(logits[TOKEN] - (0 if against_id is None else logits[against_id])))
    assert sum(one["logit"] for one in told["additions"]) == pytest.approx(told["logit"], abs=1e-3)


def test_the_lens(client: httpx.Client, path: str, llama: Llama) -> None:
    expected = llama.inspect.lens(TEXT, TOKEN, k=3, positions=[5]).to_dict()
    told = ask(client, f"{path}/lens", token_id=TOKEN, k=3)
    assert (told["positions"], told["chosen_id"]) == ([5], TOKEN)
    assert told == expected
    assert ask(client, f"{path}/lens", position=0)["layers"][0]["chosen"] == []


def test_a_long_text_is_asked_about_at_its_end(client: httpx.Client, llama: Llama) -> None:
    """Its trace is run in batches, and the first of them holds no token that is asked about."""
    ids = [number % 1000 for number in range(400)]
    one = client.post("/inspect/passes", json={"ids": ids}).json()
    told = ask(client, f"/inspect/passes/{one['id']}/attribution", token_id=TOKEN, position=399)
    assert told["logit"] == float(llama.trace(ids, names=["logits"])["logits"][399, TOKEN])
    best = ask(client, f"/inspect/passes/{one['id']}/lens", k=1)["layers"][-1]["candidates"][0][0]
    assert best["token_id"] == llama.inspect.lens(ids, k=1).layers[-1].candidates[399][0].token_id


@pytest.mark.parametrize("shape", [None, "llama-3.2-1b"])
def test_pairs_are_the_librarys(client: httpx.Client, llama: Llama, shape: str | None) -> None:
    config = llama.config if shape is None else PRESETS[shape]
    told = ask(client, "/inspect/rope", position=100, **({} if shape is None else {"shape": shape}))
    assert told["pairs"] == [pair.to_dict() for pair in rope_pairs(config, 100)]
    assert (told["context"], told["is_scaled"]) == (config.max_position_embeddings, shape is not None)


def test_scores_by_distance(client: httpx.Client, path: str, llama: Llama) -> None:
    trace = llama.trace(TEXT)
    told = ask(client, f"{path}/distances", layer=1, head=1, position=4, key=2, stop=100, stride=9)
    assert told["distances"] == list(range(0, 100, 9))
    q_H, k_H = trace["layers.1.q"][4, 1], trace["layers.1.k"][2, 0]
    assert told["scores"] == score_by_distance(llama.config, q_H, k_H, told["distances"])
    at_two = ask(client, f"{path}/distances", layer=1, head=1, position=4, key=2, stop=3)["scores"][2]
    assert at_two == pytest.approx(float(trace["layers.1.scores"][1, 4, 2]), abs=1e-4)


def test_a_word_is_the_token_with_a_space_before_it(client: httpx.Client, llama: Llama) -> None:
    token_id = llama.tokenizer.encode(" mat", add_special_tokens=False)[0]
    told = client.post("/inspect/word", json={"word": "mat"}).json()
    assert (told["id"], told["text"]) == (token_id, llama.tokenizer.token_text(token_id))
    assert client.post("/inspect/word", json={"word": token_id}).json() == told
    for word in ("antidisestablishment", 49152, -1):
        refused = client.post("/inspect/word", json={"word": word})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "word"), word


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ("heads", "layer"),
        ("heads?layer=2", "layer"),
        ("heads?layer=0&position=6", "position"),
        ("heads/added?layer=2", "layer"),
        ("neurons?layer=2", "layer"),
        ("neurons?layer=0&k=97", "k"),
        ("neurons?layer=0&k=101", "k"),
        ("neurons?layer=0&stride=0", "stride"),
        ("attribution", "token_id"),
        ("attribution?token_id=49152", "token_id"),
        ("attribution?token_id=1&against_id=49152", "against_id"),
        ("attribution?token_id=1&position=6", "position"),
        ("lens?k=0", "k"),
        ("lens?token_id=49152", "token_id"),
        ("lens?position=6", "position"),
        ("lens?layer=1", "layer"),
        ("distances?layer=0&head=2", "head"),
        ("distances?layer=2&head=0", "layer"),
        ("distances?layer=0&head=0&key=6", "key"),
        ("distances?layer=0&head=0&stop=0", "stop"),
        ("distances?layer=0&head=0&stop=100000", "stride"),
        ("distances?layer=0&head=0&stop=10000&stride=10", "stop"),
    ],
)
def test_what_there_is_not_is_refused_by_its_field(client: httpx.Client, path: str, asked: str, param: str) -> None:
    answer = client.get(f"{path}/{asked}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_linear_probes_and_surprise_after_an_error(running: Running, llama: Llama) -> None:
    with httpx.Client(base_url=running.url, timeout=30) as client:
        told = ask(client, "/inspect/linear_probe", task="part of speech")
        assert told == llama.inspect.probe("part of speech").to_dict()
        assert ask(client, "/inspect/after_error", kind="random") == (
            llama.inspect.surprise_after_error(kind="random").to_dict()
        )
        for path, param in (
            ("linear_probe", "task"),
            ("linear_probe?task=tense", "task"),
            ("after_error?kind=x", "kind"),
        ):
            answer = client.get(f"/inspect/{path}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_position_outside_of_the_context_is_refused(client: httpx.Client) -> None:
    for query in ({"position": 512}, {"position": 131072, "shape": "llama-3.2-1b"}):
        answer = client.get("/inspect/rope", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "position"), answer.text
