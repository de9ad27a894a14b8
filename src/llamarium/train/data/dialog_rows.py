"""Rows of dialogs: several per row, each a segment that starts at position 0 and attends only to itself.

Examples are short and rows are long, so several share a row:

    ids        <u>2+2?<a>4<e><u>hi<a>hey____      <u>, <a>, <e>: header of the user and the assistant, end of turn
    labels     ......4<e>....... hey<e>.....      the next token, if it is learned
    segments   0000000000111111111111112222       the last one is padding

Nothing is truncated by default, as a truncated answer does not teach a model to stop. An example longer than a row is
an error; `truncate` can drop it, or keep its start or its end. The two answers of a pair lose the same beginning.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import numpy as np
import torch

from llamarium.datasets.rows import Reading
from llamarium.errors import TrainingError, counted, escape, show_value, warn_caller
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.data.dialogs import Example, read_dialogs
from llamarium.train.data.marked import add_marked
from llamarium.train.data.mixture import Mixture

if TYPE_CHECKING:
    from rich.text import Text

Truncate = Literal["error", "drop", "keep-start", "keep-end"]

# Rows that are filled at the same time: more rows waste less space, but change the order more.
_OPEN_ROWS = 32
_EPOCHS_KEPT = 2  # packed epochs in memory: a batch may span two


class DialogRows:
    """Examples packed into rows of `context` tokens, in a new order every epoch.

    `together` consecutive examples always share a row (2 for pairs). `fingerprint` is the SHA-256, hex, of the examples
    and of everything else that determines the rows.
    """

    together = 1
    _read: ClassVar[Callable[..., list[Example]]] = staticmethod(read_dialogs)
    _label = "dialog rows 1"  # part of the fingerprint: kind of rows, and version of the packing

    def __init__(
        self,
        examples: Sequence[Example],
        context: int,
        *,
        seed: int | None = 0,
        truncate: Truncate = "error",
        pad_id: int = 0,
        packing: bool = True,
        mixture: Mixture | None = None,
    ) -> None:
        """Pack examples into rows.

        Args:
            examples: At least one example.
            context: Tokens per row.
            seed: Seed of the order; None keeps the order of the file in every epoch, for validation.
            truncate: Handling of examples longer than a row: an error, or dropping or truncating them with a warning.
            pad_id: Token id of the padding, which is never learned.
            packing: False puts one example, or one pair, in each row.
            mixture: Mixture of the examples' sources, with its own seed; the examples then all fit.

        Raises:
            TrainingError: If there is no example, or for an example longer than a row with `truncate="error"`.
        """
        if context < 1:
            raise TrainingError(f"a row of {context} tokens; expected a context of at least 1")
        if truncate not in get_args(Truncate):
            raise TrainingError(f"truncate is {show_value(truncate)}; expected {', '.join(get_args(Truncate))}")
        self.examples = fitting(examples, context, truncate, self.together)
        self.context = context
        self.mixture = mixture or Mixture({"": 1.0}, [len(self.examples) // self.together], seed)
        self._pad_id = pad_id
        self._packing = packing
        self._has_weights = any(example.weights is not None for example in self.examples)
        self._packed: dict[int, list[list[int]]] = {}  # by epoch
        self.fingerprint = self._hash()

    @classmethod
    def from_file(
        cls,
        source: str | Path | Mapping[str, float],
        tokenizer: Tokenizer,
        context: int,
        *,
        seed: int | None = 0,
        truncate: Truncate = "error",
        chat: bool = True,
        packing: bool = True,
        reading: Reading | None = None,
    ) -> Self:
        """Read a source, or several with weights, by `read_dialogs`; other arguments are those of the constructor."""
        weights = source if isinstance(source, Mapping) else {str(source): 1.0}
        read = [(f"{escape(name)}: ", cls._read(name, tokenizer, chat=chat, reading=reading)) for name in weights]
        parts = [fitting(examples, context, truncate, cls.together, where) for where, examples in read]
        pad_id = tokenizer.pad_token_id
        if pad_id is None:
            pad_id = (*tokenizer.eos_token_ids, 0)[0]
        mixture = Mixture(weights, [len(part) // cls.together for part in parts], seed)
        return cls([*chain(*parts)], context, pad_id=pad_id, packing=packing, mixture=mixture)

    def split(self, validation: float) -> tuple[Self, Self]:
        """Return the rows for training, and those of the last share of the examples, in a fixed order, for validation.

        TrainingError if either would be empty.
        """
        train, held = (self._of([*self._of_units(units)], part) for units, part in self.mixture.split(validation))
        counts = " ".join(map(str, held.mixture.sizes))
        train.fingerprint = hashlib.sha256(f"{self.fingerprint} {counts}".encode()).hexdigest()  # held-out ones count
        return train, held

    def once(self) -> Self:
        """Return rows with the same options that have each example once per epoch, whatever the sources' weights."""
        return self._of(range(len(self.examples)), Mixture({"": 1.0}, [sum(self.mixture.sizes)], self.mixture.seed))

    def _of(self, numbers: Sequence[int], mixture: Mixture) -> Self:
        examples = [self.examples[i] for i in numbers]
        return type(self)(examples, self.context, pad_id=self._pad_id, packing=self._packing, mixture=mixture)

    @property
    def about(self) -> dict[str, Any]:
        """Counts of examples, tokens, forms and sources, used to describe differences between data sets."""
        forms = Counter(f"examples of {example.form}" for example in self.examples if example.form)
        tokens = self.mixture.sums([len(example.ids) for example in self.examples])
        return {"examples": len(self.examples), "tokens": sum(tokens), **forms, **self.mixture.about(tokens)}

    def num_rows(self, epoch: int) -> int:
        """Return the number of rows of an epoch."""
        return len(self._rows(epoch))

    def batch(self, epoch: int, indices: Sequence[int]) -> TrainingBatch:
        """Return rows of an epoch; the same arguments give the same tensors."""
        rows = self._rows(epoch)
        shape = (len(indices), self.context)
        ids_BT, labels_BT = np.full(shape, self._pad_id, np.int64), np.full(shape, IGNORED, np.int64)
        positions_BT, segments_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        weights_BT = np.ones(shape, np.float32) if self._has_weights else None
        for b, index in enumerate(indices):
            start = 0
            for segment, number in enumerate(rows[index]):
                example = self.examples[number]
                length = len(example.ids) - 1
                place = slice(start, start + length)
                ids_BT[b, place] = example.ids[:-1]
                labels_BT[b, place] = np.where(example.learned[1:], example.ids[1:], IGNORED)
                positions_BT[b, place], segments_BT[b, place] = np.arange(length), segment
                if weights_BT is not None and example.weights is not None:
                    weights_BT[b, place] = example.weights[1:]
                start = place.stop
            positions_BT[b, start:], segments_BT[b, start:] = np.arange(self.context - start), len(rows[index])
        ids, labels, positions, segments = map(torch.from_numpy, (ids_BT, labels_BT, positions_BT, segments_BT))
        weights = None if weights_BT is None else torch.from_numpy(weights_BT)
        return TrainingBatch(ids, labels, positions, segments if segments.any() else None, weights_BT=weights)

    def _rows(self, epoch: int) -> list[list[int]]:
        if epoch not in self._packed:
            order = self.mixture.units(epoch).tolist()
            packed = [[unit] for unit in order]
            if self._packing:
                packed = _pack(_lengths(self.examples, self.together), order, self.context)
            packed = [[*self._of_units(row)] for row in packed]
            self._packed = {**dict([*self._packed.items()][1 - _EPOCHS_KEPT :]), epoch: packed}
        return self._packed[epoch]

    def _of_units(self, units: Iterable[int]) -> Iterator[int]:
        """Yield the indices of the examples in some units."""
        return (unit * self.together + i for unit in units for i in range(self.together))

    def _hash(self) -> str:
        shared = "" if self._packing else " one a row"
        label = f"{self._label} {self.context} {self.mixture.seed} {self._pad_id}{shared}{self.mixture.label}"
        digest = hashlib.sha256(label.encode())
        for ids, learned, _, weights, _ in self.examples:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.tobytes())
            digest.update(learned.tobytes())
            digest.update(b"" if weights is None else weights.tobytes())
        return digest.hexdigest()


def _lengths(examples: Sequence[Example], together: int) -> list[int]:
    """Return the number of input tokens of each unit; the last token of an example is only a label."""
    lengths = [len(example.ids) - 1 for example in examples]
    return [sum(lengths[i : i + together]) for i in range(0, len(lengths), together)]


def fitting(
    examples: Sequence[Example], context: int, truncate: Truncate, together: int = 1, where: str = ""
) -> list[Example]:
    """Return the examples whose units fit in a row, after dropping or truncating; `where` is a prefix of messages."""
    if not examples:
        raise TrainingError("there is no example; expected at least one")
    lengths = _lengths(examples, together)
    num_long = sum(length > context for length in lengths)
    if not num_long:
        return [*examples]
    longest = max(lengths)
    unit = lengths.index(longest)
    named = examples[unit * together].place or f"number {unit + 1}"
    fitted = (
        f"{where}{num_long} of {counted(len(lengths), 'example' if together == 1 else 'pair')} "
        f"{'is' if num_long == 1 else 'are'} longer than a row of {counted(context, 'token')}; the longest, {named}, "
        f"has {longest:,}"
    )
    kept: list[Example] = []
    num_empty = 0
    for unit, length in enumerate(lengths):
        parts = examples[unit * together : (unit + 1) * together]
        if length > context:
            parts = _cut(parts, context, truncate) if truncate.startswith("keep") else []
            num_empty += not parts
        kept += parts
    if truncate == "error" or not kept:
        raise TrainingError(
            f"{fitted}; use a longer context, shorten them, or drop or cut them (--truncate drop, keep-end)"
        )
    if truncate == "drop":
        warn_caller(f"{fitted}; they are left out")
    else:
        why = "nothing left to learn" if together == 1 else "nothing left to learn, or no prompt in common"
        nothing = f", and {num_empty} of them, with {why}, are left out" if num_empty else ""
        warn_caller(f"{fitted}; they lose their {'end' if truncate == 'keep-start' else 'beginning'}{nothing}")
    return kept


def _cut(parts: Sequence[Example], context: int, truncate: Truncate) -> list[Example]:
    """Truncate the examples of a unit to fit in one row; return none if one of them has no learned tokens left.

    The examples of a pair lose the same beginning, so that both answers follow the same prompt; return none if their
    common prefix is too short for that.
    """
    lengths = [len(part.ids) - 1 for part in parts]
    if truncate == "keep-start":
        cut = [_within(part, slice(room + 1)) for part, room in zip(parts, _rooms(lengths, context), strict=True)]
        is_comparable = len(cut) == 1 or not np.array_equal(cut[0].ids, cut[1].ids)
    else:
        num_lost = -(-(sum(lengths) - context) // len(parts))
        cut = [_within(part, slice(num_lost, None)) for part in parts]
        is_comparable = all(np.array_equal(parts[0].ids[: num_lost + 1], part.ids[: num_lost + 1]) for part in parts)
    return cut if is_comparable and all(part.learned.any() for part in cut) else []


def _rooms(lengths: Sequence[int], context: int) -> list[int]:
    """Return the number of tokens for each example of a row: an equal share, plus what shorter ones leave."""
    share = context // len(lengths)
    rooms = [min(length, share) for length in lengths]
    return [max(share, context - sum(rooms) + own) for own in rooms]


def _within(example: Example, kept: slice) -> Example:
    """Return a slice of an example; its first token is not learned."""
    learned = example.learned[kept].copy()
    learned[:1] = False
    weights = None if example.weights is None else example.weights[kept]
    return example._replace(ids=example.ids[kept], learned=learned, weights=weights)


def _pack(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Put each example into the first of the latest `_OPEN_ROWS` rows with room; takes linear time."""
    rows: list[list[int]] = []
    left: list[int] = []
    for number in order:
        recent = range(max(0, len(rows) - _OPEN_ROWS), len(rows))
        row = next((row for row in recent if left[row] >= lengths[number]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            left.append(room)
        rows[row].append(number)
        left[row] -= lengths[number]
    return rows


def preview(batch: TrainingBatch, tokenizer: Tokenizer, row: int = 0) -> "Text":
    """Format a row with its learned tokens marked; see `add_marked`."""
    from rich.text import Text

    shown = Text()
    for number, (ids, learned, *_) in enumerate(_examples(batch, row)):
        if not learned.any():
            shown.append(f"── {counted(len(ids), 'token')} without anything to learn (padding)\n", "bold")
            continue
        add_marked(shown, f"example {number + 1}", ids, learned, tokenizer)
    return shown


def _examples(batch: TrainingBatch, row: int) -> Iterator[Example]:
    """Recover a row's examples from its tokens and labels."""
    ids, labels = batch.ids_BT[row].cpu().numpy(), batch.labels_BT[row].cpu().numpy()
    starts = np.flatnonzero(batch.positions_BT[row].cpu().numpy() == 0)
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        learned = np.concatenate(([False], labels[start:stop] != IGNORED))
        last = labels[stop - 1]
        tokens = np.concatenate((ids[start:stop], [last]))
        count = len(tokens) if last != IGNORED else len(tokens) - 1
        yield Example(tokens[:count], learned[:count])
