"""A loaded model: its runner, and its modules once they are used. Imports torch only then.

With the C kernels a model runs without modules, and so without torch. The modules are built at their first use, over
the same memory. From then on, each request checks whether they were edited; if so, it runs on the modules, with one
warning.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from llamarium.config import ModelConfig
from llamarium.errors import NoModulesError, OptionError, warn_caller
from llamarium.runtime.runner import Runner

if TYPE_CHECKING:
    from llamarium.model import LlamaForCausalLM
    from llamarium.runtime.edits import ModuleSnapshot

_modules_lock = threading.RLock()
"""Held while modules are built or compared. Reentrant, because a model's modules may be built from another model's."""


class LoadedModel:
    """A model's runner and its modules.

    Args:
        chosen: The runner chosen at loading; None if the modules run themselves.
        build: Builds the modules over the same memory; None if there can be none.
        deterministic: Refuse requests that would have to run on edited modules.
        check: Called before each request; raises if a memory-mapped file has changed.
        weights_of: Name of the model whose weights a learner's functions use; None for other models.
        stored: Returns a fingerprint of the stored bytes of the weights.
    """

    def __init__(
        self,
        chosen: Runner | None,
        build: "Callable[[], LlamaForCausalLM] | None",
        *,
        deterministic: bool = False,
        check: Callable[[], None] | None = None,
        weights_of: str | None = None,
        stored: Callable[[], str] | None = None,
    ) -> None:
        self._chosen, self.weights_of, self.stored = chosen, weights_of, stored
        self.has_modules = build is not None
        self._build, self._check = build or _no_modules, check
        self._deterministic = deterministic
        self._model: LlamaForCausalLM | None = None
        self._snapshot: ModuleSnapshot | None = None
        self._modules: Runner | None = None

    @classmethod
    def of_modules(cls, model: "LlamaForCausalLM", check: Callable[[], None] | None = None) -> "LoadedModel":
        """Return a model that runs on the given modules."""
        return cls(None, lambda: model, check=check)

    @property
    def config(self) -> ModelConfig:
        """The model configuration."""
        return self.model.config if self._chosen is None else self._chosen.config

    def with_runner(self, adapted: Runner, put_on: "Callable[[LlamaForCausalLM], None]") -> "LoadedModel":
        """Return this model with another runner; `put_on` applies the same change to the modules once built."""
        assert self._chosen is not None

        def build() -> "LlamaForCausalLM":
            model = self.model
            put_on(model)
            return model

        return LoadedModel(adapted, build, deterministic=self._deterministic, check=self._check)

    def beside(self) -> "LoadedModel":
        """Return a model over the same weights with separate modules, which can be changed independently."""

        def build() -> "LlamaForCausalLM":
            from llamarium.runtime.shell import shell_of

            return shell_of(self.model)

        return LoadedModel(self._chosen, build, deterministic=self._deterministic, check=self._check)

    def with_modules(self) -> "LoadedModel":
        """Return a model that runs on this model's current modules."""
        return LoadedModel.of_modules(self.model, self._check)

    @property
    def model(self) -> "LlamaForCausalLM":
        """The modules, over the memory that the runner reads; built at the first access.

        Raises:
            CheckpointError: If a memory-mapped file has changed.
            NoModulesError: If this model has no modules.
        """
        if self._check is not None:
            self._check()
        with _modules_lock:
            if self._model is None:
                model = self._build()
                from llamarium.runtime.edits import ModuleSnapshot  # imports torch, which the modules have imported

                self._snapshot = ModuleSnapshot(model, () if self._chosen is None else self._chosen.addresses)
                self._model = model
            return self._model

    def runner(self) -> Runner:
        """Return the runner for the next request: a new one if the modules have changed, which invalidates KV caches.

        Raises:
            CheckpointError: If a memory-mapped file has changed.
            OptionError: If the model was loaded as deterministic and its modules have been edited.
        """
        if self._check is not None:
            self._check()
        if self._model is None and self._chosen is not None:
            return self._chosen
        with _modules_lock:
            return self._compare()

    def _compare(self) -> Runner:
        from llamarium.runtime.module_runner import ModuleRunner

        model = self.model
        assert self._snapshot is not None
        is_edited, is_changed = self._snapshot.look(model)
        if self._chosen is not None and not is_edited:
            self._chosen = self._chosen.fresh() if is_changed else self._chosen
            return self._chosen
        if self._chosen is not None and self._modules is None:
            examples = "a hook, an adapter, a patched method or a replaced weight"
            if self._deterministic:
                raise OptionError(
                    f"the model was loaded as deterministic, but its modules have been edited ({examples}), which the "
                    "C kernels ignore; load it without deterministic"
                )
            warn_caller(
                f"the model's modules have been edited ({examples}), which the C kernels ignore: PyTorch answers from "
                "now on"
            )
        if self._modules is None or is_changed:
            self._modules = ModuleRunner(model)
        return self._modules

    def __reduce__(self) -> NoReturn:
        """Raise an OptionError: a loaded model cannot be pickled or deep-copied."""
        raise OptionError(
            "a loaded model cannot be pickled or deep-copied, because it refers to memory of this process; call "
            "llamarium.load() in the other process, or copy.deepcopy(llama.model) for a copy of the modules"
        )


def _no_modules() -> NoReturn:
    raise NoModulesError(
        "this model runs functions in a separate process, so it has no modules to read, edit or train; load the model "
        "whose weights they use instead"
    )


def runner_of(model: "LlamaForCausalLM") -> Runner:
    """Return a runner for modules, edited or not."""
    return LoadedModel.of_modules(model).runner()
