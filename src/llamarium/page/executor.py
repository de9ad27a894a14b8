"""Forward passes of the page and their execution: by the engine's runner, or by modules for experiments.

No torch at import.
"""

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamarium.adapters.load import with_adapter
from llamarium.errors import UnknownNameError
from llamarium.extras import need_torch
from llamarium.generation.text_engine import TextEngine
from llamarium.inspect.trace import KeptPass, Trace
from llamarium.page.schema.passes import ExperimentFields
from llamarium.runtime.runner import CacheDtype, Runner

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.model import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass of the model over a text.

    Attributes:
        id: Hash of the other fields.
        ids: Token ids.
        adapter: Name of the adapter, or None.
        adapter_idx: Index of the runner's adapter, -1 for none.
        experiment: Changes to the model, or None.
    """

    id: str
    ids: tuple[int, ...]
    adapter: str | None = None
    adapter_idx: int = -1
    experiment: ExperimentFields | None = None

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        adapter: str | None = None,
        adapter_idx: int = -1,
        experiment: ExperimentFields | None = None,
    ) -> "Pass":
        """Return the pass over token ids, with the hash of all arguments as its id."""
        arguments = [
            list(ids),
            adapter,
            *([adapter_idx] if adapter else []),
            None if experiment is None else experiment.model_dump(),
        ]
        pass_id = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:24]
        return cls(pass_id, tuple(ids), adapter, adapter_idx, experiment)


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs forward passes.

    Attributes:
        runner: The engine's runner, for passes without an experiment.
        modules: Returns the model's PyTorch modules for experiments, and builds them if needed.
        kv_cache_dtype: KV cache dtype of the runner; the modules keep keys and values as computed.
    """

    runner: Runner
    modules: "Callable[[], LlamaForCausalLM]"
    kv_cache_dtype: CacheDtype = "auto"

    @classmethod
    def of(cls, llama: "Llama", engine: TextEngine) -> "Executor":
        """Return an executor with an engine's runner and KV cache dtype."""
        return cls(engine.runner, lambda: llama.model, engine.kv_cache_dtype)

    def begin(self, forward_pass: Pass, after: "KeptPass | EditedPass | None" = None) -> "KeptPass | EditedPass":
        """Return a tracer for a pass; it may reuse the KV cache of `after`, a pass that is no longer needed."""
        if forward_pass.experiment is not None:
            return EditedPass(self.modules, forward_pass.ids, forward_pass.experiment)
        return KeptPass(
            self.runner,
            forward_pass.ids,
            adapter=forward_pass.adapter_idx,
            kv_cache_dtype=self.kv_cache_dtype,
            after=after if isinstance(after, KeptPass) else None,
        )

    def runner_of(self, forward_pass: Pass) -> Runner:
        """Return the runner that computes a pass; experiments need PyTorch and run on edited modules."""
        from llamarium.runtime.loaded_model import runner_of

        if forward_pass.experiment is None:
            return self.runner
        need_torch("an experiment")
        from llamarium.inspect.interventions.edits import edited

        with edited(self.modules()) as model:
            return runner_of(model)

    def kv_dtype_of(self, forward_pass: Pass) -> str:
        """Return the dtype of a pass's keys and values."""
        is_packed = forward_pass.experiment is None and self.kv_cache_dtype != "auto"
        return self.kv_cache_dtype if is_packed else self.runner_of(forward_pass).kv_dtype


@dataclass(frozen=True, slots=True)
class EditedPass:
    """The pass of an experiment; the model is edited only during the pass, and no KV cache is kept."""

    modules: "Callable[[], LlamaForCausalLM]"
    ids: tuple[int, ...]
    experiment: ExperimentFields

    def trace(self, **options: Any) -> Trace:
        """Trace the pass; arguments and errors are those of `llamarium.inspect.trace.trace`."""
        need_torch("an experiment")
        from llamarium.inspect.interventions.edits import edited
        from llamarium.inspect.interventions.experiments import Experiment, trace_experiment

        experiment = Experiment(**self.experiment.model_dump())
        with edited(self.modules(), (), experiment) as model:
            return trace_experiment(model, self.ids, experiment, **options)


class AdaptedModels:
    """Models with one of the engine's adapters each, over the same base weights; created on first use and cached."""

    def __init__(self) -> None:
        self._made: dict[int, Llama] = {}
        self._lock = threading.Lock()

    def of(self, llama: "Llama", engine: TextEngine, forward_pass: Pass | None) -> "Llama":
        """Return the model with the pass's adapter, or the model itself if the pass has none."""
        if forward_pass is None or forward_pass.adapter is None:
            return llama
        with self._lock:
            served = {adapter.number: adapter.saved for adapter in engine.adapters.values()}
            self._made = {number: adapted_model for number, adapted_model in self._made.items() if number in served}
            if forward_pass.adapter_idx not in served:
                message = f"the adapter {forward_pass.adapter} of this pass has been unloaded"
                raise UnknownNameError(message, code="unknown_adapter", param="adapter")
            if forward_pass.adapter_idx not in self._made:
                adapted = copy.copy(llama)
                adapted.loaded = with_adapter(llama.loaded.beside(), served[forward_pass.adapter_idx])
                self._made[forward_pass.adapter_idx] = adapted
            return self._made[forward_pass.adapter_idx]
