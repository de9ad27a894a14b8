"""The same refusals without assertions: `python -O` removes every `assert`, and no promise may rest on one."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch("PyTorch's errors are among them")

UNIT = Path(__file__).parent.parent / "unit"
FILES = [
    "test_config.py",
    "test_generate.py",
    "test_sampling.py",
    "test_tokenizer_files.py",
    "test_weights_gguf_file.py",
    "test_weights_meta.py",
    "test_weights_refusals.py",
    "test_weights_safetensors.py",
]


def test_refusals_hold_under_python_o() -> None:
    """In the child the tests' own asserts are silent too; `pytest.raises` still speaks, and it is what counts."""
    command = [sys.executable, "-O", "-W", "ignore", "-m", "pytest", "-q", "-o", "filterwarnings=", "-o", "addopts="]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", *[str(UNIT / name) for name in FILES]]
    command += ["-p", "no:langsmith_plugin", "-p", "no:schemathesis"]  # which take a second
    command += ["--deselect=tests/unit/test_config.py::test_flops_are_what_the_matmuls_do"]  # refuses nothing, for long
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=UNIT.parent.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
