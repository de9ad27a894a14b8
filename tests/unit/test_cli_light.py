"""The command line without PyTorch and without the packages that serve: it is all there but for what needs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
HIDDEN = ["torch", "fastapi", "starlette", "uvicorn", "httptools", "llguidance", "pydantic"]


@pytest.fixture(scope="module")
def hiding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on Python's path, makes packages as if they were not installed."""
    folder = tmp_path_factory.mktemp("hiding")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({HIDDEN}))\n")
    return folder


def run(hiding: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{hiding}{os.pathsep}{SRC}", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "llamarium", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("generate KING -m shakespeare-char -n 5 --seed 1", ""),
        ("tokenize hello -m shakespeare-char", '"h"'),
        ("tree llama-3.2-1b --quantize nf4", "(q_proj): Linear4bit(in_features=2048"),
        ("tree -m shakespeare-char", "LlamaForCausalLM("),
        ("info tiny", "FLOPs per token"),
        ("info -m shakespeare-char", "weights in"),
        ("info -m letters", "0.156 million"),
        ("bench decode -m letters -n 32 --rounds 1", "decode after 94"),
        ("models", "shakespeare-char"),
        ("doctor --json", "llamarium[torch]"),
        ("bench decode -m shakespeare-char --depths 10 -n 2 --rounds 1", "decode after 10"),
        ("next A -m shakespeare-char -k 2 --steps 2", "then: "),
        ("score AB -m shakespeare-char", "perplexity"),
        ("lens AB -m shakespeare-char -k 1 --layers 0", "after token 1"),
        ("attention AB -m shakespeare-char", "head 0 of"),
        ("trace AB -m shakespeare-char --layers 0 --names q,pattern", "layers.0.pattern"),
        ("neighbors A -m shakespeare-char -k 2", "cosine"),
        ("neighbors A -m shakespeare-char --with B", "cosine"),
        ("bench cache --lengths 4 -m shakespeare-char", "with"),
        ("score AB -m shakespeare-char --dtype float32", "perplexity"),
        ("trace hello -m llama-3.2-1b --layers 0 --names q", "layers.0.q"),
    ],
)
def test_it_works_without_pytorch(words: str, found: str, hiding: Path) -> None:
    done = run(hiding, *words.split())
    assert done.returncode == 0, done.stderr
    assert found in done.stdout and done.stdout
    assert "PyTorch" not in done.stderr


def test_perplexity_without_pytorch(hiding: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("To be, or not to be: that is the question.")
    done = run(hiding, "perplexity", str(tmp_path / "text"), "-m", "shakespeare-char", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["perplexity"] > 1


def test_a_dialog_without_pytorch(hiding: Path, smollm2_path: Path) -> None:
    done = run(hiding, "chat", "Say hello.", "-m", str(smollm2_path), "-n", "3", "--temperature", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"]


def test_models_are_quantized_and_exported_without_pytorch(hiding: Path, tmp_path: Path) -> None:
    packed, again, folder, file = (str(tmp_path / name) for name in ("packed", "again", "folder", "file.gguf"))
    for words in (
        ["quantize", "-m", "shakespeare-char", "--out", packed],
        ["quantize", "-m", packed, "--out", again, "--type", "Q8_0", "--method", "nearest", "--requantize"],
        ["export", "-m", again, "--out", folder, "--format", "hf", "--type", "F16"],
        ["export", "-m", folder, "--out", file, "--format", "gguf", "--type", "Q4_1", "--no-tokenizer"],
    ):
        done = run(hiding, *words)
        assert done.returncode == 0, done.stderr
        assert "PyTorch" not in done.stderr
    for path in (packed, folder):
        answer = run(hiding, "generate", "A", "-m", path, "-n", "9", "--temperature", "0")
        assert (answer.returncode, len(answer.stdout)) == (0, 9 + len("\n")), answer.stderr
    assert Path(file).stat().st_size > 1_000_000
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "consolidated.00.pth").write_bytes(b"PK")
    for cut in (Path(file), Path(folder) / "model.safetensors"):
        os.truncate(cut, cut.stat().st_size - 1000)
    for path in (file, folder, str(tmp_path / "meta")):
        done = run(hiding, "generate", "A", "-m", path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert path in done.stderr and "PyTorch" not in done.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("pretrain --steps 1", "train"),
        ("experiment parts", "train"),
        ("bench learn-and-write", "train"),
        ("finetune --data missing.jsonl", "train"),
        ("dpo --data missing.jsonl", "train"),
        ("merge --adapter missing --out there", "torch"),
        ("quantize -m missing --out there --calibration missing.txt", "torch"),
        ("generate KING -m missing --quantize nf4", "torch"),
        ("generate KING -m missing --device cuda", "torch"),
        ("serve -m missing", "serve"),
        ("inspect -m missing", "serve"),
        ("batch in out -m missing", "serve"),
        ("bench serve --url http://127.0.0.1:1 --clients 1", "serve"),
        ("generate KING -m shakespeare-char --choice a --choice b", "serve"),
    ],
)
def test_what_needs_more_names_the_command_that_brings_it(words: str, extra: str, hiding: Path) -> None:
    done = run(hiding, *words.split())
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.endswith(f": pip install 'llamarium[{extra}]'")


@pytest.mark.parametrize(
    "words",
    [
        "info",
        "export --format hf --out there -m",
        "quantize --out there -m",
        "generate KING -m",
    ],
)
def test_a_missing_file_is_reported_before_pytorch_is_imported(words: str) -> None:
    program = (
        "import sys; from llamarium.cli.main import main; code = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules, 'PyTorch was imported'; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split(), "./nowhere"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "nowhere" in done.stderr and "AssertionError" not in done.stderr


def test_rows_of_a_run_say_what_they_need() -> None:
    """An unknown run is unknown, one that cannot be read says so: never an import that fails."""
    pytest.importorskip("fastapi")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from llamarium.page.compare.runs import Runs; from llamarium.errors import *\n"
        "runs = Runs()\n"
        "try: runs.row_paths('r', [0])\n"
        "except UnknownNameError as error: print(error)\n"
        "runs._folders['r'] = Path('nowhere'); runs.steps = lambda name: []\n"
        "try: runs.row_paths('r', [0])\n"
        "except UnknownNameError as error: print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    unknown, unreadable = done.stdout.splitlines()
    assert "no run of this name" in unknown
    assert "cannot be read" in unreadable
