"""Fixtures that every part of the suite shares.

The built-in model's file and the built-in tokenizer's; `model_files` where PyTorch is.

Tests with the mark `torch` need PyTorch or another package of the dev extra. `make test` runs them in .venv, and all
others in .venv-light, where there is none of these. `make quick` runs the core: the mark `quick`.
"""

import gc
import importlib
import itertools
import random
import re
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import leftovers
import llamarium
from llamarium.hub.builtin import cache_folder, fetch

pytest.register_assert_rewrite("page_browser")  # a plugin of the modules that import from it

# A machine that stops for a second fails no example.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_HAS_TORCH = find_spec("torch") is not None
if _HAS_TORCH:
    model_files = importlib.import_module("model_files")._model_files
FORKS = ("test_train_checkpoint.py",)  # a hundred times: each copies the map of all memory that the process has by then
FIRST = ("test_native_build.py", "test_wheels.py", *FORKS, "test_docs.py", "test_native_runner.py", "test_python_o.py")
MARKS = ("alone", "quick", "torch")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have no garbage looked for while all modules are imported, and none among theirs: a million objects each time."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    marks = config.getoption("markexpr")
    if collection_path == Path(__file__).parent / "parity":  # its conftest.py imports the oracles
        return all(is_left_out(path.read_text(), marks) for path in collection_path.glob("test_*.py")) or None
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return is_left_out(collection_path.read_text(), marks) or None


def is_left_out(source: str, chosen: str, has_torch: bool = _HAS_TORCH) -> bool:
    """Whether `-m chosen` can choose no test of a file. It is not imported then: that could take long, or fail."""
    of_all = marks_of_all(source)
    if "torch" in of_all and not has_torch:
        return True
    if not chosen or set(re.findall(r"\w+", chosen)) - {*MARKS, "and", "or", "not"}:
        return False

    of_some = [name for name in MARKS if f"pytest.mark.{name}" in source and name not in of_all]
    tests = itertools.product((False, True), repeat=len(of_some))
    return not any(
        eval(chosen, {name: name in of_all for name in MARKS} | dict(zip(of_some, t, strict=True))) for t in tests
    )


def marks_of_all(source: str) -> set[str]:
    """Return those of `MARKS` that a file puts on all of its tests."""
    assigned = "".join(re.findall(r"^pytestmark = (?:\[\n.*?^\]|[^\n]*)", source, re.M | re.S))
    return {name for name in MARKS if f"pytest.mark.{name}" in assigned}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, and begin with the files that take longest, so that none is left for the end."""
    if not _HAS_TORCH:
        left_out = [item for item in items if item.get_closest_marker("torch")]
        items[:] = [item for item in items if not item.get_closest_marker("torch")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_counts() -> None:
    """Let programs that are started here be interrupted, even if the suite itself runs in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Give every test the same random numbers, and fail the one that changes what those after it find."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    before, threads = leftovers.state(), set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("ThreadPoolExecutor"):  # transformers does not wait for those that load weights
            thread.join(2)
    changed = leftovers.difference(before, leftovers.state())
    assert not changed, "the test leaves behind: " + "; ".join(changed)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps that take their time, so that an answer can be seen coming, until the event is set.

    The later the more: who looks on a busy machine sees it late.
    """
    from llamarium.engine.engine import Engine

    step, was_seen, number = Engine.step, threading.Event(), itertools.count()
    seconds = lambda: min(0.25, 0.02 * 1.01 ** next(number))  # noqa: E731
    monkeypatch.setattr(Engine, "step", lambda engine: (was_seen.wait(seconds()), step(engine))[1])
    return was_seen


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF, fetched into the cache the first time."""
    return fetch("smollm2-135m")


@pytest.fixture(scope="module")
def own_folders_list(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the list of folders whose code may be run out of the real cache, whose models stay."""
    cache = tmp_path_factory.mktemp("cache")
    for path in cache_folder().iterdir():
        if path.name != "own_folders.jsonl":
            (cache / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMARIUM_CACHE", str(cache))
        yield


@pytest.fixture(scope="session")
def llama3_tokenizer_path() -> Path:
    """Llama 3's tokenizer.model, fetched into the cache the first time."""
    return fetch("llama3")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> llamarium.Llama:
    """The built-in model in float32, loaded once; tests must not change it."""
    return llamarium.load(smollm2_path, dtype="float32", device="cpu")
