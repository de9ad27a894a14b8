"""Output of the commands: results to stdout; progress, timings and warnings to stderr.

A model can generate any character, and a file can contain any tensor name. On a terminal, characters that control it
(escape sequences, carriage returns, writing-direction overrides) are escaped; to a pipe or a file, text is written
unchanged.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from llamarium.errors import counted, escape

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# C0 and C1 controls without newline and tab, marks and overrides of writing direction, line and paragraph separators,
# the byte-order mark, invisible tags, lone surrogates. Not the joiners (U+200C, U+200D): emoji and Persian need them.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)

_COMMAND = re.compile(r"`[^`]+`|(?<=[: ] )(?:llamarium|torchrun) .*")
_ARGUMENT = re.compile(r"""'[^']*'|"[^"]*"|(?<= )-[\w-]+ (?=[^- ])""")  # a quoted one, an option and its value

WIDTH = 80
"""Number of columns if it is unknown, as for a pipe or a file."""

_REDRAW_S = 0.1  # seconds between drawings of a bar
_MIN_WIDTH = 20  # columns; in fewer, rich would draw nothing, or a letter a line


def printable(text: str) -> str:
    """Escape all characters that could control a terminal, except newline and tab."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def write_text(text: str) -> None:
    """Write a piece of generated text to stdout immediately, escaped on a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


_CLEAR_LINE = "\r\x1b[K"
_statuses: list[str] = []  # that are shown on stderr, the inner one last


def emit(value: Mapping[str, Any]) -> None:
    """Write a JSON object as one line to stdout.

    The line is ASCII, so that no reader splits it at U+2028; NaN and infinities become null.
    """
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def emit_or_show(args: argparse.Namespace, result: Any, view: "Callable[[Any], RenderableType]") -> int:
    """Print a result: its `to_dict` with `--json`, else a view of it; return the exit code."""
    if args.json:
        emit(result.to_dict())
    else:
        show(view(result))
    return 0


def note(text: str) -> None:
    """Write text to stderr, wrapped between words on a terminal.

    A closed pipe (`2>&1 | head -2`) is ignored, so that it does not stop the command.
    """
    with suppress(BrokenPipeError):
        sys.stderr.write(_fitting(text, sys.stderr) + "\n")
        sys.stderr.flush()


def note_paragraph(text: str) -> None:
    """Write sentences for a person to stderr, as `note`; without a terminal in lines of `WIDTH` columns, too."""
    note(text if draws(sys.stderr) else filled(text, WIDTH))


def say(text: str) -> None:
    """Write sentences to stdout, as `note` does to stderr, in place of a status that is shown there."""
    if _statuses:
        sys.stderr.write(_CLEAR_LINE)
        sys.stderr.flush()
    print(_fitting(text, sys.stdout), flush=True)


def _fitting(text: str, stream: TextIO) -> str:
    clean = printable(text)
    if not draws(stream):
        return clean
    return filled(clean, max(_MIN_WIDTH, shutil.get_terminal_size().columns - 1))


def filled(text: str, width: int, *, anew: bool = False) -> str:
    """Break lines that are longer; `anew` fills whole paragraphs, and an example goes on behind a backslash."""
    lines: list[str] = []
    for is_prose, group in groupby(text.split("\n"), lambda line: anew and line[:1] not in ("", " ")):
        part = list(group)
        if is_prose and max(map(len, part)) > width:
            part = [" ".join(part)]
        lines += [line if len(line) <= width else _filled(line, width, anew) for line in part]
    return "\n".join(lines)


def _filled(line: str, width: int, anew: bool) -> str:
    """Break a line between words, never within one or a command; what follows hangs below the text, beside a name."""
    indent = line[: len(line) - len(line.lstrip(" "))]
    is_example = anew and re.match(r" +llamarium (?!.*\S {2})", line) is not None
    column = re.match(r" +\S+ {2,}| *", line)
    hang = f"{indent}    " if is_example else " " * len(column[0]) if column and indent else indent
    filler = textwrap.TextWrapper(width - 2 * is_example, initial_indent=indent, subsequent_indent=hang)
    filler.break_long_words = filler.break_on_hyphens = filler.replace_whitespace = False
    unbroken = _ARGUMENT if is_example else _COMMAND
    joined = unbroken.sub(lambda match: match[0].replace(" ", "\0"), line.strip(" "))  # a blank of no line's end
    return filler.fill(joined).replace("\n", " \\\n" if is_example else "\n").replace("\0", " ")


def warn(text: str) -> None:
    """Write a warning line to stderr, and clear a displayed status first."""
    if _statuses:
        sys.stderr.write(_CLEAR_LINE)
    note(f"llamarium: warning: {' '.join(text.split())}")


def end_line() -> None:
    """Start a new line on a terminal after an incomplete one."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\n")
            stream.flush()
            return


def draws(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that supports redrawing lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def status(text: str) -> Generator[None]:
    """Show `text` on stderr during the body if it is a terminal, and clear it afterwards."""
    if not draws(sys.stderr):
        yield
        return
    try:
        _statuses.append(text)
        sys.stderr.write(f"{printable(text)} …")
        sys.stderr.flush()
        yield
    finally:
        _statuses.pop()
        sys.stderr.write(_CLEAR_LINE)
        sys.stderr.flush()


@contextmanager
def telling(text: str) -> Generator[Callable[[str], None]]:
    """Show `text` and a state on stderr while the body runs, if that is a terminal; yields a function for the state."""

    def draw(state: str) -> None:
        if draws(sys.stderr):
            sys.stderr.write(f"{_CLEAR_LINE}{printable(text)} … {printable(state)}")
            sys.stderr.flush()

    with status(text):
        yield draw


@contextmanager
def share_done(text: str, then: str = "100 %") -> Generator[Callable[[int, int], None]]:
    """Show `text` and a percentage, or `then` at the end, as `telling`; yields a function for (done, total)."""
    last_state = ""

    def report(done: int, total: int) -> None:
        nonlocal last_state
        state = f"{100 * done // total:3d} %" if done < total else then
        if state != last_state:
            draw(last_state := state)

    with telling(text) as draw:
        yield report


@contextmanager
def progress(text: str) -> Generator[Callable[[str, float | None], None]]:
    """Show `text`, what is done and a bar, as `telling`; yields a function for (what, its share, None if unknown)."""
    last = 0.0

    def report(state: str, share: float | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _REDRAW_S or share == 1:
            last = now
            draw(state if share is None else f"{bar(share):<{BAR_WIDTH}} {state}")

    with telling(text) as draw:
        yield report


def show(renderable: "RenderableType") -> None:
    """Print a rich table or text to stdout, without the blanks that rich puts at the ends of lines.

    Every string is taken literally: no markup, no emoji codes, no guessed colours. The width is the terminal's or
    `COLUMNS`; `WIDTH` where neither is known, or the number too small to be meant (0, say). A table that is too wide
    loses its bars, and then runs over the edge: no cell vanishes, and no word is broken. rich honours `NO_COLOR`.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    if console.width < _MIN_WIDTH:
        console.width = WIDTH
    console.width = max(console.width, fit(renderable, console.width))
    with console.capture() as capture:
        console.print(renderable)
    sys.stdout.write(re.sub(r" +((?:\x1b\[[0-9;]*m)*)$", r"\1", capture.get(), flags=re.MULTILINE))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class Stopwatch:
    """Counts an answer's tokens and reports their throughput."""

    def __init__(self, is_on: bool | None) -> None:
        self.wanted = sys.stderr.isatty() if is_on is None else is_on
        self.num_tokens = 0
        self._start = self._first = time.perf_counter()

    def count(self, num_tokens: int) -> None:
        """Add generated tokens; the first call determines the time to first token."""
        if self.num_tokens == 0:
            self._first = time.perf_counter()
        self.num_tokens += num_tokens

    def report(self, *details: str) -> None:
        """Write tokens, seconds and tokens/s to stderr, with `details` behind them, if wanted and any came."""
        if not self.wanted or self.num_tokens == 0:
            return
        seconds = time.perf_counter() - self._start
        parts = [
            f"{counted(self.num_tokens, 'token')} in {seconds:.2f} s",
            f"{self.num_tokens / seconds:.1f} tokens/s",
            f"the first after {self._first - self._start:.2f} s",
            *details,
        ]
        note(f"[{', '.join(parts)}]")


BAR_WIDTH = 16
_LONG_WORD = 24  # columns; a longer one may be broken
_GAP = 3  # columns between two columns


def table(*columns: str, right: Iterable[str] = (), rows: Iterable[Iterable[str]] = ()) -> "Table":
    """Return a table in the project's look: no frame, a bold head if columns have names, numbers to the right."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), show_header=any(columns))
    for column in columns:
        if column in right:
            result.add_column(column, justify="right", no_wrap=True)
        else:
            result.add_column(column, overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def fit(content: object, width: int) -> int:
    """Make tables, grouped or not, fit into so many columns; return how many they need. Bars go, words stay whole."""
    from rich.console import Group
    from rich.table import Table

    if isinstance(content, Group):
        return max((fit(item, width) for item in content.renderables), default=0)
    if not isinstance(content, Table):
        return 0
    widths = _widths(content)
    while _total(narrowest for narrowest, _ in widths) > width and not content.columns[-1].header and len(widths) > 2:
        content.columns.pop()
        widths.pop()
    num_columns = _total(narrowest for narrowest, _ in widths)
    spare = max(0, width - num_columns)
    if _total(widest for _, widest in widths) > width:  # rich would shorten columns below their longest word
        for column, (narrowest, widest) in zip(content.columns, widths, strict=True):
            column.width = min(widest, narrowest + spare)
            spare -= column.width - narrowest
    return num_columns


def _widths(content: "Table") -> list[tuple[int, int]]:
    """Return the width of each column's longest word, numbers and tokens being one word, and of its longest line."""
    from rich.cells import cell_len

    widths: list[tuple[int, int]] = []
    for column in content.columns:
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).splitlines()]
        words = [
            word for line in lines for word in ([line] if column.no_wrap or line[:1] in "'\"" else line.split(" "))
        ]
        widest, narrowest = (max(map(cell_len, parts), default=0) for parts in (lines, words))
        widths.append((min(_LONG_WORD, narrowest), widest))
    return widths


def _total(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def quote(text: str | None) -> str:
    """Put a text between quotes that are not in it, if there are such; "-" where it is not known."""
    mark = "'" if text and '"' in text and "'" not in text else '"'
    return "-" if text is None else f"{mark}{escape(text)}{mark}"


def percent(share: float) -> str:
    """Format a probability: "17.2 %", "0.0034 %", "1.2e-07 %"."""
    value = 100 * share
    return f"{value:.1f} %" if value >= 0.1 or value == 0 else f"{value:.2g} %"


def bar(share: float) -> str:
    """Draw a share of 1 as a bar, to an eighth of a character."""
    if not 0 < share <= 1.001:  # a cosine may round to a little above 1; below 0, or NaN, is no bar
        return ""
    full, eighths = divmod(round(8 * BAR_WIDTH * share), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()


def size(num_bytes: int) -> str:
    """Format a number of bytes with decimal units."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes} bytes"


def duration(seconds: float) -> str:
    """Format a duration: "45 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def ranges(numbers: Iterable[int]) -> str:
    """Format integers as ranges: "0-3,8"."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
