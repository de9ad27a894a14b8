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
                f"{name}, line {line.number}: custom_id {escape(line.custom_id)} is that of line {before}, too; "
                "expected each once; nothing was asked"
            )
        if kept.named.get(line.custom_id, line.id) != line.id:
            raise _changed(f"line {line.number}, {escape(line.custom_id)}, is not the one that was answered", name)
    if number == 0:
        raise InputError(f"{name}: holds no requests; expected a line of JSON for each")
    missing = next((one for one in kept.named if one not in places), None)
    if missing is not None:
        raise _changed(f"{escape(missing)}, which was answered, is not asked any more", name)
    if nameless:
        raise _changed("a line without a custom_id that was answered is not at its place any more", name)
    return number


def _changed(what: str, name: str) -> OutputError:
    return OutputError(
        f"{name} is not what an earlier run was asked: {what}; new lines may be added, none changed or removed: choose "
        "another output, or --force to ask all anew"
    )


def check_model(kept: Kept, names: Sequence[str], path: str) -> None:
    """Refuse to resume with another model."""
    others = sorted(kept.models.difference(names))
    if others:
        raise OutputError(
            f"{path}: {escape(others[0])} has answered, and {escape(names[0])} would go on; name the same model (-m, "
            "--served-model-name), choose another output, or --force to ask all anew"
        )
