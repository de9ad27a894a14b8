"""The training runs that the server was started with; no other folder is read. No torch at import."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarium.checkpoints.open import OpenedModel, open_model
from llamarium.config import ModelConfig
from llamarium.errors import InputError, LlamariumError, OptionError, TrainingError, UnknownNameError, escape
from llamarium.file_names import ANY_SAFETENSORS
from llamarium.hub.folders import is_adapter
from llamarium.page.compare.others import Side
from llamarium.page.compare.references import OwnTokenizers
from llamarium.runtime.runner import Runner
from llamarium.train.report.history import History
from llamarium.train.report.page import spread
from llamarium.train.state.checkpoint import checkpoint_folder, checkpoint_steps

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.train.report.embeddings import RowPaths

MAX_MOMENTS = 60
"""Maximum number of checkpoints shown per run; if there are more, they are evenly spaced."""


class Runs:
    """Training runs by folder name; new checkpoints in a folder are found.

    OptionError if a folder has no checkpoint or only adapters, or if two have the same name.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders, self._models = dict[str, Path](), dict[str, OpenedModel]()
        self._tokenizers = OwnTokenizers()
        for folder in folders:
            name = folder.resolve().name
            if name in self._folders:
                raise OptionError(f"{escape(folder)}: two runs are called {escape(name)}; rename one of the folders")
            newest = newest_checkpoint(folder)
            if newest is None:
                raise OptionError(
                    f"{escape(folder)}: holds no checkpoint; expected the folder of a training run, with step-00000500 "
                    "or the like in it"
                )
            if is_adapter(newest):
                raise OptionError(
                    f"{escape(folder)}: its checkpoints are adapters, which have no table and no heads of their own; "
                    "give some of them as --adapter NAME=FOLDER, and compare them with their base"
                )
            self._folders[name] = folder

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs."""
        return tuple(self._folders)

    @property
    def readable(self) -> tuple[str, ...]:
        """Names of the runs whose newest checkpoint can be opened."""
        names: list[str] = []
        for name in self._folders:
            with suppress(UnknownNameError):
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

    def steps(self, name: str) -> list[int]:
        """Return the steps of a run's checkpoints in order, up to `MAX_MOMENTS`."""
        return spread(checkpoint_steps(self.folder(name)), MAX_MOMENTS)

    def groups(self, name: str) -> list[Mapping[str, Any]]:
        """Return the groups of answers in a run's journal, up to `MAX_MOMENTS`; none without a journal."""
        try:
            return spread(History.read(self.folder(name)).of("group"), MAX_MOMENTS)
        except TrainingError:
            return []

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

    def row_paths(self, name: str, ids: Sequence[int]) -> "RowPaths":
        """Return the paths of embedding rows over a run's checkpoints."""
        folder, steps = self.folder(name), self.steps(name)
        from llamarium.train.report.embeddings import row_paths

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


def _weights(folder: Path) -> list[tuple[int, int]]:
    """Return size and modification time of a checkpoint's weight files; empty if it does not exist."""
    try:
        return [(one.st_size, one.st_mtime_ns) for one in map(Path.stat, sorted(folder.glob(ANY_SAFETENSORS)))]
    except FileNotFoundError:
        return []


def _unreadable(name: str) -> UnknownNameError:
    message = f"a checkpoint of the run {name} cannot be read; `llamarium info` on its folder says why"
    return UnknownNameError(message, code="unreadable_checkpoint", param="run")
