"""A learner's function: found in its file, called with copies, and kept to its arguments.

A file that imports torch gets tensors, another one numpy's arrays.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llamarium.build.step import Step
from llamarium.errors import LlamariumError, escape


class LearnerError(LlamariumError):
    """What a learner's function did that is no result: it raised, opened a file, changed its input.

    Attributes:
        kind: One of the kinds of `check.Result.status`.
    """

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


class Learner:
    """A learner's function of one step.

    Args:
        step: The step.
        path: Its file.

    Raises:
        LearnerError: If the file is not there, cannot be imported, or lacks the function.
    """

    def __init__(self, step: Step, path: Path) -> None:
        self.step, self.path, self._folder = step, path, path.parent.resolve()
        if not path.is_file():
            raise LearnerError("missing", f"{path.name} is not there; `llamarium build` writes it anew")
        module = self._import()
        self._torch = sys.modules.get("torch") if _uses_torch(module) else None
        found = getattr(module, step.name, None)
        if not callable(found):
            raise LearnerError(
                "missing", f"{path.name} has no function {step.name}; the file of the step began with it"
            )
        self._function = found

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Call the function with what cannot be written, and return its results as numpy's arrays.

        Raises:
            LearnerError: If it raises, changes its input, opens files, or is still empty.
        """
        given = [self._given(arg) for arg in args]
        with self._explained(), guarded(self._folder):
            result = self._function(*given)
        for name, before, after in zip(self._names(), args, given, strict=False):
            is_changed = (
                before != after
                if isinstance(before, list) and not any(map(callable, before))
                else bool(getattr(after, "_version", 0))
            )
            if is_changed:
                raise LearnerError("changed", _CHANGED.format(f" {name}"))
        return tuple(map(_from_learner, result)) if isinstance(result, tuple) else (_from_learner(result),)

    def plain(self) -> Callable[..., Any]:
        """Return the function as the others call it: one result as itself, several as a tuple."""

        def call(*args: Any) -> Any:
            results = self(*args)
            return results[0] if len(results) == 1 else results

        return call

    def _names(self) -> Sequence[str]:
        code = self.step.right.__code__
        return code.co_varnames[: code.co_argcount]

    def _given(self, arg: Any) -> Any:
        """Return an argument as the learner's file wants it."""
        if isinstance(arg, np.ndarray):
            if self._torch is not None:
                return self._torch.from_numpy(arg)
            view = arg.view()
            view.flags.writeable = False
            return view
        if isinstance(arg, list):
            return [self._given(item) for item in arg]  # pyright: ignore[reportUnknownVariableType]
        if callable(arg) and self._torch is not None:
            return partial(self._call_with_tensors, arg)
        return arg

    def _call_with_tensors(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._as_tensors(function(*map(_from_learner, args)))

    def _as_tensors(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(self._as_tensors, result))  # pyright: ignore[reportUnknownArgumentType]
        return self._given(result) if isinstance(result, np.ndarray) else result

    def _import(self) -> Any:
        name = f"my_llama_{self.path.stem}"
        spec = importlib.util.spec_from_file_location(name, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if str(self.path.parent) not in sys.path:
            sys.path.insert(0, str(self.path.parent))
        with self._explained(), guarded(self._folder):
            spec.loader.exec_module(module)
        return module

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Make a LearnerError of whatever the learner's code raises."""
        try:
            yield
        except LearnerError:
            raise
        except NotImplementedError as error:
            raise LearnerError("empty", str(error) or "is still empty") from None
        except MemoryError:
            raise LearnerError(
                "memory", f"asks for more memory than a check gives{self._line(sys.exc_info()[1])}"
            ) from None
        except SyntaxError as error:
            raise LearnerError("raised", f"{self.path.name}, line {error.lineno}: {error.msg}") from None
        except RecursionError as error:
            raise LearnerError("raised", f"calls itself without an end{self._line(error)}") from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a learner does becomes words
            if isinstance(error, ValueError) and "read-only" in str(error):
                raise LearnerError("changed", _CHANGED.format("") + self._line(error)) from None
            if "memory" in str(error).lower():  # torch's allocator raises a RuntimeError
                raise LearnerError("memory", f"asks for more memory than a check gives{self._line(error)}") from None
            said = f": {escape(error)}" if str(error) else ""
            raise LearnerError("raised", f"raises {type(error).__name__}{said}{self._line(error)}") from None

    def _line(self, error: BaseException | None) -> str:
        """Say in which line of the learner's file something happened."""
        frames = traceback.extract_tb(None if error is None else error.__traceback__)
        lines = [frame for frame in frames if Path(frame.filename) == self.path]
        return f" (line {lines[-1].lineno}: {escape(lines[-1].line or '')})" if lines else ""


_CHANGED = "changes its input{}; work on a new array (x = x + y, not x += y)"


def _uses_torch(module: Any) -> bool:
    """Return whether a file has imported torch, or something of it by its own name."""
    modules = (value for value in vars(module).values() if isinstance(value, ModuleType))
    return any(value.__name__.partition(".")[0] == "torch" for value in modules)


def _from_learner(value: Any) -> Any:
    """Return a result as numpy's array, where it is a tensor."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        return value.half().numpy() if value.dtype.itemsize == 2 else value.numpy()  # numpy has no bfloat16
    return value


# --- what a step needs no more than its arguments for -----------------------------------------------------------------

_REFUSED = (
    "socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.spawn",
    "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.kill", "os.chmod", "os.chown", "shutil.rmtree", "shutil.move", "shutil.copyfile",
)  # fmt: skip
_HOMES = (
    sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", "/usr/lib", "/usr/share", "/lib", "/etc/ld.so.cache"
)  # fmt: skip
"""Where Python, its packages and what they read of the machine lie."""

_guard: list[Path] = []
_is_installed = False


@contextmanager
def guarded(folder: Path) -> Generator[None]:
    """Refuse files outside of `folder` and of Python itself, other processes and the network, while code runs.

    `folder` is a path without links. This keeps a check honest about what a function needs; it is no sandbox against
    code that means harm.
    """
    global _is_installed  # a hook can be added, and never removed
    if not _is_installed:
        sys.addaudithook(_audit)
        _is_installed = True
    _guard.append(folder)
    try:
        yield
    finally:
        _guard.pop()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _guard:
        return
    if event in _REFUSED:
        raise LearnerError("files", f"does more than compute ({event}); a step needs its arguments alone")
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = args[0].decode("utf-8", "replace") if isinstance(args[0], bytes) else args[0]
        writes = isinstance(args[1], str) and any(letter in args[1] for letter in "wax+")
        if writes or not _is_readable(path):
            how = "writes" if writes else "reads"
            raise LearnerError("files", f"{how} the file {escape(path)}; a step needs its arguments alone")


def _is_readable(path: str) -> bool:
    """Return whether a file belongs to the learner's folder, to Python, or to the machine's description of itself."""
    real = Path(path).absolute()
    homes = (_guard[-1], *map(Path, _HOMES), *(Path(entry) for entry in sys.path if entry))
    return any(real.is_relative_to(home) for home in homes)
