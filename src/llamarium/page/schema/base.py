"""Base classes of the page's queries and views."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, field_validator

from llamarium.server.fields import Body

Dtype = Literal["float32", "float16", "uint8"]
"""Of numbers in a binary response."""

MAX_INDEX = 2**31 - 1
"""Of anything that a query counts."""


class Query(BaseModel):
    """Base of a path's query parameters; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if isinstance(value, int) and value > MAX_INDEX:
            raise ValueError(f"expected {MAX_INDEX} at most")
        return value


class PageRequest(Body):
    """Base of the page's request bodies; unknown fields are refused."""

    is_closed: ClassVar[bool] = True


class View(BaseModel):
    """Base of a response for which the library has no dataclass."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


def has_only_finite(value: object) -> bool:
    """Whether every number in a view or a dataclass can be said in JSON, which has neither NaN nor infinity."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(has_only_finite, cast("Mapping[object, object]", value).values()))
    if isinstance(value, tuple | list):
        return all(map(has_only_finite, cast("Sequence[object]", value)))
    if isinstance(value, View):
        return all(has_only_finite(item) for _, item in value)
    if is_dataclass(value):
        return all(has_only_finite(getattr(value, field.name)) for field in fields(value))
    return True


class EndView(View):
    """The last event of a stream that came to its end."""

    type: Literal["end"] = "end"
