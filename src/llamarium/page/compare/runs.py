"""The training runs that the server was started with; no other folder is read. No torch at import."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from llamarium.checkpoints.open import OpenedModel, open_model
from llamarium.config import ModelConfig
from llamarium.errors import InputError, LlamariumError, OptionError, UnknownNameError, escape
from llamarium.file_names import ANY_SAFETENSORS
from llamarium.hub.folders import is_adapter
from llamarium.page.compare.others import Side
from llamarium.page.compare.references import OwnTokenizers
from llamarium.runtime.runner import Runner
from llamarium.train.history import RunHistory, has_history, read_history, spread
from llamarium.train.row_paths import RowPaths, row_paths
from llamarium.train.state.checkpoint import checkpoint_folder, checkpoint_steps

if TYPE_CHECKING:
    from llamarium.api import Llama

MAX_MOMENTS = 60
"""Maximum number of checkpoints shown per run, and of samples; if there are more, they are evenly spaced."""

_MAX_POINTS = 400  # per curve


class Runs:
    """Training runs by folder name; new checkpoints in a folder are found.

    A folder of runs, such as an experiment's, stands for all of them. OptionError if a folder has neither a checkpoint
    nor a journal, or if two runs have the same name.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders, self._models = dict[str, Path](), dict[str, OpenedModel]()
        self._tokenizers = OwnTokenizers()
        for run in (run for folder in folders for run in _runs_in(folder)):
            name = run.resolve().name
            if name in self._folders:
                raise OptionError(f"{escape(run)}: two runs are called {escape(name)}; rename one of the folders")
            self._folders[name] = run

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(self._folders)

    @property
    def readable(self) -> tuple[str, ...]:
        """Names of the runs whose newest checkpoint is a model that can be opened."""
        names: list[str] = []
        for name in self._folders:
            with suppress(UnknownNameError):
                if not self.steps(name):
                    continue
                self._opened(name)
                names.append(name)
        return tuple(names)

    def folder(self, name: str) -> Path:
        """Return the folder of a run that the server was started with."""
        if name not in self._folders:
            folders = ", ".join(self._folders) or "none (`llamarium inspect --checkpoints RUN` names one)"
            raise UnknownNameError(
                f"there is no run of this name; there is: {folders}", code="unknown_run", param="run"
            )
        return self._folders[name]

    @property
    def newest(self) -> Path | None:
        """Newest checkpoint of the first run that has one which is a model or an adapter; None if there is none."""
        checkpoints = (newest_checkpoint(folder) for folder in self._folders.values())
        return next((folder for folder in checkpoints if folder and (is_adapter(folder) or _is_model(folder))), None)

    def steps(self, name: str) -> list[int]:
        """Return the steps of a run's checkpoints in order, up to `MAX_MOMENTS`; none if they are not whole models."""
        newest = newest_checkpoint(self.folder(name))
        if newest is None or not _is_model(newest):
            return []
        return spread(checkpoint_steps(self.folder(name)), MAX_MOMENTS)

    def has_history(self, name: str) -> bool:
        """Return whether a run has a journal."""
        return has_history(self.folder(name))

    def history(self, name: str) -> RunHistory:
        """Return what a run's journal says."""
        try:
            return read_history(self.folder(name)).thinned(points=_MAX_POINTS, texts=MAX_MOMENTS)
        except LlamariumError:
            message = f"the run {name} has no metrics.jsonl that can be read"
            raise UnknownNameError(message, code="unreadable_history", param="run") from None

    def num_bytes(self, name: str, step: int) -> int:
        """Return the bytes of a checkpoint's weights on disk; 0 if it has been removed."""
        return sum(size for size, _ in _weights(checkpoint_folder(self.folder(name), step)))

    def sides(self, llama: "Llama") -> Iterator[Side]:
        """Yield every checkpoint as a side, except removed and unreadable ones."""
        for name in self.readable:
            sides = (self._side(llama, name, step) for step in self.steps(name))
            yield from (side for side in sides if side is not None)

    def side(self, llama: "Llama", name: str, step: int) -> Side:
        """Return a checkpoint as a side of a comparison."""
        side = self._side(llama, name, step)
        if side is None:
            message = f"the run {name} has no checkpoint of step {step}; it may have been removed meanwhile"
            raise UnknownNameError(message, code="unknown_checkpoint", param="step")
        return side

    def _side(self, llama: "Llama", name: str, step: int) -> Side | None:
        folder = checkpoint_folder(self.folder(name), step)
        weights = _weights(folder)
        if not weights:
            return None
        words = f"The checkpoint of step {step:,} of the training run {name}, as it is stored."

        def build() -> Runner:
            from llamarium.api import load

            try:
                return load(folder, device=llama.runner.device).runner
            except LlamariumError:
                raise _unreadable(name) from None

        num_bytes = sum(size for size, _ in weights)
        tokenizer = self._tokenizers.of(llama, name, self._opened(name))
        return Side(
            f"checkpoint:{name}:{step}", f"{name}, step {step:,}", words, num_bytes, build, version=str(weights),
            vocabulary="" if tokenizer is None else name, tokenizer=tokenizer,
        )  # fmt: skip

    def config(self, name: str) -> ModelConfig:
        """Return the configuration of a run's model."""
        return self._opened(name).config

    def _opened(self, name: str) -> OpenedModel:
        if name not in self._models:
            try:
                self._models[name] = open_model(newest_checkpoint(self.folder(name)) or self.folder(name))
            except LlamariumError:  # whose message has a path that clients must not see
                raise _unreadable(name) from None
        return self._models[name]

    def row_paths(self, name: str, ids: Sequence[int]) -> RowPaths:
        """Return the paths of embedding rows over a run's checkpoints."""
        folder, steps = self.folder(name), self.steps(name)
        try:
            return row_paths(folder, ids, steps=steps)
        except InputError:
            raise
        except LlamariumError:
            raise _unreadable(name) from None


def newest_checkpoint(folder: Path) -> Path | None:
    """Return a run's checkpoint of the highest step, or None; TrainingError if the folder cannot be read."""
    steps = checkpoint_steps(folder)
    return checkpoint_folder(folder, steps[-1]) if steps else None


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder if it is a run, else the runs in it; OptionError if there are none."""

    def is_run(path: Path) -> bool:
        return has_history(path) or newest_checkpoint(path) is not None

    if is_run(folder):
        return [folder]
    runs = [path for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)] if folder.is_dir() else []
    if not runs:
        raise OptionError(
            f"{escape(folder)}: holds no training run; expected a folder with metrics.jsonl, or with step-00000500 or "
            "the like in it"
        )
    return runs


def _is_model(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a Llama: no adapter, and no variant of an experiment that only it can load."""
    return not is_adapter(checkpoint) and not (checkpoint / "variant.json").exists()


def _weights(folder: Path) -> list[tuple[int, int]]:
    """Return size and modification time of a checkpoint's weight files; empty if it does not exist."""
    try:
        return [(status.st_size, status.st_mtime_ns) for status in map(Path.stat, sorted(folder.glob(ANY_SAFETENSORS)))]
    except FileNotFoundError:
        return []


def _unreadable(name: str) -> UnknownNameError:
    message = f"a checkpoint of the run {name} cannot be read; `llamarium info` on its folder says why"
    return UnknownNameError(message, code="unreadable_checkpoint", param="run")
