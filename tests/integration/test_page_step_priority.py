"""The page's work and the engine's steps alternate: passes are cut in pieces, and none begins while a step runs."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from llamarium.api import Llama
from llamarium.kernels.step_priority import StepPriority
from llamarium.page.extension import page
from serving import HELLO, Running, serving

pytestmark = pytest.mark.torch

IDS = list(range(100, 148))
OTHERS = list(range(400, 448))
PATCHES: dict[str, Any] = {"source_ids": OTHERS, "token_id": 5}


class Spied(StepPriority):
    """Counts pieces and steps; once there were `most` pieces, no more begin until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.num_pieces = 0
        self.num_steps = 0
        self.most = -1
        self.go_on = threading.Event()

    def _begin(self) -> None:
        if self.num_pieces == self.most:
            self.go_on.wait(30)
        super()._begin()
        self.num_pieces += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        with super().step():
            self.num_steps += 1
            yield


@pytest.fixture(scope="module")
def running(llama: Llama) -> Iterator[Running]:
    with serving(llama, extensions=[page()]) as found:
        yield found


@pytest.fixture
def priority(running: Running) -> Spied:
    running.engine.step_priority = running.engine._thread.step_priority = found = Spied()  # pyright: ignore[reportPrivateUsage]
    return found


@pytest.fixture
def path(running: Running) -> str:
    made = httpx.post(f"{running.url}/inspect/passes", json={"ids": IDS, "text": None}).json()
    return f"{running.url}/inspect/passes/{made['id']}"


@pytest.mark.parametrize(
    ("method", "question", "body", "least"),
    [
        ("GET", "activations/resid?layer=0", None, 4),
        ("POST", "patches", PATCHES, 115),
        ("POST", "edited", {"edits": [], "max_tokens": 3, "token_id": 5}, 20),
        ("GET", "errors?quantize=Q8_0", None, 5),
    ],
)
def test_a_pass_is_cut_in_pieces(
    running: Running, priority: Spied, path: str, method: str, question: str, body: Any, least: int
) -> None:
    answer = httpx.request(method, f"{path}/{question}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert priority.num_pieces >= least


def test_a_pass_stops_while_a_step_runs_and_goes_on_after_it(running: Running, priority: Spied, path: str) -> None:
    priority.most = priority.num_pieces + 3
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{path}/patches", json=PATCHES, timeout=60)
        running.wait(lambda: priority.num_pieces == priority.most)
        with priority.step():
            before = priority.num_pieces
            priority.go_on.set()
            time.sleep(0.3)
            assert priority.num_pieces == before and not answer.done()
        priority.release()
        assert answer.result().text.count('"type":"end"') == 1
    assert priority.num_pieces > before


def test_chats_beside_patches_say_the_same_and_the_patches_come_to_an_end(
    running: Running, priority: Spied, path: str
) -> None:
    alone = running.post(**HELLO).json()["choices"]
    priority.most = priority.num_pieces + 3
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(httpx.post, f"{path}/patches", json=PATCHES, timeout=60)
        running.wait(lambda: priority.num_pieces == priority.most)
        num_steps = priority.num_steps
        chat = pool.submit(running.post, **HELLO)
        running.wait(lambda: priority.num_steps > num_steps)
        priority.go_on.set()
        assert chat.result().json()["choices"] == alone
        while not answer.done():
            assert running.post(**HELLO).json()["choices"] == alone
        assert answer.result().text.count('"type":"end"') == 1
    assert priority.num_steps > num_steps
