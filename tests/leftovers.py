"""What a test may leave behind: nothing. conftest.py looks before and after each of them."""

import locale
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from llamarium.kernels import native

# pytest's own, and what PyTorch sets when its compiler is imported for the first time.
_NOT_THE_TESTS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
_KERNELS = "the kernels in use"  # None until they are loaded, which is no change
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def state() -> dict[str, object]:
    """Return by name what a test could change for those after it.

    Warning filters are not here: pytest puts them back itself. Nor are random generators: each test is given the same
    seeds before it begins.
    """
    found: dict[str, object] = {f"os.environ[{name!r}]": value for name, value in os.environ.items()}
    for name in _NOT_THE_TESTS:
        found.pop(f"os.environ[{name!r}]", None)
    found |= {f"the handler of {number.name}": signal.getsignal(number) for number in _SIGNALS}
    if "torch" in sys.modules:
        found |= _torch_state(sys.modules["torch"])
    return found | {
        _KERNELS: native.kernels() if native.library.cache_info().currsize else None,
        "the working directory": Path.cwd(),
        "sys.path": tuple(sys.path),
        "sys.excepthook": sys.excepthook,
        "the recursion limit": sys.getrecursionlimit(),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the level of logging": logging.getLogger().level,
        "the limit of logging": logging.root.manager.disable,
        "threads that the process would wait for": _running(),
    }


def difference(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Return a line for each thing that is not as it was."""
    lines: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "not there"), after.get(name, "gone")
        if old != new and not (name == _KERNELS and None in (old, new)):
            lines.append(f"{name} is {new}, was {old}")
    return lines


def _torch_state(torch: Any) -> dict[str, object]:
    return {
        "PyTorch's threads": torch.get_num_threads(),
        "PyTorch's default dtype": torch.get_default_dtype(),
        "PyTorch's default device": torch.get_default_device(),
        "PyTorch's gradients": torch.is_grad_enabled(),
        "PyTorch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "PyTorch's matmul precision": torch.get_float32_matmul_precision(),
    }


def _running() -> frozenset[str]:
    return frozenset(t.name for t in threading.enumerate() if not t.daemon)
