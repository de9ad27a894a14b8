"""Show an example as text, its learned tokens marked."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llamarium.errors import counted, escape
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from rich.text import Text


def add_marked(
    shown: "Text", title: str, ids: NDArray[Any], learned: NDArray[np.bool_], tokenizer: Tokenizer, most: int = 0
) -> None:
    """Append an example to a text: learned tokens in green and within ⟦ ⟧, context dim, under a title.

    Control tokens are spelled out, and characters that could control a terminal are escaped. `most` is the number of
    characters of a part that are shown, its beginning and its end; 0 is all.
    """
    shown.append(f"── {title}: {counted(len(ids), 'token')}, {int(learned.sum()):,} learned\n", "bold")
    borders = np.flatnonzero(np.diff(learned)) + 1
    for part, learns in zip(np.split(ids, borders), np.split(learned, borders), strict=True):
        text = visible(tokenizer.decode(part.tolist(), skip_special_tokens=False))
        if most and len(text) > most:
            text = f"{text[: most // 2]} … {text[-most // 2 :]}"
        if learns[0]:
            shown.append(f"⟦{text}⟧", "bold green")
        else:
            shown.append(text, "dim")
    shown.append("\n")


def visible(text: str) -> str:
    """Return a text for a terminal, its control characters escaped."""
    return "".join(c if c.isprintable() or c == "\n" else escape(c) for c in text)
