"""Format an example as text with its learned tokens marked."""

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
    """Append a titled example to a text, with learned tokens in green within ⟦ ⟧ and dimmed context.

    Control tokens are written out, and terminal control characters are escaped. `most` is the maximum number of
    characters per part, of which the middle is left out; 0 means no limit.
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
    """Escape the control characters of a text for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else escape(c) for c in text)
