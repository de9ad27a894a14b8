"""Questions about weights over HTTP: as few bits, and as they learn. The numbers are the library's, to the bit."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import llamarium
from llamarium.api import Llama
from llamarium.inspect.measures.streams import stream_errors
from llamarium.inspect.neighbors import neighbors, similarity
from llamarium.inspect.probes.four_bits import coded_weights, rounded_inputs
from llamarium.inspect.probes.quantized import streams_as
from llamarium.model.init import FreshEmbedding
from llamarium.page.extension import page
from llamarium.page.probes import weights
from serving import Running, serving

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, extensions=[page()]) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def path(client: httpx.Client) -> str:
    return path_of(client, text=TEXT)


def path_of(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/inspect/passes", json=body)
    assert answer.status_code == 200, answer.text
    return f"/inspect/passes/{answer.json()['id']}"


def ask(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("linear", ["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"])
def test_rows_of_a_matrix_make_the_activations(client: httpx.Client, llama: Llama, path: str, linear: str) -> None:
    given, made = {
        "q_proj": ("attn_norm", "q"), "o_proj": ("head_out", "attn_out"), "up_proj": ("mlp_norm", "up"),
        "down_proj": ("gated", "mlp_out"), "lm_head": ("final_norm", "logits"),
    }[linear]  # fmt: skip
    layer = None if linear == "lm_head" else 1
    seen = llama.trace(TEXT, names=[given, made]).arrays
    fields = {} if layer is None else {"layer": layer}
    answer = client.get(f"{path}/matrix", params={"linear": linear, "start": 20, "count": 30, **fields})
    assert answer.status_code == 200 and answer.headers["x-axes"] == "RI", answer.text
    weight_RI = np.frombuffer(answer.content, "<f4").reshape([int(one) for one in answer.headers["x-shape"].split(",")])
    assert len(weight_RI) == 30
    expected_R = seen[made, layer][3].reshape(-1)[20:50]
    np.testing.assert_allclose(weight_RI @ seen[given, layer][3].reshape(-1), expected_R, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ("linear=up_proj", "layer"), ("linear=lm_head&layer=1", "layer"), ("linear=up_proj&layer=2", "layer"),
        ("linear=up_proj&layer=1&start=96", "start"), ("linear=up_proj&layer=1&count=65", "count"),
        ("linear=norm&layer=1", "linear"),
    ],
)  # fmt: skip
def test_no_rows_of_a_matrix_that_is_not_there(client: httpx.Client, path: str, asked: str, param: str) -> None:
    answer = client.get(f"{path}/matrix?{asked}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("quantize", ["NF4", "Q8_0", "Q4_1"])
def test_weights_as_they_would_be(client: httpx.Client, llama: Llama, quantize: str) -> None:
    linear = llama.model.get_submodule("model.layers.1.mlp.up_proj")
    expected = coded_weights(llama.runner, "model.layers.1.mlp.up_proj.weight", [5], quantize=quantize)
    told = ask(client, "/inspect/codes", layer=1, linear="up_proj", row=5, start=16, count=40, quantize=quantize)
    assert (told["module"], told["num_columns"]) == ("model.layers.1.mlp.up_proj", 64)
    assert (told["type_name"], told["is_stored"], told["stored_type"]) == (quantize, False, "float32")
    assert told["levels"] == list(expected.levels)
    assert told["level_counts"] == np.bincount(expected.codes_RC[0], minlength=len(expected.levels)).tolist()
    minimums = None if expected.minimums_RC is None else expected.minimums_RC[0, 16:56].tolist()
    columns: dict[str, Any] = {"code": expected.codes_RC, "scale": expected.scales_RC, "value": expected.values_RC}
    columns["original"] = linear.get_parameter("weight").detach()[5:6]
    for name, tensor in columns.items():
        assert [one[name] for one in told["weights"]] == tensor[0, 16:56].tolist(), name
    assert [one["minimum"] for one in told["weights"]] == (minimums or [None] * 40)
    error = float(np.linalg.norm(expected.errors_RC[0]) / linear.get_parameter("weight")[5].norm())
    assert told["row_error"] == pytest.approx(error, rel=1e-6)


def test_inputs_as_the_kernels_would_round_them(client: httpx.Client, path: str, llama: Llama) -> None:
    trace = llama.trace(TEXT)
    seen = {"up_proj": "mlp_norm", "down_proj": "gated", "o_proj": "head_out", "k_proj": "attn_norm"}
    for linear, name in seen.items():
        values = trace.arrays[name, 1][4].reshape(1, -1)
        expected = rounded_inputs(values)
        told = ask(client, f"{path}/inputs", layer=1, linear=linear, position=4, start=32, count=32)
        assert (told["position"], told["num_inputs"], told["is_rounded"]) == (4, values.shape[1], False)
        assert told["input_bits"] is None
        for field, tensor in (
            ("original", values), ("code", expected.codes_MC), ("scale", expected.scales_MC),
            ("value", expected.values_MC),
        ):  # fmt: skip
            assert [one[field] for one in told["inputs"]] == tensor[0, 32:64].tolist(), (linear, field)
        assert told["num_wide"] == int((abs(expected.codes_MC) > 127).sum())
        assert told["error"] == pytest.approx(
            float(np.linalg.norm(expected.errors_MC) / np.linalg.norm(values)), rel=1e-6
        )


@pytest.mark.parametrize("quantize", [None, "NF4", "Q4_1"])
def test_where_the_error_grows(client: httpx.Client, path: str, llama: Llama, quantize: str | None) -> None:
    ids, runner = llama.encode(TEXT), llama.runner
    exact = streams_as(runner, ids)
    expected = {"pass": llama.trace(TEXT, names=["resid"])}
    if quantize is not None:
        expected["weights"] = streams_as(runner, ids, quantize=quantize)
    if quantize == "Q4_1":
        expected["weights and inputs"] = streams_as(runner, ids, quantize=quantize, rounds_inputs=True)
    told = ask(client, f"{path}/errors", **({} if quantize is None else {"quantize": quantize}))
    assert told["quantize"] == quantize and [run["what"] for run in told["runs"]] == list(expected)
    for run in told["runs"]:
        errors = [asdict(one) for one in stream_errors(expected[run["what"]], exact)]
        assert run["layers"] == [{k: list(v) if k != "layer" else v for k, v in one.items()} for one in errors]


@pytest.mark.parametrize(("optimizer", "rate"), [("SGD", 0.01), ("AdamW", 1e-3)])
def test_a_lesson_is_the_librarys(client: httpx.Client, path: str, llama: Llama, optimizer: Any, rate: float) -> None:
    before = client.get(f"{path}/next").json()
    expected = llama.inspect.learn(TEXT, optimizer=optimizer, learning_rate=rate, k=7)
    answer = client.post(f"{path}/lesson", json={"optimizer": optimizer, "learning_rate": rate, "k": 7})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert [one["position"] for one in told["tokens"]] == [1, 2, 3, 4, 5]
    assert tuple(one["loss"] for one in told["tokens"]) == expected.losses
    assert tuple(one["loss_after"] for one in told["tokens"]) == expected.losses_after
    assert tuple(one["token_id"] for one in told["rows"]) == expected.row_ids
    assert [one["gradient"] for one in told["rows"]] == expected.row_gradients_RD.norm(dim=-1).tolist()
    assert tuple(one["moved"] for one in told["rows"]) == expected.row_moves
    assert told["parts"] == [asdict(part) for part in expected.parts]
    assert (told["gradient_norm"], told["num_unpacked"]) == (expected.gradient_norm, 0)
    for name in ("before", "after"):
        assert told[name] == [one.to_dict() for one in getattr(expected, name)]
    assert sum(expected.losses_after) < sum(expected.losses)
    assert client.get(f"{path}/next").json() == before


def test_a_step_that_is_far_too_large_is_told_without_numbers_that_are_none(
    client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_far(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][-1].fill_(float("inf"))

    monkeypatch.setattr(torch.optim.SGD, "step", too_far)
    told = client.post(f"{path}/lesson", json={"learning_rate": 10}).json()
    assert told["after"] == [] and {one["loss_after"] for one in told["tokens"]} == {None}
    assert len(told["before"]) == 50


def test_a_model_with_packed_weights(model_files: Callable[..., Any], smollm2_path: Path) -> None:
    """Its codes are those that are stored, its inputs are rounded, and a copy of it learns unpacked."""
    file = model_files(num_hidden_layers=2, vocab_size=512).gguf_file("Q8_0")
    loaded = llamarium.load(file)
    packed = Llama("packed", loaded.loaded, llamarium.load_tokenizer(smollm2_path), loaded.sources)
    with serving(packed, extensions=[page()]) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        ids = [5, 9, 7, 300]
        path = path_of(client, ids=ids)
        key = "model.layers.1.mlp.up_proj.weight"
        told = ask(client, "/inspect/codes", layer=1, linear="up_proj", row=2)
        stored = coded_weights(packed.runner, key, [2])
        assert (told["is_stored"], told["stored_type"], told["row_error"]) == (True, "Q8_0", None)
        assert [one["code"] for one in told["weights"]] == stored.codes_RC[0, :32].tolist()
        assert {one["original"] for one in told["weights"]} == {None}
        told = ask(client, "/inspect/codes", layer=1, linear="up_proj", row=2, quantize="NF4")
        anew = coded_weights(packed.runner, key, [2], quantize="NF4")
        assert [one["original"] for one in told["weights"]] == stored.values_RC[0, :32].tolist()
        assert [one["value"] for one in told["weights"]] == anew.values_RC[0, :32].tolist()
        told = ask(client, f"{path}/inputs", layer=0, linear="q_proj")
        assert (told["is_rounded"], told["input_bits"], told["position"]) == (True, 8, 3)
        other = path_of(client, ids=ids, experiment={"rotation": False})  # by the modules, which use the kernels too
        told = ask(client, f"{other}/inputs", layer=0, linear="q_proj")
        assert (told["is_rounded"], told["input_bits"]) == (True, 8)
        (run,) = ask(client, f"{path}/errors")["runs"]
        trace = packed.trace(ids, names=["resid"])
        expected = stream_errors(trace, streams_as(packed.runner, ids))
        assert [tuple(one["relative"]) for one in run["layers"]] == [one.relative for one in expected]
        assert 0 < run["layers"][1]["relative"][3] < 0.05
        lesson = client.post(f"{path}/lesson", json={"k": 3}).json()
        assert lesson["num_unpacked"] > 10
        found = packed.inspect.learn(ids, learning_rate=1e-3, k=3, unpack=True)
        assert tuple(one["loss_after"] for one in lesson["tokens"]) == found.losses_after


def test_rows_as_they_are_drawn_at_the_start(client: httpx.Client, llama: Llama) -> None:
    fresh = FreshEmbedding(llama.config, 3)
    told = client.post("/inspect/neighbors", json={"word": "king", "minus": ["man"], "k": 4, "random_seed": 3}).json()
    expected = neighbors(fresh.rows, llama.tokenizer, "king", minus="man", k=4)
    assert told["neighbors"] == [asdict(one) for one in expected.neighbors]
    told = client.post("/inspect/similarity", json={"word": "cat", "other": "dog", "random_seed": 3}).json()
    assert told["cosine"] == similarity(fresh.rows, llama.tokenizer, "cat", "dog").cosine
    learned = client.post("/inspect/similarity", json={"word": "cat", "other": "dog"}).json()
    assert learned["cosine"] != told["cosine"]
    answer = client.get("/inspect/rows", params={"ids": "7,49151", "random_seed": 3})
    assert answer.content == fresh(torch.tensor([7, 49151])).numpy().tobytes()


CODES = "/inspect/codes?linear=up_proj&layer="


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (f"{CODES}0", "quantize"),
        (f"{CODES}2&quantize=NF4", "layer"),
        (f"{CODES}0&quantize=Q4_K", "quantize"),
        (f"{CODES}0&quantize=NF4&row=96", "row"),
        (f"{CODES}0&quantize=NF4&start=64", "start"),
        (f"{CODES}0&quantize=NF4&start=40", "count"),
        (f"{CODES}0&quantize=NF4&count=257", "count"),
        ("/inspect/codes?layer=0&linear=lm_head&quantize=NF4", "linear"),
        ("PASS/inputs?layer=0&linear=up_proj&position=6", "position"),
        ("PASS/inputs?layer=0&linear=up_proj&start=40", "count"),
        ("PASS/errors?quantize=Q4_0", "quantize"),
        ("/inspect/rows?ids=1&random_seed=-1", "random_seed"),
    ],
)
def test_what_there_is_not_is_refused_by_its_field(client: httpx.Client, path: str, asked: str, param: str) -> None:
    answer = client.get(asked.replace("PASS", path))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"optimizer": "Adam"}, "optimizer"), ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": 11}, "learning_rate"), ({"k": 201}, "k"), ({"steps": 2}, "steps"),
    ],
)  # fmt: skip
def test_a_lesson_that_is_none_is_refused(client: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = client.post(f"{path}/lesson", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_lesson_on_what_cannot_be_learned_from(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for body, says in (
        ({"ids": [3]}, "one token has no loss"),
        ({"ids": [3] * 129}, "128 at most"),
        ({"ids": [3, 4], "experiment": {"bidirectional": True}}, "the pass is an experiment"),
    ):
        answer = client.post(f"{path_of(client, **body)}/lesson", json={})
        assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    monkeypatch.setattr(weights, "LESSON_MB", 1.0)
    answer = client.post(f"{path_of(client, ids=[3, 4])}/lesson", json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "lesson_too_large") and "budget is 1 MB" in error["message"]


def test_a_model_that_is_too_large_to_unpack_is_not(
    client: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_WEIGHTS", 10)
    error = client.get(f"{path}/errors").json()["error"]
    assert error["code"] == "model_too_large" and "10 at most" in error["message"]
