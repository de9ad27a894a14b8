"""What `llamarium doctor` says of PyTorch where it is; test_cli_shelf.py has the rest, and runs without."""

import pytest
import torch

from llamarium.cli.main import main

pytestmark = pytest.mark.torch


def test_doctor_says_what_pytorch_is_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "bfloat16 on CPU" in out and torch.__version__ in out
