"""A probe: a function that answers a query about the model or a pass.

The parameters after the first are the fields of the query, with their types, defaults and bounds. A parameter of type
`Query` is the whole query, one of type `PageRequest` is the body of a POST. The result is the response: a dataclass of
the library, a view, `Numbers` as binary data, or an iterator of events.
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
"""Index of a layer, a head, a token or a row."""

Count = Annotated[int, Field(ge=1)]
"""Number of tokens, or a stride."""

Position = Annotated[int | None, Field(ge=0)]
"""Position of a token; None is the last one."""

Stop = Annotated[int | None, Field(ge=1)]
"""Exclusive end of a range of tokens; None is the end of the text."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A probe of the page.

    Attributes:
        function: Computes the response; its first parameter is an `OpenModel` or an `OpenPass`.
        about: Field of the request that errors of the library are attributed to.
    """

    function: Callable[..., object]
    about: str

    @property
    def is_streamed(self) -> bool:
        """True if the response is a stream of events."""
        return get_origin(self.answer) is Iterator

    @property
    def is_bulk(self) -> bool:
        """True if the response is binary."""
        return self.answer is Numbers

    @property
    def answer(self) -> Any:
        """Type of the response."""
        return inspect.signature(self.function).return_annotation

    def asked(self, path: str) -> type[Query] | type[PageRequest] | None:
        """Return the type of the query, or of the body of a POST; None if all fields are in the path."""
        whole_query = self._whole
        if whole_query is not None:
            return whole_query[1]
        fields: dict[str, Any] = {
            parameter.name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
            for parameter in self._parameters
            if f"{{{parameter.name}}}" not in path
        }
        if not fields:
            return None
        words = re.findall(r"[a-z]+", re.sub(r"\{.*?\}", "", path))
        return create_model(f"{''.join(map(str.capitalize, words))}Query", __base__=Query, **fields)

    def arguments(self, query: BaseModel | None) -> dict[str, object]:
        """Return the fields of a query as keyword arguments of the function."""
        if query is None:
            return {}
        return dict(query) if self._whole is None else {self._whole[0]: query}

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())[1:]

    @property
    def _whole(self) -> tuple[str, type[Query] | type[PageRequest]] | None:
        """Name and type of the parameter that is a whole query or body, or None."""
        kinds = (
            (parameter.name, parameter.annotation)
            for parameter in self._parameters
            if isinstance(parameter.annotation, type)
        )
        return next(((name, kind) for name, kind in kinds if issubclass(kind, Query | PageRequest)), None)
