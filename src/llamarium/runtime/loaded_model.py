"""A loaded model: the runner that answers, and the modules to read, hook and train. Never torch by itself.

With the C kernels a model answers without its modules, and so without torch. They are built at their first use, over
the same memory. From then on each request compares them with what they were; if they were edited, it runs on the
modules, and a warning says so once.
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

_looking = threading.RLock()
"""One thread at a time builds modules or compares them; a model may be built of another, so it can be taken twice."""


class LoadedModel:
    """A model's runner and its modules.

    `chosen` is the runner that was chosen at loading, None where the modules answer; `build` returns the modules over
    the same memory. `deterministic` refuses requests that the modules would have to answer. `check` is called once a
    request, before anything runs, and raises if a file that is in use has changed. `weights_of` is the model whose
    weights a learner's functions run over, None for any other model. `stored` returns the fingerprint of the stored
    bytes that the weights were made of.
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
        """Return a model that is its modules."""
        return cls(None, lambda: model, check=check)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config if self._chosen is None else self._chosen.config

    def with_runner(self, adapted: Runner, put_on: "Callable[[LlamaForCausalLM], None]") -> "LoadedModel":
        """Return this model with another runner; `put_on` changes the modules likewise when they are built."""
        assert self._chosen is not None

        def build() -> "LlamaForCausalLM":
            model = self.model
            put_on(model)
            return model

        return LoadedModel(adapted, build, deterministic=self._deterministic, check=self._check)

    def beside(self) -> "LoadedModel":
        """Return a model over the same weights, whose modules can be changed without this one's."""

        def build() -> "LlamaForCausalLM":
            from llamarium.runtime.shell import shell_of

            return shell_of(self.model)

        return LoadedModel(self._chosen, build, deterministic=self._deterministic, check=self._check)

    def with_modules(self) -> "LoadedModel":
        """Return the modules of this model, as they are now, as a model of its own."""
        return LoadedModel.of_modules(self.model, self._check)

    @property
    def model(self) -> "LlamaForCausalLM":
        """The modules: plain, editable, over the memory that the runner reads.

        CheckpointError if a file whose bytes are in use has been changed; NoModulesError if there can be none.
        """
        if self._check is not None:
            self._check()
        with _looking:
            if self._model is None:
                model = self._build()
                from llamarium.runtime.edits import ModuleSnapshot  # now that there are modules, there is torch

                self._snapshot = ModuleSnapshot(model, () if self._chosen is None else self._chosen.addresses)
                self._model = model
            return self._model

    def runner(self) -> Runner:
        """Return the runner of the next request; a new one if the modules have changed, so that old caches go.

        CheckpointError if a file whose bytes are in use has been changed; OptionError if the model was loaded as
        deterministic, and its modules have been edited.
        """
        if self._check is not None:
            self._check()
        if self._model is None and self._chosen is not None:
            return self._chosen
        with _looking:
            return self._look()

    def _look(self) -> Runner:
        from llamarium.runtime.module_runner import ModuleRunner

        model = self.model
        assert self._snapshot is not None
        is_edited, is_changed = self._snapshot.look(model)
        if self._chosen is not None and not is_edited:
            self._chosen = self._chosen.fresh() if is_changed else self._chosen
            return self._chosen
        if self._chosen is not None and self._modules is None:
            what = "a hook, an adapter, a patched method, a replaced weight"
            if self._deterministic:
                raise OptionError(
                    f"the model was loaded as deterministic, and its modules have been edited since ({what}), which "
                    "the C kernels do not see; load it without deterministic"
                )
            warn_caller(
                f"the model's modules have been edited ({what}): PyTorch answers from now on, as the C kernels do not "
                "see that"
            )
        if self._modules is None or is_changed:
            self._modules = ModuleRunner(model)
        return self._modules

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied deeply."""
        raise OptionError(
            "a loaded model cannot be pickled or deep-copied, as it refers to memory of this process; call "
            "llamarium.load() in the other process, or copy.deepcopy(llama.model) for modules of your own"
        )


def _no_modules() -> NoReturn:
    raise NoModulesError(
        "this model is functions in a process of their own, so there are no modules to read, edit or train; load the "
        "model whose weights they use for that"
    )


def runner_of(model: "LlamaForCausalLM") -> Runner:
    """Return a runner of modules as they are: edited ones, say."""
    return LoadedModel.of_modules(model).runner()
