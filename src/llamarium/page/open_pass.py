"""The context of a probe: the model with its engine, and usually a forward pass with cached activations."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import State

from llamarium.generation.text_engine import TextEngine
from llamarium.page.binary import Numbers
from llamarium.page.executor import Executor, Pass
from llamarium.page.passes import Passes
from llamarium.page.schema.passes import ActivationQuery
from llamarium.page.selection import check_index, select

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.trace import Trace


@dataclass(frozen=True, slots=True)
class OpenModel:
    """The model and its engine, for a probe in a worker thread.

    Attributes:
        state: State of the application: cached passes and the server's options.
    """

    llama: "Llama"
    engine: TextEngine
    state: State

    @property
    def layers(self) -> range:
        """All layers of the model."""
        return range(self.llama.config.num_hidden_layers)

    def check_token(self, name: str, token_id: int | None) -> None:
        """Raise QuestionError for an id outside the vocabulary."""
        check_index(name, token_id, self.llama.config.vocab_size)

    def check_layer(self, layer: int) -> None:
        """Raise QuestionError for a layer that the model does not have."""
        check_index("layer", layer, len(self.layers))


@dataclass(frozen=True, slots=True)
class OpenPass(OpenModel):
    """A forward pass; `llama` is the model with the pass's adapter."""

    forward_pass: Pass

    @property
    def kept(self) -> Passes:
        """Cache of passes and their activations."""
        return self.state.passes

    @property
    def executor(self) -> Executor:
        """Executor of passes."""
        return Executor.of(self.llama, self.engine)

    def position(self, position: int | None) -> int:
        """Check and return a token's position; None is the last one."""
        check_index("position", position, len(self.forward_pass.ids))
        return len(self.forward_pass.ids) - 1 if position is None else position

    def numbers(self, name: str, layer: int | None, rows: range) -> NDArray[np.float32]:
        """Return an activation at the positions `rows`."""
        return self.kept.numbers(self.executor, self.forward_pass, name, layer, rows).values

    def select(self, name: str, query: ActivationQuery) -> Numbers:
        """Return the part of an activation that a query selects."""
        return select(self.kept, self.executor, self.forward_pass, name, query)

    def trace(self, names: Collection[str], layers: Collection[int], rows: range | None = None) -> "Trace":
        """Return activations as a `Trace`, at the positions `rows` or all."""
        every = range(len(self.forward_pass.ids)) if rows is None else rows
        return self.kept.trace(self.executor, self.forward_pass, names, layers, every)
