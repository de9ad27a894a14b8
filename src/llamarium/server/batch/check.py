"""Checks before a batch runs: names are unique, and lines that an earlier run answered are unchanged."""

from collections.abc import Iterable, Sequence

from llamarium.errors import InputError, OutputError, escape
from llamarium.server.batch.lines import Line
from llamarium.server.batch.output import Kept


def check_lines(lines: Iterable[Line], name: str, kept: Kept) -> int:
    """Return the number of lines of the input called `name`."""
    places: dict[str, int] = {}
    number, nameless = 0, kept.nameless.copy()
    for line in lines:
        number += 1
        if line.custom_id is None:
            nameless.discard(line.id)
            continue
        before = places.setdefault(line.custom_id, line.number)
        if before != line.number:
            raise InputError(
                f"{name}, line {line.number}: custom_id {escape(line.custom_id)} is also used in line {before}; "
                "custom_ids must be unique; no request was run"
            )
        if kept.named.get(line.custom_id, line.id) != line.id:
            raise _changed(f"line {line.number}, {escape(line.custom_id)}, has changed since it was answered", name)
    if number == 0:
        raise InputError(f"{name}: contains no requests; expected one JSON object per line")
    missing = next((one for one in kept.named if one not in places), None)
    if missing is not None:
        raise _changed(f"{escape(missing)}, which was answered, is missing", name)
    if nameless:
        raise _changed("an answered line without a custom_id has moved", name)
    return number


def _changed(change: str, name: str) -> OutputError:
    return OutputError(
        f"{name} differs from the input of the earlier run: {change}; lines may be added, but not changed or removed; "
        "choose another output, or use --force to run all requests again"
    )


def check_model(kept: Kept, names: Sequence[str], path: str) -> None:
    """Refuse to resume with another model."""
    others = sorted(kept.models.difference(names))
    if others:
        raise OutputError(
            f"{path}: the earlier run used {escape(others[0])}, this one uses {escape(names[0])}; use the same model "
            "(-m, --served-model-name), choose another output, or use --force to run all requests again"
        )
