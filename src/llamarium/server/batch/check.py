"""Checks before a batch runs: custom_ids are unique, and lines answered by an earlier run are unchanged."""

from collections.abc import Iterable, Sequence

from llamarium.errors import InputError, OutputError, escape
from llamarium.server.batch.lines import Line
from llamarium.server.batch.output import Kept


def check_lines(lines: Iterable[Line], name: str, kept: Kept) -> int:
    """Validate the input of a batch and return its number of lines.

    Args:
        lines: The lines.
        name: Name of the input, for errors.
        kept: Answers of the earlier run.

    Raises:
        InputError: If the input is empty or a custom_id is not unique.
        OutputError: If an answered line has changed or is missing.
    """
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
    missing = next((name for name in kept.named if name not in places), None)
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
    """Validate that a run resumes with the model of the earlier run.

    Args:
        kept: Answers of the earlier run.
        names: The model's served names.
        path: The output file, for errors.

    Raises:
        OutputError: If the earlier run used another model.
    """
    other_models = sorted(kept.models.difference(names))
    if other_models:
        raise OutputError(
            f"{path}: the earlier run used {escape(other_models[0])}, this one uses {escape(names[0])}; use the same "
            "model (-m, --served-model-name), choose another output, or use --force to run all requests again"
        )
