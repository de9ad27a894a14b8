"""The look of every table: no frame, tokens between quotes, numbers as people read them. No torch in here."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llamarium.errors import escape

if TYPE_CHECKING:
    from rich.table import Table

BAR_WIDTH = 16
_LONG_WORD = 24  # columns; a longer one may be broken
_GAP = 3  # columns between two columns


def table(*columns: str, right: Iterable[str] = (), rows: Iterable[Iterable[str]] = ()) -> "Table":
    """Return a table in the project's look: no frame, a bold head if columns have names, numbers to the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), show_header=any(columns))
    for column in columns:
        if column in right:
            made.add_column(column, justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def fit(shown: object, width: int) -> int:
    """Make tables, grouped or not, fit into so many columns; return how many they need. Bars go, words stay whole."""
    from rich.console import Group
    from rich.table import Table

    if isinstance(shown, Group):
        return max((fit(one, width) for one in shown.renderables), default=0)
    if not isinstance(shown, Table):
        return 0
    widths = _widths(shown)
    while _total(least for least, _ in widths) > width and not shown.columns[-1].header and len(widths) > 2:
        shown.columns.pop()
        widths.pop()
    needed = _total(least for least, _ in widths)
    spare = max(0, width - needed)
    if _total(most for _, most in widths) > width:  # rich would shorten columns below their longest word
        for column, (least, most) in zip(shown.columns, widths, strict=True):
            column.width = min(most, least + spare)
            spare -= column.width - least
    return needed


def _widths(shown: "Table") -> list[tuple[int, int]]:
    """Return the width of each column's longest word, numbers and tokens being one word, and of its longest line."""
    from rich.cells import cell_len

    found: list[tuple[int, int]] = []
    for column in shown.columns:
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
        words = [word for line in lines for word in ([line] if column.no_wrap or line[:1] == '"' else line.split(" "))]
        most, least = (max(map(cell_len, parts), default=0) for parts in (lines, words))
        found.append((min(_LONG_WORD, least), most))
    return found


def _total(widths: Iterable[int]) -> int:
    """Return what columns of these widths take together."""
    return sum(width + _GAP for width in widths) - _GAP


def quote(text: str | None) -> str:
    """Put a token's printable piece between quotes; "-" where its text is not known."""
    return "-" if text is None else f'"{escape(text)}"'


def percent(share: float) -> str:
    """Write a probability: "17.2 %", "0.0034 %", "1.2e-07 %"."""
    value = 100 * share
    return f"{value:.1f} %" if value >= 0.1 or value == 0 else f"{value:.2g} %"


def bar(share: float) -> str:
    """Draw a share of 1 as a bar, to an eighth of a character."""
    if not 0 < share <= 1.001:  # a cosine may round to a little above 1; below 0, or NaN, is no bar
        return ""
    full, eighths = divmod(round(8 * BAR_WIDTH * share), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()


def size(num_bytes: int) -> str:
    """Write bytes for people, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes} bytes"


def ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers shortly: "0-3,8"."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
