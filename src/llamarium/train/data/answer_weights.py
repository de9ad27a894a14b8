"""Encode dialogs with loss weights for the parts of the assistant's messages.

Most dialog formats write one learned part per assistant message. A chat template with `{% generation %}` may mark
several parts of a message (its reasoning, its content), or none. If messages have different weights, such a dialog is
therefore also encoded up to each assistant message; the parts of that prefix belong to the earlier messages.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from llamarium.datasets.forms import Record
from llamarium.datasets.messages import ASSISTANT
from llamarium.errors import LlamariumError, TrainingError
from llamarium.tokenizer.chat.format import ChatFormat, Part, TrainingDialog, value_or_error

WeightedPart = tuple[list[int], float]
"""Token ids of one part of an example and their loss weight; 0 for context."""


def weighted_dialogs(form: ChatFormat, dialogs: Sequence[Record]) -> Iterator[list[WeightedPart] | LlamariumError]:
    """Yield the parts of each dialog, or the error if it cannot be encoded."""
    encoded = [*form.parts_of([record.dialog for record in dialogs])]
    needs_borders = [form.marks_answers and len({*answer_weights(record)}) > 1 for record in dialogs]

    # All prefixes in one call, as a chat template runs in a subprocess.
    ambiguous = [record for record, needs in zip(dialogs, needs_borders, strict=True) if needs]
    begun = form.parts_of([prefix for record in ambiguous for prefix in _prefixes(record.dialog)])
    for record, parts, needs in zip(dialogs, encoded, needs_borders, strict=True):
        prefixes = [next(begun) for _ in _prefixes(record.dialog)] if needs else None
        yield parts if isinstance(parts, LlamariumError) else value_or_error(_weighted, record, parts, prefixes)


def answer_weights(record: Record) -> list[float]:
    """Return the weight of each assistant message."""
    messages = zip(record.messages, record.weights, strict=True)
    return [weight for message, weight in messages if message["role"] == ASSISTANT]


def _prefixes(dialog: TrainingDialog) -> list[TrainingDialog]:
    """Return the dialog up to each assistant message except the first."""
    places = [i for i, message in enumerate(dialog.messages) if message["role"] == ASSISTANT]
    return [dialog._replace(messages=dialog.messages[:i]) for i in places[1:]]


def _weighted(
    record: Record, parts: Sequence[Part], prefixes: Sequence[list[Part] | LlamariumError] | None
) -> list[WeightedPart]:
    """Assign each part the weight of its message; TrainingError if the message of a part is ambiguous."""
    weights = answer_weights(record)
    num_learned = sum(is_answer for _, is_answer in parts)
    if prefixes is not None:
        counts = _counts(parts, prefixes)
    elif len({*weights}) == 1:  # all parts have the same weight
        weights, counts = weights[:1], [num_learned]
    else:
        counts = [1] * len(weights)
    if sum(counts) != num_learned:
        raise TrainingError("its answers cannot be told apart in this dialog format, so their weights have no place")
    each = iter([weight for weight, count in zip(weights, counts, strict=True) for _ in range(count)])
    return [(ids, next(each) if is_answer else 0.0) for ids, is_answer in parts]


def _counts(parts: Sequence[Part], prefixes: Sequence[list[Part] | LlamariumError]) -> list[int]:
    """Return the number of learned parts of each assistant message."""
    learned = _learned(parts)
    ends: list[int] = []  # number of learned parts up to the end of each message except the last
    for prefix in prefixes:
        begun = None if isinstance(prefix, LlamariumError) else _learned(prefix)
        if begun is None or learned[: len(begun)] != begun or len(begun) < max(ends, default=0):
            raise TrainingError(
                "its answers have different weights, and the chat template writes them differently as the dialog goes "
                "on, so which message a part that it marks belongs to cannot be told; give all the same weight, or "
                "name a built-in dialog format (llama3, chatml)"
            )
        ends.append(len(begun))
    borders = [0, *ends, len(learned)]
    return [end - start for start, end in pairwise(borders)]


def _learned(parts: Sequence[Part]) -> list[list[int]]:
    return [ids for ids, is_answer in parts if is_answer]
