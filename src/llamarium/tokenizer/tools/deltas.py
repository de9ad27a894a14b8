"""What the reading of an answer tells, piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass

from llamarium.tokenizer.tools.definition import ToolCall


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what is said: text that is never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins: its place among the answer's, from 0, the id that its result will name, and the tool."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call, by its place; the fragments of one call, joined, are JSON."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call, by its place, are all there, unless the answer broke off or went wrong in them."""

    index: int
    is_complete: bool = True


Delta = ContentDelta | CallBegin | CallArguments | CallEnd


def text_of(deltas: Sequence[Delta]) -> str:
    """Return an answer's text outside of calls."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def calls_of(deltas: Sequence[Delta]) -> tuple[ToolCall, ...]:
    """Return the calls of an answer, the last perhaps not to its end, from all its deltas."""
    begun = [delta for delta in deltas if isinstance(delta, CallBegin)]
    complete = {delta.index for delta in deltas if isinstance(delta, CallEnd) and delta.is_complete}
    fragments: list[list[str]] = [[] for _ in begun]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            fragments[delta.index].append(delta.fragment)
    return tuple(ToolCall(one.id, one.name, "".join(fragments[one.index]), one.index in complete) for one in begun)
