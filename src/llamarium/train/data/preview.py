"""A row as text, so that people see which of its tokens are learned."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from llamarium.errors import escape
from llamarium.tokenizer.base import Tokenizer
from llamarium.train.data.batch import IGNORED, TrainingBatch
from llamarium.train.data.dialogs import Example

if TYPE_CHECKING:
    from rich.text import Text
_OPEN, _CLOSE = "⟦", "⟧"


def preview(batch: TrainingBatch, tokenizer: Tokenizer, row: int = 0) -> "Text":
    """Show a row as text: what is learned in green and within ⟦ ⟧, what is only read dim.

    Control tokens are spelled, and characters that could drive a terminal are escaped.
    """
    from rich.text import Text

    shown = Text()
    for number, (ids, learned) in enumerate(_segments(batch, row)):
        if not learned.any():
            shown.append(f"── {len(ids)} tokens without anything to learn (padding)\n", "bold")
            continue
        shown.append(f"── example {number + 1}: {len(ids)} tokens, {int(learned.sum())} learned\n", "bold")
        borders = np.flatnonzero(np.diff(learned)) + 1
        for part, learns in zip(np.split(ids, borders), np.split(learned, borders), strict=True):
            text = _visible(tokenizer.decode(part.tolist(), skip_special_tokens=False))
            if learns[0]:
                shown.append(f"{_OPEN}{text}{_CLOSE}", "bold green")
            else:
                shown.append(text, "dim")
        shown.append("\n")
    return shown


def _segments(batch: TrainingBatch, row: int) -> Iterator[Example]:
    """Yield a row's examples again: each token stands after the one whose label it is."""
    ids, labels = batch.ids_BT[row].cpu().numpy(), batch.labels_BT[row].cpu().numpy()
    starts = np.flatnonzero(batch.positions_BT[row].cpu().numpy() == 0)
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        learned = np.concatenate(([False], labels[start:stop] != IGNORED))
        last = labels[stop - 1]
        tokens = np.concatenate((ids[start:stop], [last]))
        count = len(tokens) if last != IGNORED else len(tokens) - 1
        yield Example(tokens[:count], learned[:count])


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else escape(c) for c in text)
