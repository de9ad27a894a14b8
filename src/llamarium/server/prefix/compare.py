"""Finds the fields that differ between two prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from llamarium.server.prefix.fields import Field, FieldKind

Reason = Literal[
    "first", "extended", "contained", "model", "cache_salt", "interventions", "changed", "added", "removed",
    "reordered", "whitespace", "rendering", "reasoning_dropped", "retokenized", "template",
]  # fmt: skip
"""How a prompt differs from the nearest earlier one.

"first": there is no earlier prompt. "extended": it continues the earlier prompt. "contained": it is a prefix of the
earlier prompt. "rendering": JSON with the same values is formatted differently. "retokenized": an answer has the same
text but other tokens. "template": the text differs outside all fields. The other reasons name the field that differs,
or how it does.
"""

MAX_OTHERS = 8
"""Maximum number of further fields that are reported."""

_Group = tuple[tuple[int, int, int], ...]  # (kind, part, exact digest) of each field of a tool or message
_is_tool: Callable[[Field], bool] = attrgetter("is_tool")
_is_message: Callable[[Field], bool] = attrgetter("is_message")

_ROOTS: dict[FieldKind, Reason] = {
    FieldKind.MODEL: "model",
    FieldKind.CACHE_SALT: "cache_salt",
    FieldKind.INTERVENTIONS: "interventions",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A field that differs.

    Attributes:
        reason: How it differs.
        path: Path of the field, as in chat completions.
        is_earlier: Whether the path is in the earlier request.
    """

    reason: Reason
    path: str
    is_earlier: bool = False


def differences(earlier: Sequence[Field], now: Sequence[Field]) -> list[Difference]:
    """Return up to `1 + MAX_OTHERS` fields that differ, in the order of the request.

    Fields that the new request appends after the earlier one's are not differences.
    """
    first = next((i for i, pair in enumerate(zip(earlier, now, strict=False)) if pair[0] != pair[1]), None)
    if first is None:
        if len(earlier) <= len(now):
            return []
        return [Difference("removed", _whole_path(earlier[len(now)], earlier, now), is_earlier=True)]
    moved = _moved(earlier, now, first)
    if moved is not None:
        return [moved]
    return _by_place(earlier[first:], now[first:])[: 1 + MAX_OTHERS]


def _moved(earlier: Sequence[Field], now: Sequence[Field], first: int) -> Difference | None:
    """Return the difference if whole tools or messages were added, removed or reordered, else None."""
    for is_kind, name in ((_is_tool, "tools"), (_is_message, "messages")):
        if not is_kind(now[first]) and not is_kind(earlier[first]):
            continue
        before, after = _groups(earlier, is_kind), _groups(now, is_kind)
        place = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
        if place is not None:
            return _move_at(before, after, place, name)
        if name == "tools" and len(before) != len(after):  # appended messages are not a difference
            place, is_gone = min(len(before), len(after)), len(before) > len(after)
            return Difference("removed" if is_gone else "added", f"{name}[{place}]", is_earlier=is_gone)
    return None


def _move_at(before: list[_Group], after: list[_Group], place: int, name: str) -> Difference | None:
    """Return the move at index `place` if it leaves more later groups equal than a change of that group, else None."""
    old, new = before[place:], after[place:]
    if sorted(old) == sorted(new[: len(old)]):
        return Difference("reordered", name)

    def num_equal(a: list[_Group], b: list[_Group]) -> int:
        return sum(x == y for x, y in zip(a, b, strict=False))

    largest, move = num_equal(old, new), None
    for reason in ("removed", "added"):
        shifted, reference = (old, new) if reason == "removed" else (new, old)
        shift = shifted.index(reference[0]) if reference[0] in shifted else 0
        if shift and (count := num_equal(shifted[shift:], reference)) > largest:
            largest, move = count, Difference(reason, f"{name}[{place}]", is_earlier=reason == "removed")
    return move


def _groups(fields: Sequence[Field], is_kind: Callable[[Field], bool]) -> list[_Group]:
    """Return the fields of each tool or message."""
    groups = dict[int, list[tuple[int, int, int]]]()
    for field in filter(is_kind, fields):
        groups.setdefault(field.item, []).append((field.kind, field.part, field.exact))
    return [tuple(group) for group in groups.values()]


def _whole_path(field: Field, earlier: Sequence[Field], now: Sequence[Field]) -> str:
    """Return a field's path, or that of its message or tool if the other request lacks the whole message or tool."""
    if any(other_field.group == field.group for other_field in now) or not (field.is_message or field.is_tool):
        return field.path
    return f"{'messages' if field.is_message else 'tools'}[{field.item}]"


def _by_place(earlier: Sequence[Field], now: Sequence[Field]) -> list[Difference]:
    before = {field.place: field for field in earlier}
    after = {field.place: field for field in now}
    last, last_now = max(before), max(after)
    changes: list[Difference] = []
    for place in sorted({*before, *after}):
        old, new = before.get(place), after.get(place)
        if old is not None and new is not None:
            if (old.exact, old.kind) != (new.exact, new.kind):
                changes.append(Difference(_change(old, new), new.path))
        elif new is not None and place <= last:
            changes.append(Difference("added", _whole_path(new, now, earlier)))
        elif old is not None and place <= last_now:  # later fields are usually those of the earlier prompt's answer
            reason: Reason = "reasoning_dropped" if old.kind is FieldKind.REASONING else "removed"
            changes.append(Difference(reason, _whole_path(old, earlier, now), is_earlier=True))
    return _joined(list(dict.fromkeys(changes)))


def _joined(listed: list[Difference]) -> list[Difference]:
    """Replace the differences of a message's role and content by one of the message, as it is another message."""
    paths = {difference.path for difference in listed}
    changed = (path.removesuffix(".role") for path in paths if path.endswith(".role"))
    messages = {path for path in changed if f"{path}.content" in paths}
    joined = [
        Difference("changed", message) if (message := difference.path.rpartition(".")[0]) in messages else difference
        for difference in listed
    ]
    return list(dict.fromkeys(joined))


def _change(old: Field, new: Field) -> Reason:
    """Return the reason for a changed value."""
    if new.kind in _ROOTS:
        return _ROOTS[new.kind]
    if old.loose != new.loose:
        return "changed"
    if new.kind in (FieldKind.TOOL_PARAMETERS, FieldKind.CALL_ARGUMENTS, FieldKind.TEMPLATE_VARIABLES):
        return "rendering"
    return "reasoning_dropped" if old.has_reasoning and not new.has_reasoning else "whitespace"
