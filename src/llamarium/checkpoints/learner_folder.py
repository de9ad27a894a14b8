"""A folder of `llamarium build` as a model: the learner's functions run on another model's weights. Torch-free.

The folder's code is not imported here. A child process runs the functions (`course/serve.py`), and only if the folder
was created or checked on this machine.
"""

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from llamarium.checkpoints.checkpoint import Checkpoint, FormatName, TensorEntry, expected_shapes
from llamarium.checkpoints.options import TensorSource
from llamarium.config import ModelConfig, read_json_object
from llamarium.errors import CheckpointError, OptionError, escape, show_value
from llamarium.hub.folders import COURSE, is_trusted
from llamarium.options.declare import declared
from llamarium.options.loading import LoadOptions
from llamarium.runtime.process.child import Child
from llamarium.runtime.process.runner import ProcessRunner
from llamarium.runtime.runner import Runner


class LearnerCheckpoint:
    """A `llamarium build` folder, opened as a checkpoint.

    Args:
        path: The folder.
        model: Name of the model whose weights are used, from the folder's `course.json`.
        base: Checkpoint of that model.
    """

    def __init__(self, path: Path, model: str, base: Checkpoint) -> None:
        self.path, self.model, self.base = path, model, base
        self.format: FormatName = "build"
        self.config: ModelConfig = base.config
        self.entries: Mapping[str, TensorEntry] = base.entries
        self.generation_config: Mapping[str, Any] = base.generation_config
        self._files = self._look()

    def stored(self, key: str, *, copy: bool = False) -> NoReturn:
        """Raise OptionError: the folder has no weights."""
        raise OptionError(f"{escape(self.path)}: its weights are those of {escape(self.model)}; name that one")

    def check_unchanged(self) -> None:
        """Check that the model's files and the folder's code are unchanged; CheckpointError names a changed file."""
        self.base.check_unchanged()
        files = self._look()
        if changed := [name for name in {**self._files, **files} if self._files.get(name) != files.get(name)]:
            raise CheckpointError(
                f"{escape(self.path)}: {escape(min(changed))} has changed since it was loaded; load the model anew"
            )

    def runner(self) -> Runner:
        """Return a runner that calls the functions in a child process; FunctionError if they cannot be started."""
        if sys.platform == "win32":
            raise OptionError(f"{escape(self.path)}: its process shares memory as Linux and macOS do; use one of them")
        # -P: do not import modules from the working directory, which may hold any file
        command = (sys.executable, "-P", "-m", "llamarium.course.serve", str(self.path.resolve()), self.model)
        child = Child(command, self.path.resolve())
        child.start()
        name = f"the functions in {escape(self.path.resolve().name)}"
        return ProcessRunner(self.config, expected_shapes(self.config), child, name, self.model)

    def sources(self) -> tuple[TensorSource, ...]:
        """Return the source of each weight."""
        return tuple(TensorSource.of(e, "F32", 4 * math.prod(e.shape)) for e in self.entries.values())

    def _look(self) -> dict[str, tuple[int, int]]:
        try:
            statuses = {path.name: path.stat() for path in self.path.glob("*.py")}
        except OSError as error:
            raise CheckpointError(f"{escape(self.path)}: cannot be read: {escape(error)}") from None
        return {name: (status.st_mtime_ns, status.st_size) for name, status in statuses.items()}


def model_of_course(folder: Path) -> str:
    """Return the name of the model in a folder's `course.json`.

    Raises:
        CheckpointError: If it names no model, or the folder's code is not trusted on this machine.
    """
    if not is_trusted(folder):
        raise CheckpointError(
            f"{escape(folder)}: holds Python code, which is run only if it was begun or checked on this machine; "
            f"`llamarium build check --folder {escape(folder)}` runs it and remembers it"
        )
    model = read_json_object(folder / COURSE).get("model")
    if not isinstance(model, str):
        raise CheckpointError(f"{escape(folder / COURSE)}: model is {show_value(model)}; expected a name")
    return model


def check_learner_options(path: Path, options: LoadOptions) -> None:
    """Check that options fit a learner's functions, which compute in float32 on the CPU; OptionError if not."""
    allowed = {"adapter", "strict", "chat_template"}
    for name, option in declared(LoadOptions).items():
        value = getattr(options, name)
        if name in allowed or value in (
            option.default,
            {"dtype": "float32", "device": "cpu"}.get(name, option.default),
        ):
            continue
        raise OptionError(
            f"{escape(path)}: {name} is {show_value(value)}, and its functions compute in float32, on the CPU; leave "
            "it out"
        )
    if not options.join:
        raise OptionError(f"{escape(path)}: functions cannot be trained; name the model whose weights they use")
