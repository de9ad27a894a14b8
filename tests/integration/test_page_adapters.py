"""A pass with an adapter, asked over HTTP: every number is that of the model with the adapter merged into it."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from llamarium.adapters.config import LoRAConfig
from llamarium.adapters.lora import apply_lora
from llamarium.adapters.merge import merge_adapter
from llamarium.adapters.save import save_adapter
from llamarium.api import Llama
from llamarium.inspect.interventions.edits import scale
from llamarium.inspect.interventions.experiments import Experiment
from llamarium.page.extension import page
from serving import serving
from strong_adapters import strengthen

pytestmark = pytest.mark.torch

TEXT = "The cat sat on the mat"
OTHER = "The dog sat on the mat"
TOKEN = 900
KINDS = {"lora": LoRAConfig(r=4), "dora": LoRAConfig(r=4, use_dora=True)}


@pytest.fixture(scope="module")
def folders(llama: Llama, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, config in KINDS.items():
        model = copy.deepcopy(llama.model)
        apply_lora(model, config)
        strengthen(model, 0.1, stretch=1.5)
        found[name] = tmp_path_factory.mktemp(name)
        save_adapter(model, found[name], base_model="small")
    return found


@pytest.fixture(scope="module")
def client(llama: Llama, folders: dict[str, Path]) -> Iterator[httpx.Client]:
    with (
        serving(llama, engine={"adapters": folders}, extensions=[page()]) as running,
        httpx.Client(base_url=running.url, timeout=30) as found,
    ):
        yield found


@pytest.fixture(scope="module", params=[None, *KINDS])
def adapter(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture(scope="module")
def merged(llama: Llama, folders: dict[str, Path], adapter: str | None) -> Llama:
    """Plain modules that compute what the base and the adapter do: nothing of an adapter is left in them."""
    model = copy.deepcopy(llama.model)
    if adapter is not None:
        merge_adapter(model, folders[adapter])
    return Llama("merged", model, llama.tokenizer)


@pytest.fixture(scope="module")
def make(client: httpx.Client, adapter: str | None) -> Any:
    def make(**more: Any) -> str:
        answer = client.post("/inspect/passes", json={"text": TEXT, "adapter": adapter, **more})
        assert answer.status_code == 200, answer.text
        return f"/inspect/passes/{answer.json()['id']}"

    return make


def get(client: httpx.Client, path: str, **query: Any) -> Any:
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_heads(client: httpx.Client, make: Any, merged: Llama) -> None:
    found, expected = get(client, f"{make()}/heads", layer=1), merged.inspect.heads(TEXT, 1, positions=[-1])
    np.testing.assert_allclose(found["norms"], expected.norms_TN[0], rtol=1e-3)
    np.testing.assert_allclose(found["shares"], expected.shares_TN[0], atol=1e-3)


def test_attribution(client: httpx.Client, make: Any, merged: Llama) -> None:
    found = get(client, f"{make()}/attribution", token_id=TOKEN)
    expected = merged.inspect.attribution(TEXT, TOKEN)
    np.testing.assert_allclose(found["logit"], expected.logit, atol=2e-3)
    for part in ("additions", "heads"):
        told = [one["logit"] for one in found[part]]
        np.testing.assert_allclose(told, [one.logit for one in getattr(expected, part)], atol=2e-3)


def test_lens(client: httpx.Client, make: Any, merged: Llama) -> None:
    found = get(client, f"{make()}/lens", token_id=TOKEN)["layers"]
    expected = merged.inspect.lens(TEXT, positions=[-1], word=TOKEN).layers
    told = [layer["chosen"][0]["logprob"] for layer in found]
    np.testing.assert_allclose(told, [layer.chosen[0].logprob for layer in expected], atol=2e-3)


def test_edits(client: httpx.Client, make: Any, merged: Llama) -> None:
    body = {"edits": [{"part": "head", "layer": 1, "head": 1, "factor": 0.0}], "token_id": TOKEN, "max_tokens": 4}
    answer = client.post(f"{make()}/edited", json=body)
    assert answer.status_code == 200, answer.text
    found, edit = answer.json(), scale("head", 0.0, layer=1, head=1)
    assert found["divergence"] == pytest.approx(merged.inspect.effect(TEXT, edit).divergence, rel=0.01)
    with merged.inspect.edited(edit) as other:
        for key, model in (("answer_before", merged), ("answer_after", other)):
            expected = model.generate(TEXT, max_tokens=4, temperature=0.0).completions[0].token_ids
            assert [token["id"] for token in found[key]] == list(expected)


def test_patches(client: httpx.Client, make: Any, merged: Llama, llama: Llama) -> None:
    body = {"source_ids": llama.encode(OTHER), "token_id": TOKEN}
    grid = merged.inspect.patch_grid(TEXT, OTHER, TOKEN)
    expected = [cell.logit for cell in grid.cells()]
    found: list[float] = []
    with client.stream("POST", f"{make()}/patches", json=body) as answer:
        for line in answer.iter_lines():
            told = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            found += [cell["logit"] for cell in told.get("cells", ())]
    np.testing.assert_allclose(found, expected, atol=5e-3)


def test_experiments(client: httpx.Client, make: Any, merged: Llama) -> None:
    path = make(experiment={"bidirectional": True})
    answer = client.get(f"{path}/activations/resid", params={"layer": 1, "dtype": "float32"})
    assert answer.status_code == 200, answer.text
    seen = merged.inspect.trace_experiment(TEXT, Experiment(bidirectional=True), names=["resid"])["layers.1.resid"]
    found = np.frombuffer(answer.content[-4 * seen.numel() :], np.float32).reshape(seen.shape)
    np.testing.assert_allclose(found, seen, atol=2e-3)


def test_errors_of_few_bits_and_a_lesson(client: httpx.Client, make: Any, merged: Llama) -> None:
    runs = get(client, f"{make()}/errors")["runs"]
    errors = [error for layer in runs[0]["layers"] for error in layer["relative"]]
    assert max(errors) < 1e-3  # the pass against its own weights in float32
    answer = client.post(f"{make()}/lesson", json={"optimizer": "SGD", "learning_rate": 0.1})
    assert answer.status_code == 200, answer.text
    expected = merged.inspect.learn(TEXT, optimizer="SGD", learning_rate=0.1)
    for key, values in (("loss", expected.losses), ("loss_after", expected.losses_after)):
        np.testing.assert_allclose([token[key] for token in answer.json()["tokens"]], values, atol=2e-3)


def test_the_model_itself_stays_as_it_is(client: httpx.Client, llama: Llama, folders: dict[str, Path]) -> None:
    before = llama.model.state_dict().keys()
    answer = client.post("/inspect/passes", json={"text": TEXT, "adapter": "lora"})
    get(client, f"/inspect/passes/{answer.json()['id']}/heads", layer=0)
    assert llama.model.state_dict().keys() == before
    assert llama.runner.adapters is not None
