"""The fields of a request's body: each is honoured, named as without effect, or refused, whatever the protocol.

A field that is declared is checked strictly, and null is as if it were not given. One that the official client has
and this server does not honour is a hint (`server/hints.py`) where it cannot make the answer wrong, else it stands in
`refused` with the reason. Any other is unknown, and refused as well.
`docs/reference/server.md` lists all of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, create_model, model_validator
from pydantic_core import PydanticCustomError

from llamarium.errors import show_value
from llamarium.sampling.params import GenerationOptions, Parameter, Taker, parameters_of
from llamarium.server.errors import ApiError
from llamarium.server.faults import REFUSED

_NESTED = ("content", "tool_calls", "output")  # lists within messages


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that are known and not honoured, and why."""

    hints: ClassVar[frozenset[str]] = frozenset()
    """Fields that have no effect (`server/hints.py`)."""

    dialog: ClassVar[str | None] = None
    """The field that holds a dialog, if one does."""

    @classmethod
    def check_length(cls, value: Any, most: int) -> None:
        """Refuse a dialog with more messages, parts and calls than `most`, the tokens that fit, before reading them."""
        if cls.dialog is None or not isinstance(value, dict):
            return
        count = _count(cast("dict[str, Any]", value).get(cls.dialog))
        if count > most:
            message = (
                f"{cls.dialog} is too long: it has {count:,} messages, parts and calls, each of which takes a token at "
                f"least; this model's maximum context length is {most} tokens: send fewer"
            )
            raise ApiError(400, message, code="context_length_exceeded", param=cls.dialog)

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        """Refuse fields by name; one that is null is as if it were not given."""
        if not isinstance(value, dict):
            return value
        for name in value:
            if name in cls.refused and value[name] is not None:
                raise PydanticCustomError(REFUSED, "{reason}", {"field": name, "reason": cls.refused[name]})
        return {name: item for name, item in value.items() if name not in cls.refused}


ModelT = TypeVar("ModelT", bound=BaseModel)


def with_parameters(
    taker: Taker, field_of: Callable[[Parameter], tuple[Any, Any]] = lambda one: (one.kind | None, None)
) -> Callable[[type[ModelT]], type[ModelT]]:
    """Return a decorator that adds a field for each of a taker's parameters, optional unless `field_of` says more."""

    def extended(model: type[ModelT]) -> type[ModelT]:
        added: dict[str, Any] = {one.name: field_of(one) for one in parameters_of(taker)}
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)

    return extended


def parameters_in(body: BaseModel, taker: Taker) -> GenerationOptions:
    """Return the values of the fields that `with_parameters` has added."""
    return cast(GenerationOptions, {one.name: getattr(body, one.name) for one in parameters_of(taker)})


def _count(said: Any) -> int:
    """Count the objects in a list and in the lists of those objects; of anything else return 0."""
    if not isinstance(said, list):
        return 0
    objects = [cast("dict[str, Any]", one) for one in cast("list[Any]", said) if isinstance(one, dict)]
    return len(objects) + sum(_count(inner) for one in objects for name in _NESTED if (inner := one.get(name)))


def of_type(name: str) -> Tag:
    """Return the tag of a kind of object; in brackets, unlike any field's name."""
    return Tag(f"<{name}>")


def by_type(default: str | None = None) -> Discriminator:
    """Return a discriminator of kinds of objects by their `type`, with an optional default."""

    def name(value: Any) -> str | None:
        found = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return None if found is None else f"<{found if isinstance(found, str) else show_value(found)}>"

    return Discriminator(name)
