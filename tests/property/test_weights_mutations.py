"""Damaged at random, a checkpoint is refused by a LlamariumError or gives tensors of the right shape; nothing else.

And the same under `python -O`, in a process that cannot get more memory than the files hold and 64 MiB.
"""

import json
import random
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamarium.checkpoints.checkpoint import Checkpoint, expected_shapes
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.open import open_checkpoint
from llamarium.errors import CheckpointError, LlamariumError
from quantized_cases import CASES, CONFIG, Model

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:(?s).*activations were meant:UserWarning"),
]  # by the float8 folder

SETTINGS = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)
QUANTIZED = ("awq", "gptq order", "w4a16 int8 zeros", "fp8 blocks")
SMALL = replace(CONFIG, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128)
FORMATS = (
    *("huggingface", "sharded", "nf4", "meta", "gguf", "gguf-blocks", "gguf-split", "pytorch", "pytorch-shards"),
    *QUANTIZED,
)


@pytest.fixture
def originals(model_files, tmp_path) -> dict[str, Path]:
    files = model_files(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_attention_heads=4, num_key_value_heads=1
    )
    folder, _ = files.nf4()
    return {
        "huggingface": files.huggingface(),
        "sharded": files.huggingface(shards=2),
        "nf4": folder,
        "meta": files.meta(shards=2),
        "gguf": files.gguf_file("F16"),
        "gguf-blocks": files.gguf_file("Q8_0"),
        "pytorch": files.pytorch_bin(),
        "pytorch-shards": files.pytorch_bin(shards=2),
        "gguf-split": files.gguf_parts("F16"),
        **{name: Model(*CASES[name][:2], SMALL).write(tmp_path / name) for name in QUANTIZED},
    }


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def copy(path: Path, target: Path) -> Path:
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    return Path((shutil.copytree if path.is_dir() else shutil.copy)(path, target))


def read_all(checkpoint: Checkpoint) -> None:
    for key, shape in expected_shapes(checkpoint.config).items():
        assert tuple(read(checkpoint, key).shape) == shape


def refused_or_read(path: Path) -> bool:
    """Return whether it was refused; anything but a LlamariumError or good tensors fails the test."""
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a config field that a flipped letter made unknown
            checkpoint = open_checkpoint(path)
    except LlamariumError as error:
        assert str(error).isprintable() and len(str(error)) < 2500
        return True
    finally:
        assert time.process_time() - start < 2
    read_all(checkpoint)
    return False


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[float, bytes, int]]:
    """Places (a fraction of the file, most of them in its header), what is put there, and how much it replaces."""
    place = st.one_of(st.floats(0, 0.03), st.floats(0, 1), st.floats(0.98, 1))
    numbers = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]).map(lambda n: n.to_bytes(8, "little"))
    what = st.one_of(
        st.binary(min_size=1, max_size=4), numbers, st.sampled_from([b"", b'"', b"]", b"9" * 20, b"-", b"["])
    )
    return draw(st.lists(st.tuples(place, what, st.sampled_from([0, 1, 2, 8])), min_size=1, max_size=3))


@pytest.mark.parametrize("name", FORMATS)
def test_random_edits(originals, tmp_path, name):
    @SETTINGS
    @given(which=st.integers(0, 9), changes=edits())
    def run(which: int, changes: list[tuple[float, bytes, int]]) -> None:
        path = copy(originals[name], tmp_path / "damaged")
        file = files_of(path)[which % len(files_of(path))]
        content = file.read_bytes()
        for place, what, length in changes:
            begin = int(place * len(content))
            content = content[:begin] + what + content[begin + length :]
        file.write_bytes(content)
        refused_or_read(path)

    run()
    read_all(open_checkpoint(originals[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_and_extended(originals, tmp_path, name):
    """Every weight file, cut anywhere or with anything behind it, is refused."""

    @settings(SETTINGS, max_examples=60)
    @given(which=st.integers(0, 9), place=st.one_of(st.floats(0, 0.05), st.floats(0, 1)), more=st.binary(max_size=9))
    def run(which: int, place: float, more: bytes) -> None:
        path = copy(originals[name], tmp_path / "damaged")
        weights = [f for f in files_of(path) if f.suffix != ".json" and f.stat().st_size > 0]
        file = weights[which % len(weights)]
        content = file.read_bytes()
        file.write_bytes(content + more if more else content[: int(place * (len(content) - 1))])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)

    run()


@pytest.mark.parametrize("name", FORMATS)
def test_missing_files(originals, tmp_path, name):
    """Without any one of its files, or with a folder in its place, a checkpoint is refused."""
    for i in range(len(files_of(originals[name]))):
        for put_folder in (False, True):
            path = copy(originals[name], tmp_path / "damaged")
            target = files_of(path)[i]
            target.unlink()
            if put_folder:
                target.mkdir()
            with pytest.raises(LlamariumError) as caught:
                open_checkpoint(path)
            assert target.name in str(caught.value) and str(path) in str(caught.value)


# --- a process with little memory and no asserts ----------------------------------------------------------------


SCRIPT = """
import json, resource, sys, time, warnings
from pathlib import Path
from llamarium.errors import LlamariumError
from llamarium.checkpoints.decode import read
from llamarium.checkpoints.open import open_checkpoint
assert False, "run with -O"
warnings.simplefilter("ignore")
job = json.loads(Path(sys.argv[1]).read_text())
read(open_checkpoint(Path(job["good"])), "model.norm.weight")
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + 64 * 2**20 + job["largest_bytes"]
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for name, path in job["bad"].items():
    start = time.process_time()
    try:
        open_checkpoint(Path(path))
        result = "opened"
    except LlamariumError as error:
        result = "refused"
    except BaseException as error:
        result = repr(error)
    print(json.dumps([name, result, time.process_time() - start]))
    norm = read(open_checkpoint(Path(job["good"])), "model.norm.weight")
    if norm.shape != (64,):
        print(json.dumps([name, "the next good file did not load", 0]))
"""


def hostile(originals: dict[str, Path], folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield files that claim much and hold little."""
    shuffle = random.Random(0)
    huge = b"\xff" * 8
    for name in FORMATS:
        for i, file in enumerate(files_of(originals[name])):
            content = file.read_bytes()
            changes: dict[str, Callable[[bytes], bytes]] = {
                "empty": lambda c: b"",
                "half": lambda c: c[: len(c) // 2],
                "doubled": lambda c: c + c,
                "huge numbers": lambda c: c[:8] + huge * 2 + c[24:],
                "huge first number": lambda c: huge + c[8:],
                "shuffled": lambda c: bytes(shuffle.sample(c[:2000], min(2000, len(c)))) + c[2000:],
            }
            for kind, change in changes.items():
                path = copy(originals[name], folder / f"{name}-{i}-{kind}")
                files_of(path)[i].write_bytes(change(content))
                yield f"{name} {file.name} {kind}", path
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"):
        path = copy(originals["huggingface"], folder / f"huge-{field}")
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**raw, field: 2**30}))
        yield f"huge {field}", path


def test_in_a_process_with_little_memory_and_no_asserts(originals, tmp_path):
    folder = tmp_path / "hostile"
    folder.mkdir()
    bad = {name: str(path) for name, path in hostile(originals, folder)}
    sizes = [sum(f.stat().st_size for f in files_of(Path(path))) for path in bad.values()]
    job = {"good": str(originals["huggingface"]), "bad": bad, "largest_bytes": max(sizes)}
    (tmp_path / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-O", "-c", SCRIPT, str(tmp_path / "job.json")], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    results = {name: (result, seconds) for name, result, seconds in map(json.loads, done.stdout.splitlines())}
    assert set(results) == set(bad)
    for name, (result, seconds) in results.items():
        harmless = name.startswith("meta consolidated") and name.endswith("huge numbers")  # the directory has them too
        assert result == "refused" or (result == "opened" and harmless), (name, result)
        assert seconds < 2, (name, seconds)
