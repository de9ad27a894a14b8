"""Encode dialogs with a weight for each part: how much the tokens of each answer are learned.

Most dialog formats write one part for each of the assistant's messages. A template that marks what is learned, by
`{% generation %}`, may mark several parts of a message (its reasoning, its content), or none. Where messages have
different weights, such a dialog is also encoded up to each answer: the parts that it has there belong to the messages
before.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from llamarium.datasets.forms import Record
from llamarium.datasets.messages import ASSISTANT
from llamarium.errors import LlamariumError, TrainingError
from llamarium.tokenizer.chat.format import ChatFormat, Part, TrainingDialog, value_or_error

WeightedPart = tuple[list[int], float]
"""Ids of one part of an example, and the weight of their losses; 0 for what is not learned."""


def weighted_dialogs(form: ChatFormat, dialogs: Sequence[Record]) -> Iterator[list[WeightedPart] | LlamariumError]:
    """Yield the parts of each dialog, or the error that refuses it."""
    encoded = [*form.parts_of([record.dialog for record in dialogs])]
    needs_borders = [form.marks_answers and len({*answer_weights(record)}) > 1 for record in dialogs]

    # All prefixes at once, as a chat template is a process.
    ambiguous = [record for record, needs in zip(dialogs, needs_borders, strict=True) if needs]
    begun = form.parts_of([prefix for record in ambiguous for prefix in _prefixes(record.dialog)])
    for record, parts, needs in zip(dialogs, encoded, needs_borders, strict=True):
        prefixes = [next(begun) for _ in _prefixes(record.dialog)] if needs else None
        yield parts if isinstance(parts, LlamariumError) else value_or_error(_weighted, record, parts, prefixes)


def answer_weights(record: Record) -> list[float]:
    """Return the weights of the assistant's messages."""
    messages = zip(record.messages, record.weights, strict=True)
    return [weight for message, weight in messages if message["role"] == ASSISTANT]


def _prefixes(dialog: TrainingDialog) -> list[TrainingDialog]:
    """Return a dialog up to each of the assistant's messages but the first."""
    places = [i for i, message in enumerate(dialog.messages) if message["role"] == ASSISTANT]
    return [dialog._replace(messages=dialog.messages[:i]) for i in places[1:]]


def _weighted(
    record: Record, parts: Sequence[Part], prefixes: Sequence[list[Part] | LlamariumError] | None
) -> list[WeightedPart]:
    """Give each part the weight of its message; TrainingError where that cannot be told."""
    weights = answer_weights(record)
    num_learned = sum(is_answer for _, is_answer in parts)
    if prefixes is not None:
        counts = _counts(parts, prefixes)
    elif len({*weights}) == 1:  # whatever the parts are, they are learned alike
        weights, counts = weights[:1], [num_learned]
    else:
        counts = [1] * len(weights)
    if sum(counts) != num_learned:
        raise TrainingError("its answers cannot be told apart in this dialog format, so their weights have no place")
    each = iter([weight for weight, count in zip(weights, counts, strict=True) for _ in range(count)])
    return [(ids, next(each) if is_answer else 0.0) for ids, is_answer in parts]


def _counts(parts: Sequence[Part], prefixes: Sequence[list[Part] | LlamariumError]) -> list[int]:
    """Return how many learned parts each of the assistant's messages has."""
    learned = _learned(parts)
    ends: list[int] = []  # of each message but the last, in learned parts
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
