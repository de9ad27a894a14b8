"""bench/compare_cpu.py: what other programs are asked, how their answers are read, and the ratios."""

import argparse
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.torch("bench/compare_cpu.py imports it")

BENCH = Path(__file__).parents[2] / "bench"
OPTIONS = argparse.Namespace(prompt_tokens=512, new_tokens=64, depth=16, threads=2, streams=8)


@pytest.fixture
def compare_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    import compare_cpu

    yield compare_cpu
    for name in ("compare_cpu", "common"):
        sys.modules.pop(name, None)


def program(path: Path, body: str) -> str:
    """Write a stand-in that notes what it was asked, and does `body`."""
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.asked\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_llama_bench_is_asked_for_a_prompt_and_for_tokens_after_a_depth(
    compare_cpu: ModuleType, tmp_path: Path
) -> None:
    answer = json.dumps([{"avg_ts": 12.5}])
    says = f'case "$1" in --help) echo "  -d, --n-depth <n>";; *) echo \'{answer}\';; esac'
    bench = program(tmp_path / "llama-bench", says)
    batched = program(tmp_path / "batched", 'echo \'{"speed_pp": 1.0, "speed_tg": 40.0}\'')
    found = compare_cpu.llama_bench(OPTIONS, Path("m.gguf"), bench, batched)
    assert found == {"prefill": 12.5, "decode": 12.5, "streams": 40.0}
    same = "-m m.gguf -t 2 -r 1 -o json"
    assert Path(f"{bench}.asked").read_text().splitlines()[-2:] == [
        f"{same} -p 512 -n 0",
        f"{same} -d 16 -p 0 -n 64",
    ]
    assert "-npp 16 -ntg 64 -npl 8 -c 640 -t 2 -tb 2" in Path(f"{batched}.asked").read_text()


def test_a_llama_bench_without_depths_is_asked_otherwise(compare_cpu: ModuleType, tmp_path: Path) -> None:
    bench = program(tmp_path / "other", "echo '[{\"avg_ts\": 1}]'")
    compare_cpu.llama_bench(OPTIONS, Path("m.gguf"), f"{bench} -rtr 1")
    assert Path(f"{bench}.asked").read_text().splitlines()[-1].endswith("-p 0 -n 0 -gp 16,64 -rtr 1")


def test_a_failing_program_is_named_with_what_it_said(compare_cpu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"broken .* failed \(3\):\nno such model"):
        compare_cpu.llama_bench(OPTIONS, Path("m.gguf"), program(tmp_path / "broken", "echo no such model >&2; exit 3"))


def test_ratios_are_medians_of_the_rounds(compare_cpu: ModuleType) -> None:
    ours = iter([0.0, 10.0, 40.0, 30.0])  # the first round warms up
    sides = {
        "ours": lambda: {"decode": next(ours), "share": 0.5},
        "a": lambda: {"decode": 10.0},
        "b": lambda: {"prefill": 5.0},
    }
    found = compare_cpu.common.alternate(3, sides)
    assert found["ours"] == {"decode": 30.0, "share": 0.5}
    assert found["ours / a"] == {"decode": 3.0}
    assert found["ours / b"] == {}


@pytest.mark.parametrize("text", ["ik", "=path", "ik="])
def test_a_peer_needs_a_name_and_a_command(compare_cpu: ModuleType, text: str) -> None:
    assert compare_cpu.common.named("ik=llama-bench -rtr 1") == ("ik", "llama-bench -rtr 1")
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME="):
        compare_cpu.common.named(text)
