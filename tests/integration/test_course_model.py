"""A learner's folder behind the server and the page: a function that fails is an answer in words, and no more."""

from collections.abc import Iterator

import httpx
import pytest

import llamarium
from llamarium.course.folder.source import solution, start
from llamarium.course.outline import Course, file_of
from llamarium.course.steps import STEPS
from llamarium.page.extension import page
from serving import serving

pytestmark = pytest.mark.torch

FAILS = """
import os
import numpy as np

def embed(ids, table):
    if len(ids) == 3: return table
    if len(ids) == 5: os._exit(1)
    return table[ids]
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("build") / "my_llama"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMARIUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        start(folder, Course(model="shakespeare-char", texts=("What light is this",)))
        for step in STEPS:
            (folder / file_of(step)).write_text(FAILS if step.name == "embed" else solution(step))
        llama = llamarium.load(folder)
    with serving(llama, extensions=[page()]) as running, httpx.Client(base_url=running.url, timeout=60) as found:
        yield found


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("Who", "my_llama: embed: x has shape (65, 192); expected (3, 192) (T, D)"), ("About", "ends the process")],
)
def test_a_failing_function_is_an_answer_and_the_next_request_works(
    client: httpx.Client, prompt: str, words: str
) -> None:
    body = {"max_tokens": 4, "temperature": 0}
    failed = client.post("/v1/completions", json={"prompt": prompt, **body})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "model_error")
    assert words in failed.json()["error"]["message"]
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json={"prompt": "What", **body}).json()["choices"][0]["text"]


def test_the_page_draws_it(client: httpx.Client) -> None:
    made = client.post("/inspect/passes", json={"text": "What light"}).json()
    assert made["runner"] == "the functions in my_llama"
    path = f"/inspect/passes/{made['id']}"
    for what in ("picture", "next", "lens", "score", "head_kinds", "neurons?layer=1", "activations/resid?layer=1"):
        assert client.get(f"{path}/{what}").status_code == 200, what
    assert [side["id"] for side in client.get("/inspect/compare").json()["sides"]] == ["model"]
    edit = {"part": "head", "layer": 0, "head": 0}
    edited = client.post(f"{path}/edited", json={"edits": [edit], "max_tokens": 1})
    assert (edited.status_code, edited.json()["error"]["code"]) == (501, "no_modules")


def test_a_pass_with_a_failing_function_says_so(client: httpx.Client) -> None:
    made = client.post("/inspect/passes", json={"text": "Who"}).json()
    failed = client.get(f"/inspect/passes/{made['id']}/lens")
    assert failed.status_code == 500
    assert "embed: x has shape" in failed.json()["error"]["message"]
