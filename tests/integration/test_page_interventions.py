"""What if something in a pass were another, asked over HTTP: the numbers are those of `llama.inspect`."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from llamarium.api import Llama
from llamarium.inspect.interventions.edits import scale
from llamarium.inspect.interventions.patching import PatchGrid
from llamarium.inspect.probes import picture
from llamarium.page.extension import page
from llamarium.server.lifecycle.threads import are_at_work
from serving import CHAT, HELLO, Running, serving

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"
OTHER = "The dog sat on the mat"
TOKEN, AGAINST = 900, 901


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, extensions=[page()], max_num_seqs=1, max_queue=1) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=30) as found:
        yield found


@pytest.fixture
def path(client: httpx.Client) -> str:
    return f"/inspect/passes/{client.post('/inspect/passes', json={'text': TEXT}).json()['id']}"


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


EDITS: list[tuple[str, dict[str, Any], float]] = [
    ("head", {"layer": 1, "head": 1}, 0.0),
    ("mlp", {"layer": 0, "positions": [2, 3]}, 0.5),
    ("attention", {"layer": 0}, -1.0),
    ("residual", {"layer": 0, "positions": [5]}, 2.0),
    ("embed", {}, 1.5),
]


@pytest.mark.parametrize("edits", [[], *([edit] for edit in EDITS), EDITS[:3]])
def test_edits_change_what_the_library_says_they_do(
    client: httpx.Client, path: str, llama: Llama, edits: list[tuple[str, dict[str, Any], float]]
) -> None:
    body = {"edits": [{"part": part, "factor": factor, **where} for part, where, factor in edits]}
    told = client.post(f"{path}/edited", json={**body, "token_id": TOKEN, "k": 4, "max_tokens": 3}).json()
    made = [scale(part, factor, **where) for part, where, factor in edits]  # pyright: ignore[reportArgumentType]
    found = llama.inspect.effect(TEXT, *made, word=TOKEN, k=4).to_dict()
    assert told["tokens"] == list(found["tokens"])
    assert (told["position"], told["divergence"]) == (5, found["divergence"])
    assert (told["divergence"] == 0) == (not edits)
    assert TOKEN in [one["token_id"] for one in told["tokens"]]
    with llama.inspect.edited() as plain, llama.inspect.edited(*made) as other:
        for name, one in (("before", plain), ("after", other)):
            answer = one.generate(TEXT, max_tokens=3, temperature=0.0).completions[0].token_ids
            assert [token["id"] for token in told[f"answer_{name}"]] == list(answer)
    assert told["runner"].startswith("PyTorch")


def test_edits_at_an_earlier_token(client: httpx.Client, path: str, llama: Llama) -> None:
    told = client.post(f"{path}/edited", json={"edits": [{"part": "mlp", "layer": 1}], "position": 2}).json()
    found = llama.inspect.effect(TEXT, scale("mlp", 0.0, layer=1), position=2).to_dict()
    assert (told["position"], told["tokens"]) == (2, list(found["tokens"]))


def test_steering_is_the_librarys(client: httpx.Client, path: str, llama: Llama) -> None:
    steering = {"toward": "I love this", "away": "I hate it", "layer": 0, "strength": -1.5, "positions": [1, 5]}
    told = client.post(f"{path}/edited", json={"steering": steering, "max_tokens": 4}).json()
    edit = llama.inspect.steer("I love this", "I hate it", 0, scale=-1.5, positions=[1, 5])
    found = llama.inspect.effect(TEXT, edit)
    assert told["tokens"] == list(found.to_dict()["tokens"])
    assert told["divergence"] == found.divergence > 0
    with llama.inspect.edited(edit) as other:
        answer = other.generate(TEXT, max_tokens=4, temperature=0.0).completions[0]
    assert [token["id"] for token in told["answer_after"]] == list(answer.token_ids)


@pytest.mark.parametrize("part", ["residual", "attention", "mlp"])
def test_a_grid_comes_row_by_row_and_is_the_librarys(client: httpx.Client, path: str, llama: Llama, part: Any) -> None:
    body = {"source_ids": llama.encode(OTHER), "token_id": TOKEN, "against_id": AGAINST, "part": part}
    with client.stream("POST", f"{path}/patches", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        begin, *rows, end = events(answer.iter_lines())
    grid = llama.inspect.patch_grid(TEXT, OTHER, TOKEN, against=AGAINST, part=part)
    expected = [cell.to_dict() for cell in grid.cells()]
    assert [
        {**cell, "done": i + 1, "total": 12} for i, cell in enumerate(c for row in rows for c in row["cells"])
    ] == expected
    assert (begin["base"]["logit"], begin["source"]["logit"]) == (grid.base.logit, grid.source.logit)
    assert (begin["layers"], begin["positions"], begin["total"]) == ([0, 1], list(range(6)), 12)
    assert [row["done"] for row in rows] == [6, 12]
    assert end == {"type": "end"}


def test_a_part_of_a_grid(client: httpx.Client, path: str, llama: Llama) -> None:
    body = {"source_ids": llama.encode(OTHER), "token_id": TOKEN, "layers": [1], "positions": [4, 1]}
    with client.stream("POST", f"{path}/patches", json=body) as answer:
        _, row, _ = events(answer.iter_lines())
    grid = llama.inspect.patch_grid(TEXT, OTHER, TOKEN, layers=[1], positions=[4, 1])
    assert [(cell["position"], cell["logit"]) for cell in row["cells"]] == [(c.position, c.logit) for c in grid.cells()]


def test_who_leaves_a_grid_ends_it_at_the_next_row(
    running: Running, client: httpx.Client, path: str, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its place until what it computes has ended; others are answered meanwhile."""
    began, goes_on, ran = threading.Event(), threading.Event(), list[int]()
    run = PatchGrid._run

    def slow(self: PatchGrid, layer: int, positions: Any) -> Any:
        ran.append(layer)
        began.set()
        assert goes_on.wait(20)
        return run(self, layer, positions)

    monkeypatch.setattr(PatchGrid, "_run", slow)
    body = {"source_ids": llama.encode(OTHER), "token_id": TOKEN}
    with client.stream("POST", f"{path}/patches", json=body) as answer:
        told = events(answer.iter_lines())  # kept: what is dropped closes the connection
        assert next(told)["type"] == "begin"
        assert began.wait(20)
        assert running.service.in_flight == 1
        assert running.post(CHAT, **HELLO).status_code == 200
    running.wait(lambda: not running.server.server_state.tasks)
    assert httpx.get(f"{running.url}/health").status_code == 200  # the server's loop has seen it leave
    assert running.service.in_flight == 1
    goes_on.set()
    running.wait(lambda: running.service.in_flight == 0)
    running.wait(lambda: not are_at_work())
    assert ran == [0]


def test_a_grid_of_a_server_that_stops_ends_with_an_error(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def slow(self: PatchGrid, layer: int, positions: Any) -> Any:
        began.set()
        goes_on.wait(20)
        return []

    monkeypatch.setattr(PatchGrid, "_run", slow)
    with serving(llama, extensions=[page()]) as other, httpx.Client(base_url=other.url, timeout=30) as client:
        made = client.post("/inspect/passes", json={"text": TEXT}).json()
        body = {"source_ids": llama.encode(OTHER), "token_id": TOKEN}
        with client.stream("POST", f"/inspect/passes/{made['id']}/patches", json=body) as answer:
            told = events(answer.iter_lines())
            assert next(told)["type"] == "begin" and began.wait(20)
            other.service.is_draining = True
            (last,) = told
        goes_on.set()
    assert (last["type"], last["error"]["code"]) == ("error", "draining")


def test_an_error_on_the_way_is_the_last_event(
    client: httpx.Client, path: str, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamarium.errors import InputError

    def fail(self: PatchGrid, layer: int, positions: Any) -> Any:
        raise InputError("it cannot go on")

    monkeypatch.setattr(PatchGrid, "_run", fail)
    body = {"source_ids": llama.encode(OTHER), "token_id": TOKEN}
    with client.stream("POST", f"{path}/patches", json=body) as answer:
        found = list(events(answer.iter_lines()))
    assert [one["type"] for one in found] == ["begin", "error"]
    assert found[1]["error"]["message"] == "it cannot go on"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("edited", {"edits": [{"part": "head", "layer": 0}]}, "edits[0].head"),
    ("edited", {"edits": [{"part": "mlp", "layer": 0}, {"part": "mlp"}]}, "edits[1].layer"),
    ("edited", {"edits": [{"part": "mlp", "layer": 2}]}, "edits[0].layer"),
    ("edited", {"edits": [{"part": "mlp", "layer": -1}]}, "edits[0].layer"),
    ("edited", {"edits": [{"part": "embed", "layer": 0}]}, "edits[0].layer"),
    ("edited", {"edits": [{"part": "head", "layer": 0, "head": 2}]}, "edits[0].head"),
    ("edited", {"edits": [{"part": "mlp", "layer": 0, "positions": [0, 6]}]}, "edits[0].positions[1]"),
    ("edited", {"edits": [{"part": "norm", "layer": 0}]}, "edits[0].part"),
    ("edited", {"edits": [{"part": "mlp", "layer": 0, "factor": 1001}]}, "edits[0].factor"),
    ("edited", {"edits": [{"part": "embed"}] * 65}, "edits"),
    ("edited", {"steering": {"toward": "a", "away": "b", "layer": 2}}, "steering.layer"),
    ("edited", {"steering": {"toward": "", "away": "b", "layer": 0}}, "steering.toward"),
    ("edited", {"steering": {"toward": "a", "away": "word " * 600, "layer": 0}}, "steering.away"),
    ("edited", {"position": 6}, "position"),
    ("edited", {"token_id": 49152}, "token_id"),
    ("edited", {"max_tokens": 33}, "max_tokens"),
    ("edited", {"strength": 1}, "strength"),
    ("patches", {"source_ids": [1, 2], "token_id": 1}, "source_ids"),
    ("patches", {"source_ids": [1, 2, 3, 4, 5, 49152], "token_id": 1}, "source_ids"),
    ("patches", {"source_ids": [1] * 6, "token_id": 49152}, "token_id"),
    ("patches", {"source_ids": [1] * 6, "token_id": 1, "against_id": 49152}, "against_id"),
    ("patches", {"source_ids": [1] * 6, "token_id": 1, "layers": [2]}, "layers[0]"),
    ("patches", {"source_ids": [1] * 6, "token_id": 1, "positions": [6]}, "positions[0]"),
    ("patches", {"source_ids": [1] * 6, "token_id": 1, "part": "head"}, "part"),
    ("patches", {"source_ids": [1] * 6}, "token_id"),
]


@pytest.mark.parametrize(("route", "body", "param"), REFUSED)
def test_what_there_is_not_is_refused_by_its_field(
    client: httpx.Client, path: str, route: str, body: dict[str, Any], param: str
) -> None:
    answer = client.post(f"{path}/{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_edits_that_leave_no_numbers_are_refused(client: httpx.Client, path: str) -> None:
    body = {"edits": [{"part": "residual", "layer": 0, "factor": 1000}] * 20}
    answer = client.post(f"{path}/edited", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_finite"), answer.text


def test_grids_are_bounded(client: httpx.Client) -> None:
    for num_tokens, param in ((257, "source_ids"), (256, None)):
        ids = [number % 1000 for number in range(num_tokens)]
        one = client.post("/inspect/passes", json={"ids": ids}).json()
        body = {"source_ids": ids, "token_id": 1, "layers": [0] * 17}
        answer = client.post(f"/inspect/passes/{one['id']}/patches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param or "positions"), answer.text


@pytest.mark.parametrize(("route", "body"), [("edited", {}), ("patches", {"source_ids": [1] * 3, "token_id": 1})])
def test_an_experiment_is_refused(client: httpx.Client, route: str, body: dict[str, Any]) -> None:
    made = client.post("/inspect/passes", json={"text": TEXT, "experiment": {"rotation": False}}).json()
    answer = client.post(f"/inspect/passes/{made['id']}/{route}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "experiment_unsupported")


@pytest.mark.parametrize("after", ["attention", "mlp"])
def test_the_lens_over_layers_and_tokens(client: httpx.Client, path: str, llama: Llama, after: str) -> None:
    told = client.get(f"{path}/lens/grid", params={"after": after, "token_id": TOKEN, "start": 2, "stop": 5}).json()
    found = llama.inspect.lens(TEXT, TOKEN, k=1, positions=[2, 3, 4], after=after)  # pyright: ignore[reportArgumentType]
    assert [layer["after"] for layer in told["layers"]] == [after, after]
    assert told == found.to_dict()
    assert (told["positions"], told["chosen_id"]) == ([2, 3, 4], TOKEN)
    some = client.get(f"{path}/lens/grid", params={"after": after, "start": 1, "stride": 2}).json()
    assert some == llama.inspect.lens(TEXT, k=1, positions=[1, 3, 5], after=after).to_dict()  # pyright: ignore[reportArgumentType]
    whole = client.get(f"{path}/lens/grid").json()
    assert [len(layer["candidates"]) for layer in whole["layers"]] == [6, 6]
    assert whole["layers"][0]["chosen"] == []


@pytest.mark.parametrize(("asked", "param"), [("stop=7", "stop"), ("start=6", "start"), ("start=3&stop=3", "stop")])
def test_the_lens_grid_refuses_by_its_field(client: httpx.Client, path: str, asked: str, param: str) -> None:
    answer = client.get(f"{path}/lens/grid?{asked}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_the_picture_of_a_pass_is_its_far_view(client: httpx.Client, path: str, llama: Llama) -> None:
    answer = client.get(f"{path}/picture")
    kept, parts = llama.trace(TEXT, names=picture.OF_ALL), llama.trace(TEXT, names=picture.OF_A_TOKEN)
    expected = picture.far_view([kept], [parts], range(6))
    np.testing.assert_allclose(np.frombuffer(answer.content, "<f4"), expected, rtol=1e-6)
    assert answer.headers["x-axes"] == "P"
    some = np.frombuffer(client.get(f"{path}/picture?stride=4&start=1").content, "<f4")
    assert len(some) == (5 * 2 + 1) * 2 + 2 * 3  # tokens 1 and 5; two layers, three pairs


def test_a_picture_in_blocks_has_every_token(
    client: httpx.Client, llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, as memory has them; only the picture has blocks."""
    columns = range(7, 200, 24)
    asked = {"start": 7, "stop": 200, "stride": 24, "blocks": True}
    others = [(5 * i) % 400 for i in range(200)]  # of a text that is run as a whole
    path = f"/inspect/passes/{client.post('/inspect/passes', json={'ids': others}).json()['id']}"
    found = np.frombuffer(client.get(f"{path}/picture", params=asked).content, "<f4")
    seen = [llama.trace(others, names=names) for names in (picture.OF_ALL, picture.OF_A_TOKEN)]
    np.testing.assert_allclose(found, picture.far_view(seen[:1], seen[1:], columns, in_blocks=True), rtol=1e-5)
    ids = [(7 * i) % 400 for i in range(200)]
    path = f"/inspect/passes/{client.post('/inspect/passes', json={'ids': ids}).json()['id']}"
    config = llama.config
    of_a_token = config.num_attention_heads * len(ids) + len(picture.OF_A_TOKEN) * config.hidden_size
    num_bytes = 4 * config.num_hidden_layers * of_a_token * 70  # of 70 tokens
    monkeypatch.setattr("llamarium.page.probes.layers._STEP_BYTES", num_bytes)
    found = np.frombuffer(client.get(f"{path}/picture", params=asked).content, "<f4")
    seen = [llama.trace(ids, names=names) for names in (picture.OF_ALL, picture.OF_A_TOKEN)]
    expected = picture.far_view(seen[:1], seen[1:], columns, in_blocks=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    monkeypatch.setattr("llamarium.page.probes.layers.MAX_BLOCK_TOKENS", 199)
    answer = client.get(f"{path}/picture", params=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "blocks")
    assert client.get(f"{path}/lens/grid?blocks=1&stop=9").status_code == 400


@pytest.mark.parametrize(("asked", "param"), [("stop=7", "stop"), ("start=6", "start"), ("stride=0", "stride")])
def test_the_picture_refuses_by_its_field(client: httpx.Client, path: str, asked: str, param: str) -> None:
    answer = client.get(f"{path}/picture?{asked}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_picture_of_too_many_numbers_is_refused_before_it_is_computed(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = client.post("/inspect/passes", json={"ids": [1] * 400}).json()
    monkeypatch.setattr("llamarium.page.binary.MAX_BYTES", 4 * 2 * 400 * 401 // 2 - 1)
    monkeypatch.setattr(picture, "far_view", lambda *_, **__: pytest.fail("it was computed"))
    answer = client.get(f"/inspect/passes/{one['id']}/picture")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stride"), answer.text
    assert "641,600 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("columns", [range(9), range(1, 9, 3), range(6, 9), range(7, 40, 4), range(5, 6, 9)])
def test_the_pairs_of_a_picture_are_counted(columns: range, llama: Llama) -> None:
    ids = [7 + i for i in range(40)]
    kept, parts = (
        llama.trace(ids, names=picture.OF_ALL),
        llama.trace(ids, names=picture.OF_A_TOKEN, positions=list(columns)),
    )
    found = picture.far_view([kept], [parts], columns)
    assert len(found) == (5 * 2 + 1) * len(columns) + 2 * picture.num_pairs(columns)


def test_the_lens_grid_is_bounded(client: httpx.Client) -> None:
    one = client.post("/inspect/passes", json={"ids": [1] * 65}).json()
    answer = client.get(f"/inspect/passes/{one['id']}/lens/grid")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop"), answer.text
