"""The map, the lens, the sampler, edits and steering of the page show one number for one thing: the chapters' own."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamarium.api import load
from llamarium.page.extension import page
from serving import serving

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

TEXT = "The cat sat"
CHAPTER = Path(__file__).parents[2] / "docs/learn/5-how-a-sentence-grows.md"


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[httpx.Client]:
    """As `llamarium inspect` computes by default: the built-in model, which is stored in 4 bits, in float32."""
    llama = load(smollm2_path, dtype="float32", device="cpu")
    with serving(llama, extensions=[page()]) as found, httpx.Client(base_url=found.url, timeout=120) as one:
        yield one


def answer(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def test_one_probability_has_one_number_in_all_views(client: httpx.Client) -> None:
    model = answer(client.get("/inspect/model"))
    assert (model["dtype"], model["input_bits"]) == ("float32", None)
    path = f"/inspect/passes/{answer(client.post('/inspect/passes', json={'text': TEXT}))['id']}"

    following = answer(client.get(f"{path}/next", params={"k": 1}))["candidates"][0]
    token_id = following["token_id"]
    lens = answer(client.get(f"{path}/lens", params={"k": 1, "position": 2}))["layers"][-1]["candidates"][0][0]
    plain = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "k": 5, "position": 2}
    sampled = answer(client.post(f"{path}/sampler", json=plain))["steps"][0]["candidates"][0]
    edits = [{"part": "head", "layer": 0, "head": 0, "factor": 0.5}]
    steering = {"toward": " good", "away": " bad", "layer": 3, "strength": 1.0}
    of_edits = [
        answer(client.post(f"{path}/edited", json={**body, "token_id": token_id, "k": 5}))["tokens"]
        for body in ({"edits": edits}, {"edits": [], "steering": steering})
    ]
    before = [one["before"]["probability"] for shown in of_edits for one in shown if one["token_id"] == token_id]

    shown = [lens["probability"], sampled["probability"], *before]
    assert len(shown) == 4 and lens["token_id"] == sampled["token_id"] == token_id
    assert shown == pytest.approx([following["probability"]] * 4, abs=2e-6)

    said = re.search(r"P\(on \| The cat sat\) = (0\.\d+)", CHAPTER.read_text(encoding="utf-8"))
    assert said is not None and f"{following['probability']:.3f}" == said[1]


def test_the_figure_of_chapter_2_has_the_weights_of_its_text(client: httpx.Client) -> None:
    text = (CHAPTER.parent / "2-how-attention-works.md").read_text(encoding="utf-8")
    printed = re.search(r"^weights tensor\(\[(.+)\]\)$", text, re.M)
    assert printed is not None and "#stage=attention&layer=1&head=2&pos=2&text=The%20cat%20sat -->" in text
    path = f"/inspect/passes/{answer(client.post('/inspect/passes', json={'text': TEXT}))['id']}"
    query = {"layer": 1, "head": 2, "position": 2, "dtype": "float32"}
    response = client.get(f"{path}/activations/pattern", params=query)
    values = memoryview(response.content).cast("f").tolist()
    assert [f"{value:.4f}" for value in values] == printed[1].split(", ")
