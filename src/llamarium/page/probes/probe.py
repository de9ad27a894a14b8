"""A probe: a question about the model or a pass, as one function.

Its parameters behind the first are the query: their types, defaults and bounds are what a request may ask. A parameter
whose type is a `Query` is the whole query, one that is a `PageRequest` the body of a POST. What the function returns is
the answer: one of the library's dataclasses, a view, numbers in bulk, or an iterator of events.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

from pydantic import BaseModel, Field, create_model

from llamarium.page.binary import Numbers
from llamarium.page.schema.base import PageRequest, Query

Index = Annotated[int, Field(ge=0)]
"""Of a layer, a head, a token or a row."""

Count = Annotated[int, Field(ge=1)]
"""Of tokens, or of every so many."""

Position = Annotated[int | None, Field(ge=0)]
"""A token's; the last one where left out."""

Stop = Annotated[int | None, Field(ge=1)]
"""Up to this one, which is left out; to the end where it is left out itself."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A question of the page.

    Attributes:
        function: Answers it; its first parameter is an `OpenModel` or an `OpenPass`.
        about: The field that errors of the library are about.
    """

    function: Callable[..., object]
    about: str

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events."""
        return get_origin(self.answer) is Iterator

    @property
    def is_bulk(self) -> bool:
        """Whether the answer is numbers as bytes."""
        return self.answer is Numbers

    @property
    def answer(self) -> Any:
        """The type of the answer."""
        return inspect.signature(self.function).return_annotation

    def asked(self, path: str) -> type[Query] | type[PageRequest] | None:
        """Return the type of the query, or of the body of a POST; None where nothing is asked but the path."""
        whole = self._whole
        if whole is not None:
            return whole[1]
        fields: dict[str, Any] = {
            one.name: (one.annotation, ... if one.default is one.empty else one.default)
            for one in self._parameters
            if f"{{{one.name}}}" not in path
        }
        if not fields:
            return None
        words = re.findall(r"[a-z]+", re.sub(r"\{.*?\}", "", path))
        return create_model(f"{''.join(map(str.capitalize, words))}Query", __base__=Query, **fields)

    def arguments(self, given: BaseModel | None) -> dict[str, object]:
        """Return what was asked as the function takes it."""
        if given is None:
            return {}
        return dict(given) if self._whole is None else {self._whole[0]: given}

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())[1:]

    @property
    def _whole(self) -> tuple[str, type[Query] | type[PageRequest]] | None:
        """The parameter that is a whole query or body, and its type."""
        kinds = ((one.name, one.annotation) for one in self._parameters if isinstance(one.annotation, type))
        return next(((name, kind) for name, kind in kinds if issubclass(kind, Query | PageRequest)), None)
