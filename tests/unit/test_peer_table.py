"""bench/peer_table.py: what sides are asked, what becomes of their answers, and when a result is not written."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.torch("bench/peer_table.py imports its peers")

BENCH = Path(__file__).parents[2] / "bench"

STAND_IN = """
import json, sys
print(json.dumps("fast instructions"), flush=True)
for line in sys.stdin:
    num_prompt, num_new, num_rows = json.loads(line)
    open(sys.argv[1], "a").write(line)
    print("null" if num_rows > 1 else json.dumps([num_prompt / 100, 0.05]), flush=True)
"""


@pytest.fixture
def peer_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import peer_table

    yield peer_table
    for name in ("peer_table", "common", "make_weights"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(sys.platform != "linux", reason="a process's peak memory is read from /proc")
def test_a_side_is_asked_for_each_task_and_what_it_cannot_do_is_left_out(
    peer_table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_table, "LEAST_S", 0.0)  # each task once
    asked = tmp_path / "asked"
    found, about = peer_table.measure([sys.executable, "-c", STAND_IN, str(asked)], peer_table.TASKS)
    assert about == "fast instructions"
    assert found["prompt of 512"] == pytest.approx(100)
    assert found["decode"] == pytest.approx(20)
    assert "eight answers" not in found
    assert found["memory"] > 1
    assert found["first token"] > 0
    assert [json.loads(line) for line in asked.read_text().splitlines()[2:]] == [[512, 0, 1], [16, 64, 1], [16, 32, 8]]


def test_a_side_that_ends_is_named(peer_table: ModuleType) -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        peer_table.measure([sys.executable, "-c", "raise SystemExit(3)"], peer_table.TASKS)


def result(**figures: Any) -> dict[str, Any]:
    return {
        "benchmark": "peers 1B Q4_0",
        "options": {"rounds": 5, "threads": 2, "side": ["Llamarium", "llama.cpp"]},
        "results": {"Llamarium": figures, "llama.cpp": {"decode": 10.0}, "Llamarium / llama.cpp": {"decode": 1.234}},
        "about": {"Llamarium": "avx2", "llama.cpp": "AVX2"},
        "peers": {"llama.cpp": "1.0", "OpenVINO": "2"},
        "environment": {"cpu": "A processor", "date": "2026-11-28", "commit": "abc"},
    }


def test_a_table_names_machine_date_commit_and_versions_and_leaves_blank_what_a_side_cannot(
    peer_table: ModuleType,
) -> None:
    head, _, about, *_, decode, eight, end = peer_table.table(result(decode=12.34, **{"eight answers": 1234.5}))
    assert head == "### 1B Q4_0: A processor, 2 threads"
    assert {"2026-11-28", "commit abc", "5 rounds"} <= {part.strip() for part in about.replace(";", ",").split(",")}
    assert "OpenVINO" not in about
    assert decode == "| decode, tokens/s | 12.3 | 10.0 | 1.23 |"
    assert eight == "| eight answers, tokens/s | 1,234 |  |  |"
    assert end == ""


@pytest.mark.parametrize(("others", "speeds", "faults"), [(0.0, [10, 12], 0), (0.5, [10, 12], 1), (0.0, [10, 20], 1)])
def test_a_busy_machine_and_a_figure_that_varies_are_not_published(
    peer_table: ModuleType, monkeypatch: pytest.MonkeyPatch, others: float, speeds: list[float], faults: int
) -> None:
    class Load:
        def __enter__(self) -> "Load":
            return self

        def __exit__(self, *_: object) -> None:
            self.others = others

    values = iter([1, *speeds])  # the first round warms up
    monkeypatch.setattr(peer_table.common, "Load", Load)
    monkeypatch.setattr(peer_table, "gguf_file", lambda name: Path("m.gguf"))
    monkeypatch.setattr(peer_table, "measure", lambda command, tasks: (dict.fromkeys(tasks, next(values)), "x"))
    options = argparse.Namespace(side=["Llamarium"], rounds=len(speeds), threads=2)
    _, found = peer_table.compare("1B Q4_0", Path("python"), options)
    assert len(found) >= faults
    assert bool(found) == bool(faults)
