"""How many threads the kernels use, asked for at any moment."""

import os
import subprocess
import sys

import pytest

from llamarium.kernels.threads import spin_briefly

IMPORTING = """
import threading
from llamarium.kernels.threads import num_threads

def import_torch():
    import torch

thread = threading.Thread(target=import_torch)
thread.start()
while thread.is_alive():
    assert num_threads() >= 1
"""


def test_the_kernels_run_while_another_thread_imports_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING], check=True, timeout=300)


def test_pytorchs_threads_spin_briefly_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    spin_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    spin_briefly()
    assert os.environ.pop("GOMP_SPINCOUNT") == "1000"


@pytest.mark.parametrize(
    ("words", "spins"),
    [
        *(("pretrain", "1000"), ("--debug finetune --data x", "1000"), ("experiment rope", "1000"), ("dpo", "1000")),
        *(("generate finetune", "None"), ("bench", "None"), ("", "None")),
    ],
)
def test_the_commands_that_train_say_so_before_pytorch_is_there(words: str, spins: str) -> None:
    code = """
import os, sys
import llamarium.cli.main
llamarium.cli.main.main = lambda: print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
llamarium.cli.start()
"""
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{spins} False\n"
