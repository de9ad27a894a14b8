"""The fields of request bodies, for all protocols: supported, hints, rejected, or unknown.

Declared fields are validated strictly; null means not given. Known names that are not declared are listed in
`server/field_table.py`. An unknown name is ignored and reported (`server/hints.py`), with two exceptions: a likely
misspelling of a field that has an effect is rejected with the right name, and so is a field that only other endpoints
of this server support, as ignoring it would change the answer. `docs/reference/server.md` lists all fields.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from llamarium.errors import show_value
from llamarium.options.declare import Option
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.sampling.parameter import Taker
from llamarium.sampling.params import PARAMETERS, parameters_of
from llamarium.server.errors import ApiError
from llamarium.server.faults import REFUSED, UNKNOWN, refusal_of
from llamarium.server.field_table import TABLE, Hint, Refused

_NESTED = ("content", "tool_calls", "output")  # lists within messages
_MOST_UNKNOWN = 1000  # maximum number of unknown names per object; each is compared with all valid names
_LONGEST_NAME = 32  # characters; longer names are not checked for misspellings
_FEWEST_LETTERS, _FEWEST_FOR_TWO = 5, 10  # minimum length of a name with one wrong letter, and with two
_OFF_ELSEWHERE: Mapping[str, int] = {"top_k": -1, "seed": -1}
"""Values that other servers document as disabling a sampling parameter, besides this server's neutral value."""

_DEFAULTS: Mapping[str, Sequence[object]] = {
    "add_generation_prompt": (True,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto", "none"),
}
"""Values equal to omitting the field, besides a parameter's neutral value; `tool_choice` is without tools here."""

ModelName = Annotated[str | None, Field(description="served name of the model or of an adapter (default: the model's)")]
CacheSalt = Annotated[
    str | None,
    Field(min_length=1, description="salt of the prefix cache, which is shared only with requests of the same salt"),
]
Streams = Annotated[bool | None, Field(description="true: stream the answer as server-sent events")]

_generating: dict[str, type["Body"]] = {}


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Known fields that are not supported (`of_table`)."""

    hints: ClassVar[frozenset[str]] = frozenset()
    """Fields that have no effect (`of_table`)."""

    dialog: ClassVar[str | None] = None
    """The field with the dialog, if any."""

    is_closed: ClassVar[bool] = False
    """Whether unknown names are rejected, as only this project defines and sends such a body."""

    generates: ClassVar[bool] = False
    """Whether the request generates text, so that fields of the other generating requests would change its answer."""

    _without_effect: tuple[str, ...] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if cls.generates:
            _generating[cls.__name__] = cls

    has_no_effect: ClassVar[bool] = False
    """Whether objects of this class have no effect at all."""

    may_have_no_effect: ClassVar[frozenset[str]] = frozenset({"chat_template_kwargs", "arguments"})
    """Fields without effect, and fields that may have none, depending on their value."""

    @property
    def without_effect(self) -> tuple[str, ...]:
        """The given names that this model does not declare: hints, disabled fields, and unknown names."""
        return self._without_effect

    @classmethod
    def check_length(cls, value: Any, limit: int) -> None:
        """Reject an overlong dialog before it is validated.

        Each message, part and call takes at least one token.

        Args:
            value: The body as JSON.
            limit: Maximum number of tokens per request.

        Raises:
            ApiError: 400, if there are more messages, parts and calls than `limit`.
        """
        if cls.dialog is None or not isinstance(value, dict):
            return
        count = _count(cast("dict[str, Any]", value).get(cls.dialog))
        if count > limit:
            message = (
                f"{cls.dialog} is too long: it has {count:,} messages, parts and calls, and each takes at least "
                f"one token; this model's maximum context length is {limit} tokens: send fewer"
            )
            raise ApiError(400, message, code="context_length_exceeded", param=cls.dialog)

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Validate declared fields, note the others, and reject those that would change the answer.

        If the context is a list, this class is appended to it when some of the fields may have no effect.
        """
        if not isinstance(value, dict):
            return handler(value)
        values, declared = cast("dict[str, Any]", value), _declared(cls)
        undeclared = [name for name in values if name not in declared]
        is_doubtful = undeclared or cls.has_no_effect or not cls.may_have_no_effect.isdisjoint(values)
        if is_doubtful and info.context is not None:
            info.context.append(cls)
        if not undeclared:
            return handler(values)
        _check_others(cls, undeclared, values)
        body = handler({name: item for name, item in values.items() if name in declared})
        listed = cls.hints | cls.refused.keys()
        body._without_effect = tuple(name for name in undeclared if values[name] is not None or name not in listed)
        return body


ModelT = TypeVar("ModelT", bound=Body)
AnyModelT = TypeVar("AnyModelT", bound=BaseModel)


def validated(kind: type[AnyModelT], body: Any, doubtful: list[type[Body]] | None = None) -> AnyModelT:
    """Return the validated body.

    Args:
        kind: The model class.
        body: The body as JSON.
        doubtful: Receives the class of each object in the body with fields that may have no effect.

    Raises:
        ApiError: 400, with the path of the invalid field.
    """
    try:
        return kind.model_validate(body, context=doubtful)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise refusal_of(faults, body) from None


def of_table(*holders: str) -> Callable[[type[ModelT]], type[ModelT]]:
    """Return a decorator that adds the rows of `TABLE[holder]` to a model, for each holder.

    Hints with a `kind` become fields; the others extend `hints` and `refused`.
    """
    rows = {name: row for holder in holders for name, row in TABLE[holder].items()}

    def extended(model: type[ModelT]) -> type[ModelT]:
        new_rows = {name: row for name, row in rows.items() if name not in model.model_fields}
        added: dict[str, Any] = {
            name: (row.kind | None, Field(None, description=row.help))
            for name, row in new_rows.items()
            if isinstance(row, Hint) and row.kind is not None
        }
        extended_model = create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added
        )
        extended_model.hints = model.hints | {name for name, row in rows.items() if isinstance(row, Hint)}
        extended_model.may_have_no_effect = model.may_have_no_effect | extended_model.hints
        extended_model.refused = {
            **model.refused,
            **{name: row for name, row in new_rows.items() if isinstance(row, Refused)},
        }
        return extended_model

    return extended


def with_parameters(
    taker: Taker, field_of: Callable[[Option], tuple[Any, Any]] = lambda parameter: (parameter.kind | None, None)
) -> Callable[[type[AnyModelT]], type[AnyModelT]]:
    """Return a decorator that adds a field for each sampling parameter of a taker, described by its help text.

    Args:
        taker: The interface whose parameters are added.
        field_of: Returns a field's type and default; by default fields are optional.
    """

    def extended(model: type[AnyModelT]) -> type[AnyModelT]:
        added: dict[str, Any] = {}
        for parameter in parameters_of(taker):
            kind, default = field_of(parameter)
            added[parameter.name] = (kind, Field(default, description=parameter.help))
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **added)

    return extended


def parameters_in(body: BaseModel, taker: Taker) -> SamplingKeywords:
    """Return the sampling parameters in a body, i.e. the fields added by `with_parameters`."""
    values = {parameter.name: getattr(body, parameter.name) for parameter in parameters_of(taker)}
    for name, off in _OFF_ELSEWHERE.items():
        if name in values and values[name] == off:
            values[name] = PARAMETERS[name].default
    return cast(SamplingKeywords, values)


# --- undeclared names -------------------------------------------------------------------------------------------------


@cache
def _declared(body: type[Body]) -> frozenset[str]:
    """Return the names of a body's fields, as clients write them."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def _check_others(body: type[Body], undeclared: list[str], values: Mapping[str, Any]) -> None:
    """Reject undeclared names: unsupported fields, misspellings, and fields of other endpoints.

    Raises:
        PydanticCustomError: `REFUSED` or `UNKNOWN`, with the name in its context.
    """
    elsewhere = _honoured_elsewhere(body)
    unknown = [name for name in undeclared if not (name in body.refused or name in body.hints or name in elsewhere)]
    if len(unknown) > _MOST_UNKNOWN and not body.is_closed:
        advice = f"; there are {len(unknown):,} unknown fields; at most {_MOST_UNKNOWN:,} are accepted"
        raise PydanticCustomError(UNKNOWN, "", {"field": unknown[_MOST_UNKNOWN], "advice": advice})
    for name in undeclared:
        value = values[name]
        if (refused := body.refused.get(name)) is not None:
            if value is not None and value not in refused.off:
                raise PydanticCustomError(REFUSED, "{reason}", {"field": name, "reason": refused.reason})
        elif body.is_closed:
            raise PydanticCustomError(UNKNOWN, "", {"field": name, "advice": ""})
        elif name in body.hints or value is None:
            pass
        elif name in elsewhere:
            if not _is_off(name, value):
                raise PydanticCustomError(UNKNOWN, "", {"field": name, "advice": "; it belongs to another endpoint"})
        elif len(name) <= _LONGEST_NAME:
            intended = _meant_by(body, name)
            if intended is not None and values.get(intended) != value:
                raise PydanticCustomError(UNKNOWN, "", {"field": name, "advice": f"; did you mean {intended}?"})


def _honoured_elsewhere(body: type[Body]) -> frozenset[str]:
    """Return the fields that have an effect in any generating request; empty unless this body generates text."""
    return _honoured_by_any(len(_generating)) if body.generates else frozenset()


@cache
def _honoured_by_any(_: int) -> frozenset[str]:
    return frozenset(name for body in _generating.values() for name in _declared(body) - body.hints)


def _is_off(name: str, value: object) -> bool:
    """Whether a value has no effect even where the field is supported."""
    if value is False or value in ("", [], {}) or (name in _DEFAULTS and value in _DEFAULTS[name]):
        return True
    parameter = PARAMETERS.get(name)
    return parameter is not None and value == parameter.default


@lru_cache(4096)
def _meant_by(body: type[Body], name: str) -> str | None:
    """Return the field that an unknown name is probably a misspelling of, or None.

    Candidates have an effect here or in other generating requests. Case, `-` and `_` are ignored. Names of 5 letters
    may have one edit, names of 10 letters two: a missing, wrong, extra or swapped letter.
    """
    letters = _letters(name)
    length, present = len(letters), _present(letters)
    distances: dict[str, int] = {}
    for candidate, candidate_letters, candidate_present in _right_names(body, len(_generating)):
        max_distance = _may_be_wrong(candidate_letters) if length >= _FEWEST_LETTERS else 0
        # cheap filter: an edit changes the length by up to one, and the set of letters by up to two
        if (
            abs(len(candidate_letters) - length) <= max_distance
            and (present ^ candidate_present).bit_count() <= 2 * max_distance
        ):
            distance = _distance(letters, candidate_letters)
            if distance <= max_distance:
                distances[candidate] = distance
    return min(distances, key=distances.__getitem__, default=None)


@cache
def _right_names(body: type[Body], _: int) -> list[tuple[str, str, int]]:
    """Return the fields with an effect: name, letters, and the set of letters as bits."""
    names = sorted((_declared(body) - body.hints) | body.refused.keys() | _honoured_elsewhere(body))
    return [(name, letters, _present(letters)) for name in names for letters in [_letters(name)]]


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _may_be_wrong(letters: str) -> int:
    return 0 if len(letters) < _FEWEST_LETTERS else 1 if len(letters) < _FEWEST_FOR_TWO else 2


def _present(letters: str) -> int:
    """Return the set of a name's letters and digits as bits."""
    return sum(1 << (ord(letter) - ord("0")) for letter in set(letters))


def _distance(a: str, b: str) -> int:
    """Return the edit distance with insertions, deletions, substitutions and swaps of adjacent letters."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a):
        last, before, row = before, row, [i + 1]
        for j, target in enumerate(b):
            cost = min(before[j + 1] + 1, row[j] + 1, before[j] + (letter != target))
            if i and j and letter == b[j - 1] and target == a[i - 1]:
                cost = min(cost, last[j - 1] + 1)
            row.append(cost)
    return row[-1]


# --- nested objects ---------------------------------------------------------------------------------------------------


def _count(value: Any) -> int:
    """Count the objects in a list and in their nested lists; 0 for other values."""
    if not isinstance(value, list):
        return 0
    objects = [cast("dict[str, Any]", item) for item in cast("list[Any]", value) if isinstance(item, dict)]
    return len(objects) + sum(_count(inner) for item in objects for name in _NESTED if (inner := item.get(name)))


def of_type(name: str) -> Tag:
    """Return the tag of an object type; the brackets keep it distinct from field names in error paths."""
    return Tag(f"<{name}>")


def by_type(default: str | None = None) -> Discriminator:
    """Return a discriminator by the objects' `type`; objects without one have type `default`."""

    def name(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return None if kind is None else f"<{kind if isinstance(kind, str) else show_value(kind)}>"

    return Discriminator(name)
