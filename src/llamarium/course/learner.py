"""A learner's function: imported from its file, called with protected arguments, and limited to computing.

A file that imports torch gets tensors, other files get NumPy arrays.
"""

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llamarium.course.guard import LearnerError, guarded
from llamarium.course.limits import Limits, OvertimeError, limited
from llamarium.course.step import Step
from llamarium.errors import escape


class Learner:
    """A learner's function of one step.

    Args:
        step: The step.
        path: The learner's file.
        limits: Limits of CPU time; None if the caller limits it.

    Attributes:
        names: Names of the function's arguments.

    Raises:
        LearnerError: If the file is missing, cannot be imported, or does not define the function.
    """

    def __init__(self, step: Step, path: Path, limits: Limits | None = None) -> None:
        self.step, self.path, self._folder, self._limits = step, path, path.parent.resolve(), limits
        code = step.right.__code__
        self.names: Sequence[str] = code.co_varnames[: code.co_argcount]
        if not path.is_file():
            raise LearnerError("missing", f"{path.name} does not exist; `llamarium build` writes it anew")
        with self._explained():
            if (uses_torch := _imports_torch(path)) and importlib.util.find_spec("torch") is not None:
                importlib.import_module("torch")  # outside the guard, as its first import writes files
            with self._limited(), guarded(self._folder):
                module = self._import()
            self._torch = sys.modules.get("torch") if uses_torch else None
        self._function = self._found(module)

    def __call__(self, *args: Any) -> Any:
        """Call the function with read-only or copied arguments.

        Returns:
            A single result as is, several as a tuple; tensors are converted to NumPy arrays.

        Raises:
            LearnerError: If the function raises, changes its input, opens files, takes too long, or is still empty.
        """
        arguments = [self._given(arg) for arg in args]
        with self._explained(), self._limited(), guarded(self._folder):
            result = self._function(*arguments)
            is_several = isinstance(result, tuple) or (isinstance(result, list) and len(self.step.outputs) > 1)
            results = tuple(map(_from_learner, result if is_several else (result,)))
        for name, before, after in zip(self.names, args, arguments, strict=True):
            if _is_changed(before, after):
                raise LearnerError("changed", _CHANGED.format(f" {name}"))
        return results[0] if len(results) == 1 else results

    def anew(self) -> "Learner":
        """Return the function from a fresh import of the file, without state of earlier calls."""
        return Learner(self.step, self.path, self._limits)

    def _limited(self) -> AbstractContextManager[None]:
        return nullcontext() if self._limits is None else limited(self._limits)

    def _found(self, module: ModuleType) -> Callable[..., Any]:
        """Return the module's function of the step; LearnerError if it is missing or takes other arguments."""
        name = self.step.name
        function = getattr(module, name, None)
        if not callable(function):
            raise LearnerError(
                "missing", f"{self.path.name} does not define {name}; restore the function that was in the file"
            )
        try:
            inspect.signature(function).bind(*self.names)
        except TypeError:
            signature = f"{name}({', '.join(self.names)})"
            raise LearnerError(
                "missing", f"{name}{inspect.signature(function)} has the wrong arguments; expected {signature}"
            ) from None
        except ValueError:  # callables without a signature are checked by calling them
            pass
        return function

    def _given(self, arg: Any) -> Any:
        """Return an argument as a tensor or a read-only array."""
        if isinstance(arg, np.ndarray):
            if self._torch is not None:
                return self._torch.from_numpy(arg.copy() if arg.nbytes <= _COPIED_BYTES else arg)
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

    def _import(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"my_llama_{self.path.stem}", self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if str(self.path.parent) not in sys.path:
            sys.path.insert(0, str(self.path.parent))
        spec.loader.exec_module(module)
        return module

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Turn any exception of the learner's code into a LearnerError."""
        try:
            yield
        except LearnerError:
            raise
        except SyntaxError as error:
            raise LearnerError("raised", f"{self.path.name}, line {error.lineno}: {error.msg}") from None
        except OvertimeError as error:
            raise LearnerError("time", str(error) + self._line(error, "")) from None
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - becomes a LearnerError
            kind, words = _described(error)
            raise LearnerError(kind, words + self._line(error, self.path.name if kind == "empty" else "")) from None

    def _line(self, error: BaseException | None, file: str) -> str:
        """Return the line of the learner's file where an error occurred, with `file` or the line's text."""
        frames = traceback.extract_tb(None if error is None else error.__traceback__)
        lines = [frame for frame in frames if Path(frame.filename) == self.path]
        places = [f"{file}, line {at.lineno}" if file else f"line {at.lineno}: {escape(at.line or '')}" for at in lines]
        return f" ({places[-1]})" if places else ""


EMPTY = "is still empty"
"""Message of the NotImplementedError in a step's file until the learner writes the function."""

_COPIED_BYTES = 1 << 20
"""Maximum size of tensors that are copied. NumPy arrays can be made read-only, tensors cannot."""

_CHANGED = "changes its input{}; work on a new array (x = x + y, not x += y)"


def _described(error: BaseException) -> tuple[str, str]:
    """Return the kind and the message of a LearnerError for an exception."""
    text = str(error)
    if isinstance(error, NotImplementedError) and text in ("", EMPTY):
        return "empty", EMPTY
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return "memory", "needs more memory than a check allows"
    if isinstance(error, ValueError) and "read-only" in text:
        return "changed", _CHANGED.format("")
    if isinstance(error, RecursionError):
        return "raised", "recurses without end"
    if isinstance(error, ModuleNotFoundError):
        return "raised", f"imports {escape(error.name)}, which is not installed; NumPy is enough"
    return "raised", f"raises {type(error).__name__}" + (f": {escape(text)}" if text else "")


def _imports_torch(path: Path) -> bool:
    """Whether a file imports torch or one of its submodules."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.partition(".")[0] == "torch" for name in names)


def _is_changed(before: Any, after: Any) -> bool:
    """Whether the function has changed an argument; NumPy arrays are read-only."""
    if isinstance(before, np.ndarray):
        if isinstance(after, np.ndarray):
            return False
        return bool(after._version) or not (before.nbytes > _COPIED_BYTES or np.array_equal(before, after.numpy()))
    return isinstance(before, list) and not any(map(callable, before)) and before != after  # pyright: ignore[reportUnknownArgumentType]


def _from_learner(value: Any) -> Any:
    """Return a result with tensors converted to NumPy arrays; LearnerError for bfloat16, which NumPy lacks."""
    if isinstance(value, list):
        return [_from_learner(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # not supported by NumPy
            raise LearnerError("shape", "returned a tensor of dtype bfloat16; expected float32")
        return value.numpy()
    return value
