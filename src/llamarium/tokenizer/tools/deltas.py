"""Deltas: the incremental output of parsing an answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from llamarium.tokenizer.tools.definition import ToolCall


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """New text outside calls; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The start of a call: its index in the answer from 0, its id, and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of a call's arguments; the joined fragments of a call are JSON."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call; not complete if the answer was cut off or malformed within the arguments."""

    index: int
    is_complete: bool = True


Delta = ContentDelta | CallBegin | CallArguments | CallEnd


def text_of(deltas: Sequence[Delta]) -> str:
    """Return an answer's text outside calls."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def calls_of(deltas: Sequence[Delta]) -> tuple[ToolCall, ...]:
    """Return the calls of an answer from all its deltas; the last one may be incomplete."""
    begins = [delta for delta in deltas if isinstance(delta, CallBegin)]
    complete = {delta.index for delta in deltas if isinstance(delta, CallEnd) and delta.is_complete}
    fragments: list[list[str]] = [[] for _ in begins]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            fragments[delta.index].append(delta.fragment)
    return tuple(
        ToolCall(begin.id, begin.name, "".join(fragments[begin.index]), begin.index in complete) for begin in begins
    )
