"""Rows of dialogs: several side by side, each a segment that begins at position 0 and attends only to itself.

Examples are short and rows long, so several share a row:

    ids        <u>2+2?<a>4<e><u>hi<a>hey____      <u>, <a>, <e>: header of the user and the assistant, end of turn
    labels     ......4<e>....... hey<e>.....      the next token, where it is learned
    segments   0000000000111111111111112222       the last one is padding

Nothing is cut unasked: half an answer does not teach to stop. An example longer than a row is refused; on request it
is dropped, or loses its end or its beginning; two that share a row as a pair lose the same beginning.
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

# Rows that are filled at the same time: a longer search wastes less room, and mixes the order less.
_OPEN_ROWS = 32
_EPOCHS_KEPT = 2  # packed: a batch may be of two


class DialogRows:
    """Examples packed into rows of `context` tokens, in another order every epoch; `together` of them share a row.

    `fingerprint` is the SHA-256, hex, of the examples and everything else that shapes the rows.
    """

    together = 1
    _read: ClassVar[Callable[..., list[Example]]] = staticmethod(read_dialogs)
    _label = "dialog rows 1"  # in the fingerprint: what the rows are, and the version of how they are packed

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
        """Pack at least one example into rows of `context` tokens, filled up with `pad_id`, which is never learned.

        `seed` draws the order; None keeps the file's in every epoch, for validation. TrainingError for no example, or
        for one longer than a row, which the other values of `truncate` leave out or cut, with a warning. Without
        `packing` a row holds one example, or one pair. `mixture` is of the examples' sources, all of which fit; it has
        its own seed.
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
        """Read a source, or several and their weights, with `read_dialogs`; other arguments are the constructor's."""
        weights = source if isinstance(source, Mapping) else {str(source): 1.0}
        read = [(f"{escape(name)}: ", cls._read(name, tokenizer, chat=chat, reading=reading)) for name in weights]
        parts = [fitting(examples, context, truncate, cls.together, where) for where, examples in read]
        pad_id = tokenizer.pad_token_id
        if pad_id is None:
            pad_id = (*tokenizer.eos_token_ids, 0)[0]
        mixture = Mixture(weights, [len(part) // cls.together for part in parts], seed)
        return cls([*chain(*parts)], context, pad_id=pad_id, packing=packing, mixture=mixture)

    def split(self, validation: float) -> tuple[Self, Self]:
        """Return the first examples to train on, and the last share of them, in a fixed order, to validate.

        TrainingError if either would have none.
        """
        train, held = (self._of([*self._of_units(units)], part) for units, part in self.mixture.split(validation))
        counts = " ".join(map(str, held.mixture.sizes))
        train.fingerprint = hashlib.sha256(f"{self.fingerprint} {counts}".encode()).hexdigest()  # held-out ones count
        return train, held

    def once(self) -> Self:
        """Return rows like these that hold each example once an epoch; those of one source are the same."""
        return self._of(range(len(self.examples)), Mixture({"": 1.0}, [sum(self.mixture.sizes)], self.mixture.seed))

    def _of(self, numbers: Sequence[int], mixture: Mixture) -> Self:
        examples = [self.examples[i] for i in numbers]
        return type(self)(examples, self.context, pad_id=self._pad_id, packing=self._packing, mixture=mixture)

    @property
    def about(self) -> dict[str, Any]:
        """Counts, of each form and source, too, to describe the data and a difference between data sets."""
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
        """Yield the numbers of units' examples."""
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
    """Return the tokens of each unit in a row; the last token of an example is only a label."""
    lengths = [len(example.ids) - 1 for example in examples]
    return [sum(lengths[i : i + together]) for i in range(0, len(lengths), together)]


def fitting(
    examples: Sequence[Example], context: int, truncate: Truncate, together: int = 1, where: str = ""
) -> list[Example]:
    """Return the examples that fit a row together with those that share it; `where` begins messages."""
    if not examples:
        raise TrainingError("there is no example; expected at least one")
    lengths = _lengths(examples, together)
    num_long = sum(length > context for length in lengths)
    if not num_long:
        return [*examples]
    longest = max(lengths)
    unit = lengths.index(longest)
    named = examples[unit * together].place or f"number {unit + 1}"
    found = (
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
            f"{found}; use a longer context, shorten them, or drop or cut them (--truncate drop, keep-end)"
        )
    if truncate == "drop":
        warn_caller(f"{found}; they are left out")
    else:
        why = "nothing left to learn" if together == 1 else "nothing left to learn, or no prompt in common"
        nothing = f", and {num_empty} of them, with {why}, are left out" if num_empty else ""
        warn_caller(f"{found}; they lose their {'end' if truncate == 'keep-start' else 'beginning'}{nothing}")
    return kept


def _cut(parts: Sequence[Example], context: int, truncate: Truncate) -> list[Example]:
    """Cut the examples of one row so that they share it; nothing if one of them would have nothing to learn.

    The two of a pair lose the same beginning, so that both answers are compared after the same prompt; nothing if what
    they begin with in common is too short for that.
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
    """Return how much of a row each of its examples has: an equal share, and what shorter ones leave over."""
    share = context // len(lengths)
    taken = [min(length, share) for length in lengths]
    return [max(share, context - sum(taken) + own) for own in taken]


def _within(example: Example, kept: slice) -> Example:
    """Return the tokens of an example that are kept; the first of them is not learned."""
    learned = example.learned[kept].copy()
    learned[:1] = False
    weights = None if example.weights is None else example.weights[kept]
    return example._replace(ids=example.ids[kept], learned=learned, weights=weights)


def _pack(lengths: Sequence[int], order: Sequence[int], room: int) -> list[list[int]]:
    """Put each example, in this order, into the first of the latest rows with room: linear time, and a mixed order."""
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
    """Format a row, its learned tokens marked; see `add_marked`."""
    from rich.text import Text

    shown = Text()
    for number, (ids, learned, *_) in enumerate(_examples(batch, row)):
        if not learned.any():
            shown.append(f"── {counted(len(ids), 'token')} without anything to learn (padding)\n", "bold")
            continue
        add_marked(shown, f"example {number + 1}", ids, learned, tokenizer)
    return shown


def _examples(batch: TrainingBatch, row: int) -> Iterator[Example]:
    """Recover a row's examples: each token followed by its label."""
    ids, labels = batch.ids_BT[row].cpu().numpy(), batch.labels_BT[row].cpu().numpy()
    starts = np.flatnonzero(batch.positions_BT[row].cpu().numpy() == 0)
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        learned = np.concatenate(([False], labels[start:stop] != IGNORED))
        last = labels[stop - 1]
        tokens = np.concatenate((ids[start:stop], [last]))
        count = len(tokens) if last != IGNORED else len(tokens) - 1
        yield Example(tokens[:count], learned[:count])
