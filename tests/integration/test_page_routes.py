"""What the page asks of a server: behind its key, with the library's own numbers, beside other clients."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import llamarium
from llamarium.api import Llama
from llamarium.page import assets
from llamarium.page.extension import page
from llamarium.presets import PRESETS
from serving import CHAT, HELLO, Running, serving

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"
KEY = "the-key"


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, extensions=[page()], api_keys=(KEY,)) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as found:
        yield found


def new_pass(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/inspect/passes", json=body or {"text": TEXT})
    assert answer.status_code == 200, answer.text
    return answer.json()


def error_of(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def inspect_routes(client: httpx.Client) -> list[tuple[str, str]]:
    told = client.get("/openapi.json").json()["paths"]
    found = [(method.upper(), path) for path, methods in told.items() for method in methods]
    return [(method, path) for method, path in found if path.startswith("/inspect")]


def test_every_route_wants_the_key_and_one_of_the_servers_names(client: httpx.Client, running: Running) -> None:
    routes = inspect_routes(client)
    assert len(routes) >= 10
    for method, path in routes:
        assert httpx.request(method, running.url + path).status_code == 401, path
        assert client.request(method, path, headers={"host": "evil.example"}).status_code == 403
        assert client.request(method, path, headers={"origin": "http://evil.example"}).status_code == 403


def test_the_model_is_the_one_that_answers(client: httpx.Client, llama: Llama) -> None:
    told = client.get("/inspect/model").json()
    assert (told["name"], told["runner"]) == ("small", llama.runner.name)
    assert told["shape"] == {"D": 64, "N": 2, "K": 1, "H": 32, "F": 96, "V": 49152, "L": 2}
    modules = {node["path"]: node for node in walk(told["tree"])}
    for key, parameter in llama.model.named_parameters():
        node = modules[key.removesuffix(".weight")]
        assert (node["shape"], node["parameters"]) == (list(parameter.shape), parameter.numel())
    kinds = {name: type(module).__name__ for name, module in llama.model.named_modules()}
    assert all(kinds[path] == node["kind"] for path, node in modules.items())
    assert told["tree"]["parameters"] == sum(p.numel() for p in llama.model.parameters())
    assert modules["lm_head"]["tied_to"] == "model.embed_tokens.weight"


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node["children"]:
        yield from walk(child)


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3.2-1b", 1235814400), ("llama-3.2-3b", 3212749824), ("llama-3.1-8b", 8030261248)]
)
def test_published_shapes_have_their_published_sizes(client: httpx.Client, name: str, parameters: int) -> None:
    told = client.get("/inspect/model", params={"shape": name}).json()
    assert told["tree"]["parameters"] == parameters
    assert told["num_bytes"] == told["tree"]["num_bytes"] == 2 * parameters
    assert (told["runner"], told["context"]) == (None, PRESETS[name].max_position_embeddings)
    assert told["tree"]["flops"] > told["attention_flops_per_position"] > 0


@pytest.mark.parametrize("text", [TEXT, "naïve 🙂 שלום", "a\u200bb\n\ttab", ""])
def test_a_text_is_followed_to_its_ids(client: httpx.Client, llama: Llama, text: str) -> None:
    told = client.post("/inspect/tokens", json={"text": text}).json()
    assert [token["id"] for token in told["tokens"]] == llama.tokenizer.encode(text)
    assert bytes(told["utf8"]).decode() == text
    assert "".join(piece["text"] for piece in told["pieces"]) == text
    assert told["pieces"] == llama.tokenizer.explain(text).to_dict()["pieces"]
    assert told["unexplained"] is None


def test_llama_3s_tokenizer_stands_beside(client: httpx.Client, llama3_tokenizer_path: Path) -> None:
    told = client.post("/inspect/tokens", json={"text": TEXT, "tokenizer": "llama3"}).json()
    assert [token["id"] for token in told["tokens"]] == llamarium.load_tokenizer(llama3_tokenizer_path).encode(TEXT)
    assert told["tokens"][0]["is_special"]
    without = {"text": TEXT, "tokenizer": "llama3", "add_special_tokens": False}
    assert client.post("/inspect/tokens", json=without).json()["tokens"] == told["tokens"][1:]


def test_a_pass_is_the_same_however_it_is_asked_for(client: httpx.Client, llama: Llama) -> None:
    by_text = new_pass(client)
    ids = [token["id"] for token in by_text["tokens"]]
    assert ids == llama.tokenizer.encode(TEXT)
    assert new_pass(client, ids=ids) == by_text
    dialog = new_pass(client, messages=HELLO["messages"])
    assert [token["id"] for token in dialog["tokens"]] == llama.tokenizer.chat(HELLO["messages"])
    assert dialog["tokens"][0]["is_special"]


def test_an_experiment_is_another_pass_and_nothing_otherwise_is_the_same(client: httpx.Client, llama: Llama) -> None:
    plain = new_pass(client)
    assert new_pass(client, text=TEXT, experiment={"bidirectional": False, "rotation": True}) == plain
    other = new_pass(client, text=TEXT, experiment={"bidirectional": True})
    assert other["id"] != plain["id"]
    assert other["experiment"] == {"bidirectional": True, "hidden": [], "rotation": True, "rope_scaling": "model"}
    assert other["runner"].startswith("PyTorch")
    answer = client.get(f"/inspect/passes/{other['id']}/activations/pattern", params={"layer": 0, "head": 1})
    pattern = np.frombuffer(answer.content, "<f4").reshape(6, 6)
    assert (pattern > 0).all()
    assert client.post("/inspect/passes", json={"ids": [token["id"] for token in plain["tokens"]]}).json() == plain
    assert client.post(CHAT, json=HELLO).status_code == 200, "the engine goes on"


def test_numbers_equal_the_traces_to_the_bit(client: httpx.Client, llama: Llama) -> None:
    path = f"/inspect/passes/{new_pass(client)['id']}"
    trace = llama.trace(TEXT)
    for name, layer in (("embed", None), ("q", 1), ("k_rot", 0), ("pattern", 1), ("scores", 0), ("logits", None)):
        key = name if layer is None else f"layers.{layer}.{name}"
        query = {} if layer is None else {"layer": layer}
        answer = client.get(f"{path}/activations/{name}", params=query)
        shape = [int(size) for size in answer.headers["x-shape"].split(",")]
        assert np.array_equal(np.frombuffer(answer.content, "<f4").reshape(shape), trace[key].numpy())
    for name, axis in (("q", 0), ("pattern", 1)):
        answer = client.get(f"{path}/activations/{name}", params={"layer": 1, "start": 1, "stop": 6, "stride": 2})
        shape = [int(size) for size in answer.headers["x-shape"].split(",")]
        expected = np.take(trace[f"layers.1.{name}"].numpy(), [1, 3, 5], axis)
        if name == "pattern":
            expected = expected[..., ::2]  # of the axis S every so many, from the first on
        assert np.array_equal(np.frombuffer(answer.content, "<f4").reshape(shape), expected)
    told = client.get(f"{path}/next", params={"k": 5}).json()
    logits, logprobs = trace["logits"][-1], trace["logits"][-1].log_softmax(-1)
    assert [one["token_id"] for one in told["candidates"]] == logits.topk(5).indices.tolist()
    for one in told["candidates"]:
        assert one["logit"] == float(logits[one["token_id"]])
        assert one["logprob"] == pytest.approx(float(logprobs[one["token_id"]]), abs=1e-5)  # a sum in another order
        assert one["text"] == llama.tokenizer.token_text(one["token_id"])


def test_rows_and_norms_are_the_models(client: httpx.Client, llama: Llama) -> None:
    answer = client.get("/inspect/rows", params={"ids": "5,900,5"})
    table = llama.model.model.embed_tokens.weight.float().numpy()
    assert answer.headers["x-axes"] == "RD"
    assert np.array_equal(np.frombuffer(answer.content, "<f4").reshape(3, 64), table[[5, 900, 5]])
    key = "model.layers.1.post_attention_layernorm.weight"
    gamma = np.frombuffer(client.get("/inspect/weights", params={"key": key}).content, "<f4")
    assert np.array_equal(gamma, llama.model.get_parameter(key).float().numpy())


def test_words_have_the_librarys_neighbours(client: httpx.Client, llama: Llama) -> None:
    asked = {"word": "king", "minus": ["man"], "plus": ["woman"], "k": 4}
    expected = llama.neighbors("king", minus="man", plus="woman", k=4)
    assert client.post("/inspect/neighbors", json=asked).json()["neighbors"] == list(expected.to_dict()["neighbors"])
    token_id = expected.query[0].token_id
    by_id = client.post("/inspect/neighbors", json={"word": token_id, "k": 3}).json()
    assert by_id["query"][0]["token_id"] == token_id
    assert token_id not in [one["token_id"] for one in by_id["neighbors"]]
    pair = client.post("/inspect/similarity", json={"word": "king", "other": "king"}).json()
    assert pair["cosine"] == pytest.approx(1, abs=1e-6)


def test_the_lines_are_those_that_are_installed(client: httpx.Client) -> None:
    told = client.get("/inspect/source", params={"name": "norm"}).json()
    lines = (Path(llamarium.__file__).parent / "model/norm.py").read_text().splitlines()
    assert told["file"] == "llamarium/model/norm.py"
    assert lines[told["line"] - 1] == told["text"].splitlines()[0] == "class LlamaRMSNorm(nn.Module):"


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/inspect/model?shape=gpt-2", None, (400, "invalid_parameter", "shape")),
        ("GET", "/inspect/model?form=x", None, (400, "unknown_parameter", "form")),
        ("GET", "/inspect/source", None, (400, "missing_parameter", "name")),
        ("GET", "/inspect/source?name=../../etc/passwd", None, (404, "unknown_source", "name")),
        ("GET", "/inspect/weights?key=model.embed_tokens.weight", None, (404, "unknown_weight", "key")),
        ("GET", "/inspect/rows?ids=1,x", None, (400, "invalid_parameter", "ids")),
        ("GET", "/inspect/rows?ids=49152", None, (400, "invalid_parameter", "ids")),
        ("GET", "/inspect/passes/nope/next", None, (404, "unknown_pass", "id")),
        ("GET", "/inspect/passes/nope/activations/q", None, (404, "unknown_pass", "id")),
        ("POST", "/inspect/tokens", {"text": 5}, (400, "invalid_parameter", "text")),
        ("POST", "/inspect/tokens", {"text": "a", "tokenizer": "gpt2"}, (400, "invalid_parameter", "tokenizer")),
        ("POST", "/inspect/tokens", {"text": "a " * 40000}, (400, "context_length_exceeded", "text")),
        ("POST", "/inspect/passes", {}, (400, None, "text")),
        ("POST", "/inspect/passes", {"text": "a", "ids": [1]}, (400, None, "text")),
        ("POST", "/inspect/passes", {"text": ""}, (400, None, "text")),
        ("POST", "/inspect/passes", {"text": "a", "experiment": "x"}, (400, "invalid_parameter", "experiment")),
        ("POST", "/inspect/passes", {"text": "a", "experiment": {"x": 1}}, (400, "unknown_parameter", "experiment.x")),
        (
            "POST",
            "/inspect/passes",
            {"text": "a", "experiment": {"hidden": [0, 9]}},
            (400, "invalid_parameter", "experiment.hidden[1]"),
        ),
        (
            "POST",
            "/inspect/passes",
            {"text": "a", "experiment": {"rotation": False, "rope_scaling": "off"}},
            (400, None, "experiment.rope_scaling"),
        ),
        ("POST", "/inspect/passes", {"text": "a", "adapter": "x"}, (404, "unknown_adapter", "adapter")),
        ("POST", "/inspect/passes", {"ids": []}, (400, "invalid_parameter", "ids")),
        ("POST", "/inspect/passes", {"ids": [49152]}, (400, None, "ids")),
        ("POST", "/inspect/passes", {"ids": [-1]}, (400, None, "ids")),
        ("POST", "/inspect/passes", {"ids": [1] * 513}, (400, "context_length_exceeded", "ids")),
        ("POST", "/inspect/passes", {"ids": [1], "add_special_tokens": True}, (400, None, "add_special_tokens")),
        ("POST", "/inspect/neighbors", {"word": "antidisestablishment"}, (400, None, "word")),
        ("POST", "/inspect/neighbors", {"word": -1}, (400, None, "word")),
        ("POST", "/inspect/neighbors", {"word": "king", "k": 0}, (400, "invalid_parameter", "k")),
        ("POST", "/inspect/similarity", {"word": "king"}, (400, "missing_parameter", "other")),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(
    client: httpx.Client, method: str, path: str, body: Any, expected: tuple[int, str | None, str]
) -> None:
    assert error_of(client.request(method, path, json=body)) == expected


def test_a_word_of_many_tokens_is_not_repeated_whole(client: httpx.Client) -> None:
    for path, more in (("neighbors", {}), ("similarity", {"other": "king"})):
        answer = client.post(f"/inspect/{path}", json={"word": "king queen " * 300, **more})
        assert answer.status_code == 400 and len(answer.text) < 600


def test_a_query_is_checked(client: httpx.Client) -> None:
    path = f"/inspect/passes/{new_pass(client)['id']}"
    for query, param in (
        ("activations/q?layer=x", "layer"),
        ("activations/q?layer=-1", "layer"),
        ("activations/q?stride=0", "stride"),
        ("activations/q?start=6", "start"),
        ("activations/q?start=2&stop=2", "stop"),
        ("activations/q?stop=7", "stop"),
        ("activations/q?start=0&position=1", "start"),
        ("activations/k_rot?stop=2", "stop"),
        ("activations/q?dtype=float64", "dtype"),
        ("activations/q?layers=1", "layers"),
        ("next?position=6", "position"),
        ("next?k=0", "k"),
    ):
        status, _, named = error_of(client.get(f"{path}/{query}"))
        assert (status, named) == (400, param), query


def test_a_stream_goes_on_beside_traces_with_the_same_tokens(client: httpx.Client) -> None:
    """Another client's answer is the one that it is alone, while long texts are traced."""
    asked = {**HELLO, "max_tokens": 200, "logprobs": True}
    alone = client.post(CHAT, json=asked).json()["choices"][0]
    found, has_traced = list[Any](), threading.Event()

    def answer() -> None:
        while not found or not has_traced.is_set():
            found.append(client.post(CHAT, json=asked).json()["choices"][0])

    stream = threading.Thread(target=answer)
    stream.start()
    try:
        for first in range(4):
            one = new_pass(client, ids=[first, *range(400)])
            traced = client.get(f"/inspect/passes/{one['id']}/activations/resid", params={"layer": 1, "dtype": "uint8"})
            assert traced.status_code == 200
    finally:
        has_traced.set()
        stream.join()
    assert found and all(one == alone for one in found)


def test_the_files_are_open_and_closed_to_everything_else(
    llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "assets/index-abc.js").write_text("export {}")
    (tmp_path / "secret.txt").write_text("x")
    monkeypatch.setattr(assets.read_assets, "__defaults__", (tmp_path,))
    with serving(llama, extensions=[page()], api_keys=(KEY,)) as running:
        index, script = (httpx.get(running.url + path) for path in ("/", "/assets/index-abc.js"))
        assert (index.status_code, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert "immutable" in script.headers["cache-control"] and index.headers["cache-control"] == "no-cache"
        for answer in (index, script):
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
        plain = httpx.get(running.url, headers={"accept-encoding": "br, gzip;q=0"})
        assert (index.headers["content-encoding"], "content-encoding" in plain.headers) == ("gzip", False)
        assert index.text == plain.text == "<!doctype html>"
        assert index.headers["vary"] == plain.headers["vary"] == "accept-encoding"
        for path in ("/secret.txt", "/assets/../secret.txt", "/index.html", "/assets/", "/inspect/model"):
            assert httpx.get(running.url + path).status_code == 401, path


def test_every_answer_names_the_process_that_gave_it(llama: Llama, client: httpx.Client) -> None:
    told = [client.get("/inspect/model"), client.get("/inspect/passes/none/next"), client.get("/props")]
    names = {answer.headers["x-llamarium-instance"] for answer in told}
    assert len(names) == 1
    with serving(llama, extensions=[page()]) as other:
        assert httpx.get(f"{other.url}/inspect/model").headers["x-llamarium-instance"] not in names


def test_without_a_page_the_server_says_what_to_do(
    llama: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets.read_assets, "__defaults__", (tmp_path,))
    with serving(llama, extensions=[page()], api_keys=(KEY,)) as running:
        answer = httpx.get(running.url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "page_not_built")
        assert "make page" in answer.json()["error"]["message"]
