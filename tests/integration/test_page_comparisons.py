"""Two models over one text, and a run's checkpoints, asked over HTTP: the numbers are the library's, to the bit."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import llamarium
from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import apply_lora
from llamarium.adapters.save import save_adapter
from llamarium.api import Llama
from llamarium.config import RopeScaling
from llamarium.inspect.interventions.experiments import Experiment
from llamarium.inspect.measures.comparison import NAMES, Comparison, compare_passes
from llamarium.inspect.trace import trace
from llamarium.page.compare.references import References
from llamarium.page.compare.runs import Runs
from llamarium.page.extension import page
from llamarium.train.history import read_history
from llamarium.train.row_paths import row_paths
from serving import Running, serving, small_llama
from strong_adapters import strengthen
from tiny_run import tiny_run

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"
WORDS = "the cat sat on a mat"
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> Llama:
    return small_llama(smollm2_path, rope_scaling=SCALING)


@pytest.fixture(scope="module")
def running(llama: Llama, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapter")
    model = small_llama(smollm2_path, rope_scaling=SCALING).model
    apply_lora(model, LoRAConfig(r=4))
    strengthen(model, 0.3)
    save_adapter(model, folder, base_model="small")
    with serving(llama, engine={"adapters": {"one": folder}}, extensions=[page()]) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=60) as found:
        yield found


def named(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/inspect/passes", json=body or {"text": TEXT})
    assert answer.status_code == 200, answer.text
    return f"/inspect/passes/{answer.json()['id']}"


def ask(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, **query: Any) -> tuple[int, str, str]:
    answer = client.get(path, params=query)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_sides_are_what_the_server_can_make(client: httpx.Client) -> None:
    told = ask(client, "/inspect/compare")
    assert [one["id"] for one in told["sides"]] == [
        "model", "adapter:one", "modules", "rope-off", "float32", "NF4", "Q8_0", "Q4_1", "random-head",
    ]  # fmt: skip
    assert (told["side"], told["against"], told["max_tokens"]) == ("NF4", "model", 128)
    taken = {one["id"]: one["num_bytes"] for one in told["sides"]}
    assert taken["model"] == taken["adapter:one"] == taken["rope-off"] == 0
    assert 0 < taken["NF4"] < taken["Q8_0"] < taken["float32"] < told["max_bytes"]


def expected_pair(llama: Llama, running: Running, side: str, ids: list[int]) -> Comparison:
    """Of a side against the model, by the library alone."""
    if side == "adapter:one":
        seen = trace(running.engine.runner, ids, names=NAMES, adapter=0)
    elif side == "rope-off":
        with llama.inspect.edited(experiment=Experiment(rope_scaling="off")) as other:
            seen = trace(other.runner, ids, names=NAMES)
    elif side == "modules":
        with llama.inspect.edited() as other:
            seen = trace(other.runner, ids, names=NAMES)
    else:
        seen = trace(llama.inspect.variant(side).runner, ids, names=NAMES)  # pyright: ignore[reportArgumentType]
    return compare_passes(seen, trace(llama.runner, ids, names=NAMES), k=3, tokenizer=llama.tokenizer)


@pytest.mark.parametrize("side", ["adapter:one", "modules", "rope-off", "float32", "NF4", "random-head"])
def test_numbers_are_the_librarys(client: httpx.Client, running: Running, llama: Llama, side: str) -> None:
    told = ask(client, f"{named(client)}/compare", side=side, against="model")
    expected = expected_pair(llama, running, side, llama.encode(TEXT))
    assert (told["side"]["id"], told["against"]["id"]) == (side, "model")
    assert (told["side"]["seconds"] is not None) == (side in ("float32", "NF4", "random-head"))
    plain = expected.to_dict()
    assert (told["kl"], told["same_top"]) == (plain["kl"], plain["same_top"])
    for one, other in zip(told["layers"], plain["layers"], strict=True):
        assert one == {**other, "relative": list(other["relative"]), "cosine": list(other["cosine"])}
    for one, other in zip(told["tokens"], plain["tokens"], strict=True):
        assert {**one, "same_top": one["candidates"][0]["token_id"] == one["candidates_against"][0]["token_id"]} == {
            name: list(value) if isinstance(value, tuple) else value for name, value in other.items()
        }
    if side in ("adapter:one", "rope-off", "NF4"):
        assert max(told["layers"][-1]["relative"]) > 1e-3, "they differ"


def test_both_may_have_to_be_built_and_one_model_is_as_itself(client: httpx.Client, llama: Llama) -> None:
    path = named(client)
    told = ask(client, f"{path}/compare", side="Q4_1", against="float32", k=1)
    assert told["kl"] == llama.inspect.variant("Q4_1").inspect.compare(TEXT, llama.inspect.variant("float32"), k=1).kl
    assert told["side"]["seconds"] > 0 and told["against"]["seconds"] > 0
    assert ask(client, f"{path}/compare", side="NF4", against="NF4")["kl"] == 0


def test_what_cannot_be_compared_is_refused(client: httpx.Client) -> None:
    path = named(client)
    code, param, message = refused(client, f"{path}/compare", side="../../etc", against="model")
    assert (code, param) == (404, "side") and "there are: model, adapter:one, modules" in message
    assert refused(client, f"{path}/compare", side="model", against="x")[:2] == (404, "against")
    assert refused(client, f"{path}/compare", side="model")[:2] == (400, "against")
    assert refused(client, f"{path}/compare", side="model", against="NF4", k=0)[:2] == (400, "k")
    long = named(client, ids=[5] * 129)
    code, param, message = refused(client, f"{long}/compare", side="model", against="NF4")
    assert (code, param) == (400, "id") and "129 tokens, and 128 are compared at most" in message
    for body in ({"text": TEXT, "adapter": "one"}, {"text": TEXT, "experiment": {"rotation": False}}):
        code, param, message = refused(client, f"{named(client, **body)}/compare", side="model", against="NF4")
        assert (code, param) == (400, "id") and "which a side names" in message
    assert ask(client, "/inspect/runs") == {"unreadable": [], "runs": [], "max_tokens": 128}
    code, param, message = refused(client, f"{path}/moment", run="x", step=1, layer=0)
    assert (code, param) == (404, "run") and "--checkpoints RUN" in message


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("runs") / "story")


@pytest.fixture(scope="module")
def learned(run: Path) -> Llama:
    return llamarium.load(run / "step-00000024", device="cpu")


@pytest.fixture(scope="module")
def student(run: Path, learned: Llama) -> Iterator[httpx.Client]:
    """A client of a server that was started with a run."""
    with (
        serving(learned, extensions=[page(compared=(Runs([run]), References()))]) as found,
        httpx.Client(base_url=found.url) as client,
    ):
        yield client


def test_a_checkpoint_reads_the_text(student: httpx.Client, run: Path, learned: Llama) -> None:
    (told,) = ask(student, "/inspect/runs")["runs"]
    assert (told["name"], told["steps"]) == ("story", [5, 10, 15, 20, 24])
    assert told["num_bytes"] == (run / "step-00000024" / "model.safetensors").stat().st_size
    path, losses = named(student, text=WORDS), []
    for step in told["steps"]:
        one = llamarium.load(run / f"step-{step:08d}", device="cpu")
        moment = ask(student, f"{path}/moment", run="story", step=step, layer=1)
        surprises = [None if x is None else -x for x in one.score(WORDS).logprobs]
        assert moment["surprises"] == [x if x is None else pytest.approx(x, rel=1e-5) for x in surprises]
        assert moment["loss"] == pytest.approx(sum(surprises[1:]) / (len(WORDS) - 1), rel=1e-5)
        assert moment["best"]["token_id"] == one.next_tokens(WORDS, k=1)[0].chosen.token_id
        answer = student.get(f"{path}/moment/pattern", params={"run": "story", "step": step, "layer": 1, "head": 3})
        assert answer.headers["x-axes"] == "TS"
        pattern_TS = np.frombuffer(answer.content, "<f4").reshape(len(WORDS), len(WORDS))
        assert np.array_equal(pattern_TS, one.trace(WORDS, names=["pattern"])["layers.1.pattern"][3].numpy())
        losses.append(moment["loss"])
    assert losses == sorted(losses, reverse=True), "it has learned"


def test_rows_of_the_table_over_a_run(student: httpx.Client, run: Path, learned: Llama) -> None:
    ids = list(dict.fromkeys(learned.encode(WORDS)))
    told = ask(student, "/inspect/runs/story/rows", ids=",".join(map(str, [*ids, ids[0]])))
    found = row_paths(run, ids)
    assert (told["steps"], told["ids"], told["share"]) == (list(found.steps), ids, found.share)
    assert told["places"] == found.places_SR2.tolist()
    table_VD = learned.model.model.embed_tokens.weight.detach()[ids]
    centred_RD = (table_VD - table_VD.mean(0)).double()
    plain = torch.pca_lowrank(centred_RD, q=min(centred_RD.shape), center=False)[2][:, :2]
    assert torch.allclose((centred_RD @ plain).abs(), torch.from_numpy(found.places_SR2[-1]).double().abs(), atol=1e-5)


def test_the_history_is_the_journals(student: httpx.Client, run: Path) -> None:
    told = ask(student, "/inspect/runs/story/history")
    assert told == json.loads(json.dumps(asdict(read_history(run)))) and not told["groups"]
    assert student.get("/inspect/runs/..%2fstory/history").status_code == 404
    journal = run / "metrics.jsonl"
    before = journal.read_text()
    try:
        journal.write_text("junk\n")
        refusal = student.get("/inspect/runs/story/history")
    finally:
        journal.write_text(before)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (404, "unreadable_history")
    assert str(run) not in refusal.text


def test_two_checkpoints_side_by_side(student: httpx.Client, run: Path, learned: Llama) -> None:
    sides = {one["id"]: one for one in ask(student, "/inspect/compare")["sides"]}
    assert sides["checkpoint:story:5"]["title"] == "story, step 5"
    path = named(student, text=WORDS)
    told = ask(student, f"{path}/compare", side="checkpoint:story:5", against="checkpoint:story:24")
    early = llamarium.load(run / "step-00000005", device="cpu")
    assert told["kl"] == early.inspect.compare(WORDS, learned).kl
    assert ask(student, f"{path}/compare", side="checkpoint:story:24", against="model")["kl"] == 0


def test_nothing_but_the_runs_named_is_read(student: httpx.Client) -> None:
    path = named(student, text=WORDS)
    for name in ("..", "story/step-00000005", "/etc", "%2e%2e"):
        assert refused(student, f"{path}/moment", run=name, step=5, layer=0)[:2] == (404, "run")
    assert student.get("/inspect/runs/..%2f..%2fetc/rows", params={"ids": "1,2"}).status_code == 404
    assert refused(student, f"{path}/moment", run="story", step=7, layer=0)[:2] == (404, "step")
    assert refused(student, f"{path}/moment", run="story", step=5, layer=2)[:2] == (400, "layer")
    beyond = {"run": "story", "step": 5, "layer": 0, "head": 4}
    assert refused(student, f"{path}/moment/pattern", **beyond)[:2] == (400, "head")
    assert refused(student, "/inspect/runs/story/rows", ids="1,99999")[:2] == (400, "ids")
    assert refused(student, "/inspect/runs/story/rows", ids="1,1")[:2] == (400, "ids")
    assert refused(student, "/inspect/runs/story/rows", ids=",".join(map(str, range(65))))[:2] == (400, "ids")


def test_a_checkpoint_that_has_gone_or_is_damaged_is_said_without_its_path(student: httpx.Client, run: Path) -> None:
    path, folder = named(student, text="a cat"), run / "step-00000010"
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    try:
        code, param, message = refused(student, f"{path}/moment", run="story", step=10, layer=0)
    finally:
        weights.write_bytes(whole)
    assert (code, param) == (404, "run") and "of the run story cannot be read" in message and str(run) not in message


def test_a_checkpoint_that_is_replaced_is_read_anew(student: httpx.Client, run: Path) -> None:
    path = named(student, text="so did a cat")
    weights, other = (run / f"step-000000{step}" / "model.safetensors" for step in ("15", "20"))
    before, expected = (ask(student, f"{path}/moment", run="story", step=step, layer=0)["loss"] for step in (15, 20))
    whole = weights.read_bytes()
    weights.write_bytes(other.read_bytes())
    try:
        found = ask(student, f"{path}/moment", run="story", step=15, layer=0)["loss"]
    finally:
        weights.write_bytes(whole)
    assert found == expected != before


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(
    student: httpx.Client, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer keeps the newest ones alone, and removes while the page asks."""
    steps = Runs.steps
    monkeypatch.setattr(Runs, "steps", lambda self, name: [1, *steps(self, name)])
    sides = [one["id"] for one in ask(student, "/inspect/compare")["sides"]]
    assert "checkpoint:story:1" not in sides and "checkpoint:story:5" in sides
    monkeypatch.setattr(Runs, "steps", lambda self, name: [1])
    (told,) = ask(student, "/inspect/runs")["runs"]
    assert (told["steps"], told["num_bytes"]) == ([1], 0)


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_compared(
    llama: Llama, run: Path, tmp_path: Path
) -> None:
    """Its newest configuration is damaged while the server runs."""
    damaged = shutil.copytree(run, tmp_path / "damaged")
    runs = Runs([run, damaged])
    next(damaged.glob("step-00000024/config.json")).write_text("{")
    with (
        serving(llama, extensions=[page(compared=(runs, References()))]) as found,
        httpx.Client(base_url=found.url) as client,
    ):
        told, sides = ask(client, "/inspect/runs"), [one["id"] for one in ask(client, "/inspect/compare")["sides"]]
        moment = refused(client, f"{named(client, text=WORDS)}/moment", run="damaged", step=5, layer=0)
    assert (told["unreadable"], [(one["name"], len(one["steps"])) for one in told["runs"]]) == (
        ["damaged"],
        [("story", 5), ("damaged", 0)],
    )
    assert "checkpoint:story:5" in sides and not any("damaged" in side for side in sides)
    assert moment[:2] == (404, "run") and "`llamarium info` on its folder says why" in moment[2]


def test_a_run_of_another_vocabulary_reads_the_text_in_its_own_tokens(llama: Llama, run: Path) -> None:
    with (
        serving(llama, extensions=[page(compared=(Runs([run]), References()))]) as found,
        httpx.Client(base_url=found.url) as client,
    ):
        path = named(client, text=WORDS)
        told = ask(client, f"{path}/moment", run="story", step=5, layer=0)
        beyond = refused(client, f"{named(client)}/moment", run="story", step=5, layer=0)
        mixed = refused(client, f"{path}/compare", side="checkpoint:story:5", against="model")
        both = ask(client, f"{path}/compare", side="checkpoint:story:5", against="checkpoint:story:24")
    early, late = (llamarium.load(run / f"step-{step:08d}", device="cpu") for step in (5, 24))
    assert told["texts"] == list(WORDS) and told["ids"] == early.encode(WORDS)
    assert told["surprises"][1:] == [pytest.approx(-x, rel=1e-5) for x in early.score(WORDS).logprobs[1:]]
    assert beyond[0] == 400 and "step 5 cannot read the text: the character 'T' (U+0054)" in beyond[2]
    assert str(run) not in beyond[2]
    assert mixed[:2] == (400, "against") and "read other tokens; choose two of one vocabulary" in mixed[2]
    assert both["kl"] == early.inspect.compare(WORDS, late).kl and both["texts"] == list(WORDS)


def test_the_adapter_that_was_put_on_can_be_taken_off(llama: Llama, tmp_path: Path, smollm2_path: Path) -> None:
    """Base against adapter, also where the adapter is the model's own; in C, and on the modules."""
    adapted = small_llama(smollm2_path, rope_scaling=SCALING)
    apply_lora(adapted.model, LoRAConfig(r=4))
    strengthen(adapted.model, 0.3)
    alone = Llama("adapted", adapted.loaded.with_modules(), llama.tokenizer)
    with serving(alone, extensions=[page()]) as found, httpx.Client(base_url=found.url, timeout=60) as client:
        told = ask(client, f"{named(client)}/compare", side="base", against="model")
    with llama.inspect.edited() as base:
        assert told["kl"] == base.inspect.compare(TEXT, alone, k=1).kl > 1e-4
