"""Rows of a data set, options for reading them, and counts of rows that were used, skipped or ignored."""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llamarium.datasets.messages import checked_weight
from llamarium.errors import LlamariumError, TrainingError, counted, escape, show_value, warn_caller

_PROBLEMS_KEPT = 20
_PROBLEMS_NAMED = 3
_KEYS_NAMED = 12


class Row(NamedTuple):
    """A row: its place, for messages ("data.jsonl:3"), and its fields."""

    place: str
    fields: Mapping[str, Any]


class BadRow(NamedTuple):
    """An invalid row, after which reading can continue: its place, and the problem."""

    place: str
    problem: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading rows.

    Attributes:
        columns: Name of a field in the data, by the name of the form's field: {"prompt": "question"}.
        roles: Role of a message, by its name in the data: {"human": "user"}.
        skip_bad: Skip and count invalid rows instead of raising an error.
    """

    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    skip_bad: bool = False

    @classmethod
    def parse(cls, columns: str = "", roles: str = "", *, skip_bad: bool = False) -> "Reading":
        """Parse "prompt=question,completion=answer" and "human=user,gpt=assistant"; TrainingError if invalid."""
        return cls(_pairs("columns", columns), _pairs("roles", roles), skip_bad)

    def renamed(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row's fields with the form's names; TrainingError if a name would be used twice."""
        if not self.columns:
            return fields
        theirs = {name: own for own, name in self.columns.items()}
        renamed_fields: dict[str, Any] = {}
        for name, value in fields.items():
            own = theirs.get(name, name)
            other = self.columns.get(own, own)
            if own != name and own in fields and own not in theirs:
                raise TrainingError(
                    f"has {own!r} and {name!r}, and --columns reads both as {own!r}; take one out of the data, or give "
                    f"the other a name, too (--columns {own}={other},other={own})"
                )
            renamed_fields[own] = value
        return renamed_fields


def _pairs(option: str, text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise TrainingError(
                f"{option} is {show_value(text)}; expected NAME=NAME,NAME=NAME, such as "
                + ("prompt=question,completion=answer" if option == "columns" else "human=user,gpt=assistant")
            )
        if name in pairs or (option == "columns" and value in pairs.values()):
            twice = name if name in pairs else value
            raise TrainingError(f"{option} names {show_value(twice)} twice; expected each once")
        pairs[name] = value
    return pairs


class Tally:
    """Counts of a source's rows: used, skipped and ignored.

    Attributes:
        num_rows: Number of valid and invalid rows, without those of weight 0.
        num_skipped: Number of rows that were skipped because they are invalid.
        num_without_weight: Number of rows that were skipped because their weight is 0.
        problems: The first invalid rows.
        missing: Names of `reading.columns` that no row has.
        unread: Number of rows with an ignored field or message key, by its name.
    """

    def __init__(self, source: str, reading: Reading) -> None:
        self.source, self.reading = source, reading
        self.num_rows = self.num_skipped = self.num_without_weight = 0
        self.problems: list[BadRow] = []
        self.unread: Counter[str] = Counter()
        self.missing = {*reading.columns.values()}

    def counted(self, rows: "Iterable[Row | BadRow]") -> "Iterator[Row | BadRow]":
        """Count rows and yield those with a weight above 0, with renamed fields; for invalid ones call `skip`."""
        for row in rows:
            self.num_rows += 1
            if isinstance(row, BadRow):
                yield row
                continue
            self.missing -= row.fields.keys()
            try:
                fields = self.reading.renamed(row.fields)
            except TrainingError as error:
                yield BadRow(row.place, str(error))
                continue
            if _has_no_weight(fields):
                self.num_rows -= 1
                self.num_without_weight += 1
            else:
                yield Row(row.place, {name: value for name, value in fields.items() if value is not None})

    def skip(self, row: BadRow) -> None:
        """Count an invalid row; TrainingError unless invalid rows are skipped."""
        if not self.reading.skip_bad:
            raise TrainingError(
                f"{row.place}: {row.problem} (skip_bad leaves out what cannot be used; `llamarium data` lists it)"
            )
        self.num_skipped += 1
        if len(self.problems) < _PROBLEMS_KEPT:
            self.problems.append(row)

    @contextmanager
    def at(self, place: str) -> Generator[None]:
        """Handle an error in the `with` block as that of the row at `place`; see `skip`."""
        try:
            yield
        except LlamariumError as error:
            problem = BadRow(place, str(error))
        else:
            return
        self.skip(problem)  # outside the handler, so that the error is not chained to one with the same message

    @property
    def why_none(self) -> str:
        """The reason for a message "holds no example": the most frequent problem, because the first may be unusual."""
        if not self.num_rows and not self.num_without_weight:
            return "; expected a JSON object on each line, or rows"
        if not self.problems:
            return f": {counted(self.num_without_weight, 'row has', 'rows have')} the weight 0"
        numbers = Counter(row.problem for row in self.problems)
        (problem, count), *_ = numbers.most_common()
        place = next(row.place for row in self.problems if row.problem == problem)
        others = f"; {counted(self.num_skipped - count, 'more row')} cannot be used" if self.num_skipped > count else ""
        return f": {place}: {problem}{others}"

    def warn(self) -> None:
        """Issue one warning each about ignored fields, missing columns, and skipped rows."""
        if self.unread:
            most = self.unread.most_common()
            names = ", ".join(f"{escape(name)} ({counted(count, 'row')})" for name, count in most[:_KEYS_NAMED])
            more = f", and {len(most) - _KEYS_NAMED} more" if len(most) > _KEYS_NAMED else ""
            warn_caller(f"{self.source}: not read: {names}{more}")
        if self.missing:
            warn_caller(
                f"{self.source}: no row has {', '.join(map(show_value, sorted(self.missing)))}, which columns names"
            )
        if count := self.num_without_weight:
            warn_caller(f"{self.source}: {counted(count, 'row')} left out, of weight 0")
        if self.num_skipped:
            shown = "; ".join(f"{row.place}: {row.problem}" for row in self.problems[:_PROBLEMS_NAMED])
            more = f"; and {self.num_skipped - _PROBLEMS_NAMED} more" if self.num_skipped > _PROBLEMS_NAMED else ""
            warn_caller(
                f"{self.source}: {self.num_skipped:,} of {counted(self.num_rows, 'row')} skipped: {shown}{more}"
            )


def _has_no_weight(fields: Mapping[str, Any]) -> bool:
    weight = fields.get("weight")
    if weight is None:
        return False
    try:
        return checked_weight(weight, "weight") == 0
    except TrainingError:  # raised when the form is parsed; a reward may use the field otherwise
        return False
