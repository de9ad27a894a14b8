"""The fields of a request's body, whatever the protocol: honoured, hints, refused, or unknown.

A field that a body declares is checked strictly, and null is as if it were not given. What is known of other names
stands in one table (`server/field_table.py`). An unknown name is taken as if it were not there and reported
(`server/hints.py`), unless it looks like a misspelling of a name that has an effect: that is refused with the right
name. So is a name that another request of this server honours, and this one does not: the answer would be another
one than was asked for. `docs/reference/server.md` lists all of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from llamarium.errors import show_value
from llamarium.sampling.parameter import Parameter, Taker
from llamarium.sampling.params import PARAMETERS, GenerationOptions, parameters_of
from llamarium.server.errors import ApiError
from llamarium.server.faults import REFUSED, UNKNOWN, refusal_of
from llamarium.server.field_table import TABLE, Hint, Refused

_NESTED = ("content", "tool_calls", "output")  # lists within messages
_MOST_UNKNOWN = 1000  # names of one object that may be unknown, each of which is compared with the right ones
_LONGEST_NAME = 32  # of a name that may be a misspelling
_FEWEST_LETTERS, _FEWEST_FOR_TWO = 5, 10  # of names in which one letter may be wrong, and two
_OFF_ELSEWHERE: Mapping[str, int] = {"top_k": -1, "seed": -1}
"""What other servers document as "off" of a sampling parameter, beside this server's neutral value."""

_DEFAULTS: Mapping[str, Sequence[object]] = {
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto", "none"),
}
"""Values that say what is so without the field, beside a parameter's neutral one; a choice is without tools here."""

_generating: dict[str, type["Body"]] = {}


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Fields that are known and not honoured (`of_table`)."""

    hints: ClassVar[frozenset[str]] = frozenset()
    """Fields that have no effect (`of_table`)."""

    dialog: ClassVar[str | None] = None
    """The field that holds a dialog, if one does."""

    is_closed: ClassVar[bool] = False
    """Whether unknown names are refused, since nothing but this project sends such a body."""

    generates: ClassVar[bool] = False
    """Whether it asks for text, so that what others of this kind honour would change its answer."""

    _without_effect: tuple[str, ...] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.generates:
            _generating[cls.__name__] = cls

    has_no_effect: ClassVar[bool] = False
    """Whether a whole object of this kind has none."""

    may_have_no_effect: ClassVar[frozenset[str]] = frozenset({"chat_template_kwargs", "arguments"})
    """Fields without effect, and those whose values tell whether they have one."""

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The names that were given and are no fields of this model: hints, fields that are off, unknown names."""
        return self._without_effect

    @classmethod
    def check_length(cls, value: Any, most: int) -> None:
        """Refuse a dialog with more messages, parts and calls than `most`, the tokens that fit, before reading them."""
        if cls.dialog is None or not isinstance(value, dict):
            return
        count = _count(cast("dict[str, Any]", value).get(cls.dialog))
        if count > most:
            message = (
                f"{cls.dialog} is too long: it has {count:,} messages, parts and calls, and each takes at least "
                f"one token; this model's maximum context length is {most} tokens: send fewer"
            )
            raise ApiError(400, message, code="context_length_exceeded", param=cls.dialog)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Take the fields that are declared, note the others, and refuse those that would change the answer.

        A context is a list, to which this class is appended if some of the fields may have no effect.
        """
        if not isinstance(value, dict):
            return handler(value)
        given, declared = cast("dict[str, Any]", value), _declared(cls)
        others = [name for name in given if name not in declared]
        is_doubtful = others or cls.has_no_effect or not cls.may_have_no_effect.isdisjoint(given)
        if is_doubtful and info.context is not None:
            info.context.append(cls)
        if not others:
            return handler(given)
        _check_others(cls, others, given)
        body = handler({name: item for name, item in given.items() if name in declared})
        known = cls.hints | cls.refused.keys()
        body._without_effect = tuple(name for name in others if given[name] is not None or name not in known)
        return body


ModelT = TypeVar("ModelT", bound=Body)
AnyModelT = TypeVar("AnyModelT", bound=BaseModel)


def validated(kind: type[AnyModelT], body: Any, doubtful: list[type[Body]] | None = None) -> AnyModelT:
    """Return the validated body; ApiError 400 that names a field.

    `doubtful` gets the kind of each of its objects that has fields which may have no effect.
    """
    try:
        return kind.model_validate(body, context=doubtful)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise refusal_of(faults, body) from None


def of_table(*holders: str) -> Callable[[type[ModelT]], type[ModelT]]:
    """Return a decorator that adds the table's rows of some holders: hints whose values are read become fields."""
    rows = {name: known for holder in holders for name, known in TABLE[holder].items()}

    def extended(model: type[ModelT]) -> type[ModelT]:
        own = {name: known for name, known in rows.items() if name not in model.model_fields}
        added: dict[str, Any] = {
            name: (known.kind | None, None)
            for name, known in own.items()
            if isinstance(known, Hint) and known.kind is not None
        }
        made = create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)
        made.hints = model.hints | {name for name, known in rows.items() if isinstance(known, Hint)}
        made.may_have_no_effect = model.may_have_no_effect | made.hints
        made.refused = {**model.refused, **{name: known for name, known in own.items() if isinstance(known, Refused)}}
        return made

    return extended


def with_parameters(
    taker: Taker, field_of: Callable[[Parameter], tuple[Any, Any]] = lambda one: (one.kind | None, None)
) -> Callable[[type[AnyModelT]], type[AnyModelT]]:
    """Return a decorator that adds a field for each of a taker's parameters, optional unless `field_of` says more."""

    def extended(model: type[AnyModelT]) -> type[AnyModelT]:
        added: dict[str, Any] = {one.name: field_of(one) for one in parameters_of(taker)}
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)

    return extended


def parameters_in(body: BaseModel, taker: Taker) -> GenerationOptions:
    """Return the values of the fields that `with_parameters` has added."""
    values = {one.name: getattr(body, one.name) for one in parameters_of(taker)}
    for name, off in _OFF_ELSEWHERE.items():
        if name in values and values[name] == off:
            values[name] = PARAMETERS[name].neutral
    return cast(GenerationOptions, values)


# --- names that a body does not declare -------------------------------------------------------------------------------


@cache
def _declared(body: type[Body]) -> frozenset[str]:
    """Return the names of a body's fields, as clients write them."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def _check_others(body: type[Body], others: list[str], given: Mapping[str, Any]) -> None:
    """Refuse names that are no fields of a body: by the table, as a misspelling, or as another request's field."""
    elsewhere = _honoured_elsewhere(body)
    unknown = [name for name in others if not (name in body.refused or name in body.hints or name in elsewhere)]
    if len(unknown) > _MOST_UNKNOWN and not body.is_closed:
        advice = f"; there are {len(unknown):,} unknown fields; at most {_MOST_UNKNOWN:,} are accepted"
        raise PydanticCustomError(UNKNOWN, "", {"field": unknown[_MOST_UNKNOWN], "advice": advice})
    for name in others:
        value = given[name]
        if (known := body.refused.get(name)) is not None:
            if value is not None and value not in known.off:
                raise PydanticCustomError(REFUSED, "{reason}", {"field": name, "reason": known.reason})
        elif body.is_closed:
            raise PydanticCustomError(UNKNOWN, "", {"field": name, "advice": ""})
        elif name in body.hints or value is None:
            pass
        elif name in elsewhere:
            if not _is_off(name, value):
                raise PydanticCustomError(UNKNOWN, "", {"field": name, "advice": "; it belongs to another endpoint"})
        elif len(name) <= _LONGEST_NAME:
            right = _meant_by(body, name)
            if right is not None and given.get(right) != value:
                raise PydanticCustomError(UNKNOWN, "", {"field": name, "advice": f"; did you mean {right}?"})


def _honoured_elsewhere(body: type[Body]) -> frozenset[str]:
    """Return the names that change the answers of other requests, if the body asks for an answer as well."""
    return _honoured_by_any(len(_generating)) if body.generates else frozenset()


@cache
def _honoured_by_any(_: int) -> frozenset[str]:
    return frozenset(name for body in _generating.values() for name in _declared(body) - body.hints)


def _is_off(name: str, value: object) -> bool:
    """Whether a value of a field that other requests honour changes nothing there."""
    if value is False or value in ("", [], {}) or (name in _DEFAULTS and value in _DEFAULTS[name]):
        return True
    parameter = PARAMETERS.get(name)
    return parameter is not None and value == parameter.neutral


@lru_cache(4096)
def _meant_by(body: type[Body], name: str) -> str | None:
    """Return the name that an unknown one looks like a misspelling of: one with an effect here, or in other requests.

    Case, `-` and `_` do not count; in longer names a letter or two may be missing, wrong, too many or exchanged.
    """
    letters = _letters(name)
    length, present = len(letters), _present(letters)
    distances: dict[str, int] = {}
    for right, right_letters, right_present in _right_names(body, len(_generating)):
        most = _may_be_wrong(right_letters) if length >= _FEWEST_LETTERS else 0
        # a wrong letter changes the length by one at most, and two of the letters that are present
        if abs(len(right_letters) - length) <= most and (present ^ right_present).bit_count() <= 2 * most:
            distance = _distance(letters, right_letters)
            if distance <= most:
                distances[right] = distance
    return min(distances, key=distances.__getitem__, default=None)


@cache
def _right_names(body: type[Body], _: int) -> list[tuple[str, str, int]]:
    """Return the names with an effect, each with its letters and which ones are present."""
    names = sorted((_declared(body) - body.hints) | body.refused.keys() | _honoured_elsewhere(body))
    return [(name, letters, _present(letters)) for name in names for letters in [_letters(name)]]


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _may_be_wrong(letters: str) -> int:
    return 0 if len(letters) < _FEWEST_LETTERS else 1 if len(letters) < _FEWEST_FOR_TWO else 2


def _present(letters: str) -> int:
    """Return which letters and digits a name has, as bits."""
    return sum(1 << (ord(letter) - ord("0")) for letter in set(letters))


def _distance(one: str, other: str) -> int:
    """Return how many letters have to be added, left out, changed, or exchanged with the next one."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        last, before, row = before, row, [i + 1]
        for j, target in enumerate(other):
            cost = min(before[j + 1] + 1, row[j] + 1, before[j] + (letter != target))
            if i and j and letter == other[j - 1] and target == one[i - 1]:
                cost = min(cost, last[j - 1] + 1)
            row.append(cost)
    return row[-1]


# --- shapes -----------------------------------------------------------------------------------------------------------


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
