"""A loaded model: the runner that answers, and the modules that people read, hook and train. Never torch by itself.

With the C kernels a model answers without its modules, and so without torch. They are built when somebody asks for
them, over the same memory. From then on every request asks once whether they are still what they were; if not, the
request runs on the modules, and a warning says so once.
"""

import copy
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from llamarium.config import ModelConfig
from llamarium.errors import OptionError
from llamarium.runtime.native.adapters import Adapter
from llamarium.runtime.native.runner import NativeRunner
from llamarium.runtime.runner import Runner

if TYPE_CHECKING:
    from llamarium.model import LlamaForCausalLM
    from llamarium.runtime.edits import Snapshot
    from llamarium.runtime.module_runner import ModuleRunner

_looking = threading.RLock()
"""Threads that ask for a model's modules get the same, and each learns of an edit; a model may be built of another."""


class LoadedModel:
    """A model's runner and its modules.

    Args:
        native: The runner that was chosen when the model was loaded; None where the C kernels cannot run it.
        build: Returns the modules over the same memory.
        deterministic: Refuse a request that the modules would have to answer.
        check: Called once a request, before anything runs; raises if a file that is in use has changed.
    """

    def __init__(
        self,
        native: NativeRunner | None,
        build: "Callable[[], LlamaForCausalLM]",
        *,
        deterministic: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._native = native
        self._build, self._check = build, check
        self._deterministic = deterministic
        self._model: LlamaForCausalLM | None = None
        self._snapshot: Snapshot | None = None
        self._modules: ModuleRunner | None = None

    @classmethod
    def of_modules(cls, model: "LlamaForCausalLM", check: Callable[[], None] | None = None) -> "LoadedModel":
        """Return a model that is its modules."""
        return cls(None, lambda: model, check=check)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config if self._native is None else self._native.config

    @property
    def native(self) -> NativeRunner | None:
        """The runner in C, where there is one; `runner` says whether it still answers."""
        return self._native

    def with_adapter(self, adapter: Adapter, put_on: "Callable[[LlamaForCausalLM], None]") -> "LoadedModel":
        """Return this model with an adapter that C adds; the modules get it when somebody asks for them.

        Args:
            adapter: For C.
            put_on: Puts the same adapter on the modules, which are this model's, in place.
        """
        assert self._native is not None

        def build() -> "LlamaForCausalLM":
            model = self.model
            put_on(model)
            return model

        weights, input_bits = self._native.weights, self._native.input_bits
        native = NativeRunner(self.config, weights, [adapter], default_adapter=0, input_bits=input_bits)
        return LoadedModel(native, build, deterministic=self._deterministic, check=self._check)

    def beside(self) -> "LoadedModel":
        """Return a model over the same weights, whose modules can be changed without this one's."""

        def build() -> "LlamaForCausalLM":
            from llamarium.runtime.shell import shell_of

            return shell_of(self.model)

        return LoadedModel(self._native, build, deterministic=self._deterministic, check=self._check)

    def with_modules(self) -> "LoadedModel":
        """Return the modules of this model, as they are now, as a model of its own."""
        return LoadedModel.of_modules(self.model, self._check)

    @property
    def model(self) -> "LlamaForCausalLM":
        """The modules: plain, editable, over the memory that the runner reads.

        Raises:
            CheckpointError: If a file whose bytes are in use has been changed.
        """
        if self._check is not None:
            self._check()
        with _looking:
            if self._model is None:
                from llamarium.runtime.edits import Snapshot

                model = self._build()
                weights = () if self._native is None else self._native.weights.values()
                self._snapshot = Snapshot(model, [weight.data.ctypes.data for weight in weights])
                self._model = model
            return self._model

    def runner(self) -> Runner:
        """Return what answers the next request; another object where the modules have been changed since the last one.

        So nobody goes on with keys and values that other weights have made.

        Raises:
            CheckpointError: If a file whose bytes are in use has been changed.
            OptionError: If the model was loaded as deterministic, and its modules have been edited.
        """
        if self._check is not None:
            self._check()
        if self._model is None and self._native is not None:
            return self._native
        with _looking:
            return self._look()

    def _look(self) -> Runner:
        from llamarium.runtime.module_runner import ModuleRunner

        model = self.model
        assert self._snapshot is not None
        is_edited, is_changed = self._snapshot.look(model)
        if self._native is not None and not is_edited:
            self._native = copy.copy(self._native) if is_changed else self._native
            return self._native
        if self._native is not None and self._modules is None:
            self._say_edited()
        if self._modules is None or is_changed:
            self._modules = ModuleRunner(model)
        return self._modules

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied deeply.

        Raises:
            OptionError: Always.
        """
        raise OptionError(
            "a loaded model cannot be pickled or deep-copied, as it refers to memory of this process; call "
            "llamarium.load() in the other process, or copy.deepcopy(llama.model) for modules of your own"
        )

    def _say_edited(self) -> None:
        if self._deterministic:
            raise OptionError(
                "the model was loaded as deterministic, and its modules have been edited since (a hook, an adapter, a "
                "patched method, a replaced weight), which the C kernels do not see; load it without deterministic"
            )
        warnings.warn(
            "the model's modules have been edited (a hook, an adapter, a patched method, a replaced weight): PyTorch "
            "answers from now on, as the C kernels do not see that",
            stacklevel=5,
        )
