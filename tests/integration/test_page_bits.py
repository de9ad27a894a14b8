"""What bits cost, as the page measures it against what was quantized: each preset shows what it is there to show."""

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import llamarium
from llamarium.cli.main import main
from llamarium.cli.serve import compared
from llamarium.hub.resolve import PACKAGED_RUNS, packaged_path, packaged_run
from llamarium.page.compare.probes import held_out
from llamarium.page.compare.references import References
from llamarium.page.compare.runs import Runs
from llamarium.page.extension import page
from serving import save_small_model, serving, small_llama

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TEXT, LINE = "The cat sat on the mat", "What is the king, my lord?"
RUN = packaged_run(PACKAGED_RUNS[0])


@pytest.fixture(scope="module")
def client(smollm2: llamarium.Llama) -> Iterator[httpx.Client]:
    """The built-in, which is stored in Q4_1, with a reference of another vocabulary and the packaged run."""
    extension = page(compared=(Runs([RUN]), References(["shakespeare-char"])))
    with serving(smollm2, extensions=[extension]) as found, httpx.Client(base_url=found.url, timeout=120) as one:
        yield one


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> llamarium.Llama:
    """A small one of another vocabulary than the reference's."""
    return small_llama(smollm2_path)


@pytest.fixture(scope="module")
def opened(client: httpx.Client) -> str:
    return f"/inspect/passes/{client.post('/inspect/passes', json={'text': TEXT}).json()['id']}"


def ask(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_packed_weights_are_no_reference_of_themselves(client: httpx.Client) -> None:
    told = ask(client, "/inspect/compare")
    ids = [one["id"] for one in told["sides"]]
    assert not {"NF4", "Q8_0", "Q4_1"} & set(ids), "which would be rounded a second time"
    assert "llamarium inspect -m smollm2-135m --reference HuggingFaceTB/SmolLM2-135M-Instruct" in told["note"]
    assert (told["side"], told["against"]) == ("stored", "model"), "it is served unpacked to float32"
    assert told["in_bits"] == [], "a model of letters is not the model that is shown"


def test_fewer_bits_cost_more_and_the_prediction_feels_little(client: httpx.Client, opened: str) -> None:
    told = ask(client, f"{opened}/bits", of="shakespeare-char")
    rows = {one["type"]: one for one in told["rows"]}
    assert told["of"] == "shakespeare-char" and told["texts"] == list(TEXT)
    last = {name: row["errors"][-1] for name, row in rows.items()}
    assert last["float32"] == 0 < last["Q8_0"] < 0.02 < last["Q4_1"] < 0.2 and 0.02 < last["NF4"] < 0.2
    for eight, four, nf4 in zip(*(rows[name]["errors"] for name in ("Q8_0", "Q4_1", "NF4")), strict=True):
        assert 10 * eight < four < nf4, "at each layer"
    for name in ("Q8_0", "Q4_1", "NF4"):
        first, *between, end = rows[name]["errors"]
        assert max(between) > first and end < 2 * first, (
            f"later layers add to the error of {name}, and it does not run away"
        )
    assert 0 < rows["Q8_0"]["kl"] < rows["Q4_1"]["kl"] / 20 and rows["NF4"]["kl"] < 0.1, "four bits are not ruinous"
    plain = rows["float32"]["perplexity"]
    grown = {name: row["perplexity"] / plain - 1 for name, row in rows.items()}
    assert abs(grown["Q8_0"]) < 0.001 < grown["Q4_1"] < 0.02 and 0.001 < grown["NF4"] < 0.02


def test_its_numbers_are_the_librarys(client: httpx.Client, opened: str) -> None:
    base = llamarium.load("shakespeare-char", dtype="float32", device="cpu")
    other = base.inspect.variant("Q4_1")
    found = other.inspect.compare(TEXT, base)
    row = next(one for one in ask(client, f"{opened}/bits", of="shakespeare-char")["rows"] if one["type"] == "Q4_1")
    assert row["kl"] == pytest.approx(found.kl, rel=1e-3)
    for error, layer in zip(row["errors"], found.layers, strict=True):
        assert error == pytest.approx(sum(layer.relative) / len(TEXT), rel=1e-3)
    assert row["perplexity"] == pytest.approx(base.inspect.variant("Q4_1").perplexity(held_out()).perplexity, rel=1e-4)


@pytest.mark.parametrize("kind, most", [("Q8_0", 1e-3), ("Q4_1", 0.1), ("NF4", 0.1)])
def test_each_preset_compares_one_rounding(client: httpx.Client, opened: str, kind: str, most: float) -> None:
    side, against = (f"reference:shakespeare-char:{name}" for name in (kind, "float32"))
    told = ask(client, f"{opened}/compare", side=side, against=against)
    assert 0 < told["kl"] < most and told["texts"] == list(TEXT)
    assert ask(client, f"{opened}/compare", side=against, against=against)["kl"] == 0


def test_two_vocabularies_are_not_compared(client: httpx.Client, opened: str) -> None:
    answer = client.get(f"{opened}/compare", params={"side": "model", "against": "reference:shakespeare-char:float32"})
    assert answer.status_code == 400 and "read other tokens" in answer.json()["error"]["message"]
    answer = client.get(f"{opened}/bits", params={"of": "nothing"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404, "of") and "there is: shakespeare-char" in error["message"]


@pytest.mark.parametrize("query", ["bits?of=shakespeare-char", "moment?run=letters&step=10&layer=0"])
def test_a_text_of_control_tokens_alone_is_none_of_another_vocabulary(client: httpx.Client, query: str) -> None:
    one = client.post("/inspect/passes", json={"ids": [0]}).json()
    answer = client.get(f"/inspect/passes/{one['id']}/{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "id", "unreadable_text"), answer.text


def test_the_bundled_run_plays_at_once(client: httpx.Client, opened: str) -> None:
    """It reads the text of another model, and it has learned."""
    (run,) = ask(client, "/inspect/runs")["runs"]
    assert (run["name"], run["num_layers"], run["num_heads"]) == ("letters", 2, 4) and len(run["steps"]) == 7
    moments = [ask(client, f"{opened}/moment", run="letters", step=step, layer=0) for step in run["steps"]]
    losses = [one["loss"] for one in moments]
    assert moments[0]["texts"] == list(TEXT) and losses[0] > 3.5 and losses[-1] < 2.5
    last = llamarium.load(RUN / "step-00002000", device="cpu")
    assert losses[-1] == pytest.approx(-last.score(TEXT).total_logprob / (len(TEXT) - 1), rel=1e-5)
    line = f"/inspect/passes/{client.post('/inspect/passes', json={'text': LINE}).json()['id']}"
    falling = [ask(client, f"{line}/moment", run="letters", step=step, layer=0)["loss"] for step in run["steps"]]
    assert falling == sorted(falling, reverse=True) and falling[-1] < 1, "the line that the view offers"
    rows = ask(client, "/inspect/runs/letters/rows", ids=",".join(map(str, sorted(set(moments[0]["ids"])))))
    assert rows["steps"] == run["steps"]


def test_the_bundled_run_is_small() -> None:
    assert sum(file.stat().st_size for file in RUN.rglob("*") if file.is_file()) < 1_200_000


def test_a_reference_that_is_quantized_is_refused(capsys: pytest.CaptureFixture[str], smollm2_path: Path) -> None:
    assert main(["inspect", "--no-browser", "--reference", str(smollm2_path)]) != 0
    assert "expected 16 or 32 bits: a reference is what was quantized" in capsys.readouterr().err


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(packaged_path("shakespeare-char"), folder))


def test_references_of_one_name_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = (copied(tmp_path / name / "mine") for name in ("a", "b"))
    assert main(["inspect", "--no-browser", "--reference", str(first), "--reference", str(second)]) != 0
    assert "two references are called mine; rename one of them" in capsys.readouterr().err


def test_a_reference_without_a_tokenizer_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (copied(tmp_path / "mute") / "characters.json").unlink()
    assert main(["inspect", "--no-browser", "--reference", str(tmp_path / "mute")]) != 0
    assert "mute has no tokenizer files" in capsys.readouterr().err


def test_only_references_that_are_named_are_measured(tmp_path: Path) -> None:
    folder = copied(tmp_path / "mine")
    for named, names in (([], ()), ([str(folder)], ("mine",))):
        _, references = compared(Namespace(checkpoints=[], reference=named, model="another"))
        assert references.names == names


def test_a_reference_is_compared_in_the_types_that_its_rows_fit_and_may_go_away(
    tmp_path: Path, llama: llamarium.Llama, smollm2_path: Path
) -> None:
    folder = save_small_model(tmp_path / "odd", smollm2_path, intermediate_size=24)
    extension = page(compared=(Runs(), References([folder])))
    with serving(llama, extensions=[extension]) as found, httpx.Client(base_url=found.url, timeout=120) as client:
        path = f"/inspect/passes/{client.post('/inspect/passes', json={'text': TEXT}).json()['id']}"
        told = ask(client, f"{path}/bits", of="odd")
        assert [one["type"] for one in told["rows"]] == ["float32", "NF4"], "24 columns are no whole blocks"
        (folder / "model.safetensors").unlink()
        other = f"/inspect/passes/{client.post('/inspect/passes', json={'text': LINE}).json()['id']}"
        error = client.get(f"{other}/compare", params={"side": "model", "against": "reference:odd:float32"})
    assert (error.status_code, error.json()["error"]["param"]) == (404, "against"), error.text
    assert "odd in float32 cannot be read any more" in error.text and str(tmp_path) not in error.text


def test_a_run_that_is_removed_is_left_out(tmp_path: Path, llama: llamarium.Llama) -> None:
    run = Path(shutil.copytree(RUN, tmp_path / "gone"))
    extension = page(compared=(Runs([run]), References()))
    with serving(llama, extensions=[extension]) as found, httpx.Client(base_url=found.url, timeout=120) as client:
        path = f"/inspect/passes/{client.post('/inspect/passes', json={'text': TEXT}).json()['id']}"
        shutil.rmtree(run)
        assert ask(client, "/inspect/runs")["runs"] == []
        assert not [
            one["id"] for one in ask(client, "/inspect/compare")["sides"] if one["id"].startswith("checkpoint:")
        ]
        answer = client.get(f"{path}/moment", params={"run": "gone", "step": 10, "layer": 0})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_checkpoint"), answer.text


def test_a_models_own_reference_shows_what_its_bits_cost(tmp_path: Path) -> None:
    """A folder of the same vocabulary: the served model itself is measured against it."""
    folder = tmp_path / "four"
    main(["quantize", "-m", "shakespeare-char", "--type", "q4_1", "--out", str(folder)])
    served = llamarium.load(folder, device="cpu")
    extension = page(compared=(Runs(), References(["shakespeare-char"])))
    with serving(served, extensions=[extension]) as found, httpx.Client(base_url=found.url, timeout=120) as client:
        path = f"/inspect/passes/{client.post('/inspect/passes', json={'text': TEXT}).json()['id']}"
        told = ask(client, f"{path}/compare", side="model", against="reference:shakespeare-char:float32")
        assert told["side"]["vocabulary"] == told["against"]["vocabulary"] == ""
        listed = ask(client, "/inspect/compare")
        rows = {one["type"]: one for one in ask(client, f"{path}/bits")["rows"]}
    assert 1e-4 < told["kl"] < 0.1
    assert listed["in_bits"] == ["shakespeare-char"] and listed["note"] == ""
    assert (listed["side"], listed["against"]) == ("model", "reference:shakespeare-char:float32")

    (shown,) = (one for one in rows.values() if one["is_shown"])
    assert shown["kl"] == pytest.approx(told["kl"]) and 4.5 < shown["bits"] < 9
    original = llamarium.load("shakespeare-char", dtype="float32", device="cpu")
    assert shown["kl"] == pytest.approx(served.inspect.compare(TEXT, original).kl, rel=1e-3)


def test_a_quantized_model_in_float32_is_compared_with_its_packed_weights(tmp_path: Path) -> None:
    """Not with itself: unpacked to float32 it is the model that is shown."""
    folder = tmp_path / "four"
    main(["quantize", "-m", "shakespeare-char", "--type", "q4_1", "--out", str(folder)])
    served = llamarium.load(folder, device="cpu", dtype="float32")
    packed = llamarium.load(folder, device="cpu")
    with serving(served, extensions=[page()]) as found, httpx.Client(base_url=found.url, timeout=120) as client:
        path = f"/inspect/passes/{client.post('/inspect/passes', json={'text': TEXT}).json()['id']}"
        listed = ask(client, "/inspect/compare")
        pair = {name: listed[name] for name in ("side", "against")}
        told = ask(client, f"{path}/compare", **pair)
    assert pair == {"side": "stored", "against": "model"}
    assert told["kl"] == pytest.approx(packed.inspect.compare(TEXT, served).kl, rel=1e-3) and told["kl"] > 0
    with serving(packed, extensions=[page()]) as found, httpx.Client(base_url=found.url, timeout=120) as client:
        listed = ask(client, "/inspect/compare")
    assert (listed["side"], listed["against"]) == ("model", "float32")
    assert "stored" not in {one["id"] for one in listed["sides"]}
