"""A pass with what reads it: the model, its engine and the numbers that are kept. A dependency of the routes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import numpy as np
from fastapi import Depends, Request
from numpy.typing import NDArray

from llamarium.generation.text_engine import TextEngine
from llamarium.page.binary import Numbers
from llamarium.page.executor import Executor, Pass
from llamarium.page.passes import Passes
from llamarium.page.schema.passes import ActivationQuery
from llamarium.page.selection import check_index, select
from llamarium.page.work import passes_of, work_on

if TYPE_CHECKING:
    from llamarium.api import Llama
    from llamarium.inspect.trace import Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenPass:
    """A pass in a thread that may take long; `llama` is the model with the pass's adapter on it."""

    llama: "Llama"
    engine: TextEngine
    kept: Passes
    one: Pass

    @property
    def layers(self) -> range:
        """All layers of the model."""
        return range(self.llama.config.num_hidden_layers)

    @property
    def executor(self) -> Executor:
        """What runs passes."""
        return Executor.of(self.llama, self.engine)

    def check_token(self, name: str, token_id: int | None) -> None:
        """Refuse an id outside the vocabulary."""
        check_index(name, token_id, self.llama.config.vocab_size)

    def check_layer(self, layer: int) -> None:
        """Refuse a layer that the model does not have."""
        check_index("layer", layer, len(self.layers))

    def numbers(self, name: str, layer: int | None, rows: range) -> NDArray[np.float32]:
        """Return an activation at some tokens."""
        return self.kept.numbers(self.executor, self.one, name, layer, rows).values

    def select(self, name: str, query: ActivationQuery) -> Numbers:
        """Return the part of an activation that a query names."""
        return select(self.kept, self.executor, self.one, name, query)

    def trace(self, names: Collection[str], layers: Collection[int], rows: range | None = None) -> "Trace":
        """Return activations as the library's functions take them; of all tokens where no rows are given."""
        every = range(len(self.one.ids)) if rows is None else rows
        return self.kept.trace(self.executor, self.one, names, layers, every)


@dataclass(frozen=True, slots=True)
class RequestedPass:
    """The pass that a request names."""

    request: Request
    kept: Passes
    one: Pass

    def position(self, position: int | None) -> int:
        """Return a token's position in the pass; the last where none is named."""
        check_index("position", position, len(self.one.ids))
        return len(self.one.ids) - 1 if position is None else position

    async def read(self, field: str, work: Callable[[OpenPass], T]) -> T:
        """Return what `work` makes of the pass, in a thread; errors of the library name `field` of the request."""
        return await work_on(
            self.request, field, lambda llama, engine: work(OpenPass(llama, engine, self.kept, self.one)), self.one
        )


async def _requested(request: Request, pass_id: str) -> RequestedPass:
    kept = passes_of(request)
    return RequestedPass(request, kept, kept.find(pass_id))


OfPass = Annotated[RequestedPass, Depends(_requested)]
"""The pass whose id the path names."""
