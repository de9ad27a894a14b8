"""JSON values of the dataclasses that this folder returns."""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, cast

import numpy as np

_AXES = re.compile(r"_[A-Z][A-Z0-9]*$")


class JsonView:
    """Base of a dataclass with a JSON form: its fields without the axes in their names, and computed properties."""

    __slots__ = ()
    computed: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return as_json(self)


def as_json(value: Any) -> Any:
    """Return dataclasses as dicts, sequences and arrays as lists, and other values as they are."""
    if is_dataclass(value):
        names = (*(field.name for field in fields(value)), *getattr(value, "computed", ()))
        return {_AXES.sub("", name): as_json(getattr(value, name)) for name in names}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(one) for one in cast("Sequence[Any]", value)]
    return value
