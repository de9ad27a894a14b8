"""What the reading of an answer tells, piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass

from llamarium.tokenizer.tools.definition import ToolCall


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of what is said.

    Attributes:
        text: Never empty.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins.

    Attributes:
        index: Which of the answer's calls it is, from 0.
        id: What its result will name it by.
        name: The tool's.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments.

    Attributes:
        index: Which call's.
        fragment: Text of JSON; those of one call, joined, are its arguments.
    """

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are all there.

    Attributes:
        index: Which call's.
        is_complete: False if the answer broke off or went wrong within them.
    """

    index: int
    is_complete: bool = True


Delta = ContentDelta | CallBegin | CallArguments | CallEnd


def text_of(deltas: Sequence[Delta]) -> str:
    """Return what is said."""
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
