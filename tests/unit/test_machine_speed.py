"""`llamarium doctor --bench`: what a machine reaches, and what holds it back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import llamarium
from llamarium.cli.main import main
from llamarium.inspect.measures.machine import MachineSpeed, ThreadsSpeed, measure_machine
from llamarium.kernels.threads import computing_with, num_threads

USED = ThreadsSpeed(2, 20e9, 100.0, 0.5, 1000.0)


@pytest.mark.parametrize(("tokens_per_s", "is_better"), [(90.0, False), (104.0, False), (106.0, True)])
def test_another_number_of_threads_is_better_from_more_than_noise_on(tokens_per_s: float, is_better: bool) -> None:
    other = replace(USED, num_threads=1, decode_tokens_per_s=tokens_per_s)
    assert MachineSpeed(USED, (other,), 0.0).better == (other if is_better else None)
    assert MachineSpeed(USED, (), 0.0).better is None


def test_a_model_is_measured_with_each_number_of_threads_once() -> None:
    runner = llamarium.load("shakespeare-char").runner
    with computing_with(1):
        speed = measure_machine(runner)
        assert num_threads() == 1
    numbers = [one.num_threads for one in (speed.used, *speed.others)]
    assert numbers[0] == 1 and len(set(numbers)) == len(numbers)
    assert all(one.decode_tokens_per_s > 0 and one.prefill_tokens_per_s > 0 for one in (speed.used, *speed.others))
    assert speed.busy_cores >= 0


def test_without_the_model_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMARIUM_CACHE", str(tmp_path))
    assert main(["doctor", "--bench", "--json"]) == 1
    (check,) = json.loads(capsys.readouterr().out)["speed"]
    assert check["name"] == "model" and not check["ok"] and "llamarium download smollm2-135m" in check["found"]


@pytest.mark.parametrize(
    ("speed", "cause"),
    [
        (MachineSpeed(USED, (), 1.0), "other programs"),
        (MachineSpeed(USED, (replace(USED, num_threads=1, decode_tokens_per_s=200.0),), 0.0), "--threads 1"),
        (MachineSpeed(replace(USED, decode_memory_share=0.9), (), 0.0), "memory, which"),
        (MachineSpeed(USED, (), 0.0), "the processor"),
    ],
)
def test_the_first_thing_to_change_is_named(
    speed: MachineSpeed,
    cause: str,
    smollm2_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("llamarium.inspect.measures.machine.measure_machine", lambda _: speed)
    assert main(["doctor", "--bench", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["speed"]
    assert checks[-1]["name"] == "held back by" and cause in checks[-1]["found"]
    assert checks[-2]["found"].startswith("36 with 1B")  # 20e9 bytes/s over 4.5 bits of a billion weights
