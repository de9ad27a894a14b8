"""Blocks what no step needs (other files, processes, the network) with an audit hook."""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from llamarium.errors import LlamariumError, escape


class LearnerError(LlamariumError):
    """An error in a learner's code, e.g. it raised, opened a file or changed its input.

    Attributes:
        kind: The status of `check.Result`.
    """

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


_REFUSED = (
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto",
    "socket.sendmsg", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.spawn",
    "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.kill", "os.killpg", "os.chmod", "os.chown", "shutil.rmtree", "shutil.move", "shutil.copyfile",
)  # fmt: skip
_HOMES = (
    sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/usr/lib", "/usr/share", "/lib", "/etc/ld.so.cache"
)  # fmt: skip
"""Directories of Python, its packages, and the system information that they read."""

_guard: list[Path] = []
_is_installed = False
_modules: dict[str, ModuleType] = {}


@contextmanager
def guarded(folder: Path) -> Generator[None]:
    """Block files outside `folder` and Python's directories, other processes, and the network while the body runs.

    This reveals functions that need more than their arguments. It is no sandbox against malicious code.

    Args:
        folder: The learner's folder, with symbolic links resolved.
    """
    global _is_installed  # an audit hook cannot be removed
    if not _is_installed:
        sys.addaudithook(_audit)
        _is_installed = True
    _guard.append(folder)
    if len(sys.modules) > len(_modules):
        _modules.update(sys.modules)
    try:
        yield
    finally:
        _guard.pop()
        if len(sys.modules) < len(_modules):  # restore deleted modules, so that the check can continue
            sys.modules.update(_modules)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _guard:
        return
    if event in _REFUSED:
        raise LearnerError("files", f"does more than compute ({event}); use only the function's arguments")
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = args[0].decode("utf-8", "replace") if isinstance(args[0], bytes) else args[0]
        writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or not _is_readable(path):
            verb = "writes" if writes else "reads"
            raise LearnerError("files", f"{verb} the file {escape(path)}; use only the function's arguments")


def _is_readable(path: str) -> bool:
    """Whether a file is in the learner's folder, Python's directories, or the system's information."""
    real = os.path.realpath(path)
    homes = (_guard[-1], *_HOMES, *filter(None, sys.path))
    return any(Path(real).is_relative_to(os.path.realpath(home)) for home in homes)
