"""`bench/soak.py` in small: requests of every kind, a third of them aborted, and nothing of them is left."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
pytestmark = [
    pytest.mark.torch("bench/soak.py makes a model"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux what a process holds"),
]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import soak

    yield soak
    for name in ("soak", "soak_requests", "soak_server", "common"):
        sys.modules.pop(name, None)


def test_what_is_asked_is_what_is_said(soak: ModuleType) -> None:
    asked = list(soak.askings(20_000))
    assert asked == list(soak.askings(20_000)) != list(soak.askings(20_000, seed=1))
    kinds = Counter(asking.kind for asking in asked)
    assert abs(kinds["aborted"] / 20_000 - 0.30) < 0.01 and abs(kinds["bad"] / 20_000 - 0.05) < 0.005
    assert set(kinds) == {"aborted", "bad", "stream", "whole"}
    assert {asking.leaves for asking in asked if asking.kind == "aborted"} == {"sending", "waiting", "reading"}
    streams = Counter(json.loads(asking.body)["stream"] for asking in asked if asking.kind == "aborted")
    assert min(streams.values()) > 2000


def test_the_slope_is_of_bytes_a_request(soak: ModuleType) -> None:
    assert soak.slope([(100 * i, 5_000_000 + 102_400 * i) for i in range(50)]) == pytest.approx(1024)
    assert soak.slope([(100, 1)]) == 0


def objects(held: dict[str, Any]) -> int:
    """What the collector knows, without a cache of a bounded number of names."""
    return held["objects"] - held["tables"]["names compared with the right ones"]


def test_nothing_is_left_of_some_hundred_requests(soak: ModuleType, smollm2_path: Path) -> None:
    found = soak.measure(200, num_clients=6)
    assert sum(found["outcomes"].values()) == 200 and found["model"].startswith("random")
    assert (found["5xx"], found["unexpected"]) == (0, [])
    assert any(kind.startswith("aborted: left") for kind in found["outcomes"])
    for what in ("descriptors", "threads", "tasks"):
        assert found["after"][what] <= found["before"][what], what
    assert objects(found["after"]) - objects(found["before"]) < 100
    tables = found["after"]["tables"]
    assert 0 < tables["responses, bytes"] <= 2**20 and 0 < tables["earlier prompts, bytes"] <= 24 * 64
    assert 0 < tables["pool of texts, tokens"] <= 2**20 / 12 and tables["prefix counts"] < 40
    assert set(found["left in the engine"].values()) == {0}
    assert (
        0 < found["bytes on disk, at most"] <= sys.modules["soak_server"].DISK_BYTES and found["tokens from disk"] > 0
    )
    assert (found["health"], found["same answer as before"], found["exit code"]) == ([200, "ready"], True, 0)
    assert set(found["log"].values()) == {0}
