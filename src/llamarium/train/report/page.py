"""Parts of a report: curves as inline SVG, tables, and a self-contained page.

Nothing is fetched (scripts, fonts, images), so a page can be mailed and archived. Every curve has a title, a text
alternative, and a table of its values. All text is escaped (`text`), as a model can write anything: `<script>`,
terminal control characters, overrides of the writing direction.
"""

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from llamarium.errors import counted, escape

T = TypeVar("T")
Point = tuple[float, float]

_WIDTH, _HEIGHT = 440, 250  # of a plot, in SVG units: about the pixels of a column
_RIGHT, _TOP, _BOTTOM = 12, 12, 38  # the left margin is as wide as the labels
_MAX_POINTS = 400  # per curve; if there are more, adjacent points are averaged
_MAX_TABLE_ROWS = 25

NUM_STYLES = 5
"""Number of distinct line styles (color and dashes)."""

_CSS = "\n" + Path(__file__).with_name("page.css").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Series:
    """One curve.

    Attributes:
        name: Name in the legend and the table.
        points: (x, y) with ascending x; all finite.
        style: Color and dashes, less than `NUM_STYLES`.
        faint: Draw a thin line behind the others.
        dots: Mark the points.
    """

    name: str
    points: Sequence[Point]
    style: int = 0
    faint: bool = False
    dots: bool = False

    @property
    def dotted(self) -> bool:
        """True if points are marked: by option, or if there is only one."""
        return self.dots or len(self.points) == 1


HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
)
"""Beginning of every page, by which a report is recognized."""


def page(title: str, body: Iterable[str]) -> str:
    """Return a complete HTML page; `body` is HTML."""
    return (
        f"{HEAD}<title>{text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Escape a value as HTML text: markup and control characters are escaped, newlines are kept."""
    lines = str(value).split("\n")
    return html.escape("\n".join(escape(line, 12 * len(line) + 1) for line in lines))


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Format the key figures in large type, in balanced rows of up to six."""
    shown = [f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs]
    columns = math.ceil(len(shown) / max(1, math.ceil(len(shown) / 6)))
    return f'<dl class="facts" style="--columns: {columns}">{"".join(shown)}</dl>'


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table; the first cell of each row is its header."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def details(summary: str, body: str) -> str:
    """Format a collapsible section; `body` is HTML."""
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def figure(title: str, y_name: str, series: Sequence[Series], caption: str = "") -> str:
    """Format a plot of the non-empty curves over steps, with a legend if there are several, and a table."""
    drawn = [s for s in series if s.points]
    if not drawn:
        return ""
    legend = "" if len(drawn) == 1 else _legend(drawn)
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return (
        f"<figure><h3>{text(title)}</h3>{_plot(title, y_name, drawn)}{legend}{below}"
        f"{details('The numbers', _numbers(title, drawn))}</figure>"
    )


def svg(title: str, description: str, width: float, height: float, body: str) -> str:
    """Return an SVG image with a text alternative."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(title)}: {text(description)}">'
        f"<title>{text(title)}</title>{body}</svg>"
    )


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return an exponential moving average over about a twentieth of the points, with bias correction."""
    keep = 1 - 1 / max(1.0, len(points) / 20)
    total = weight = 0.0
    found: list[Point] = []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        found.append((x, total / weight))
    return found


def spread(items: Sequence[T], most: int) -> list[T]:
    """Choose up to `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def duration(seconds: float) -> str:
    """Format a duration: "45 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float | None) -> str:
    """Format a number with four significant digits; a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, *, whole: bool = False, enclosing: bool = False) -> list[float]:
    """Return about five round numbers within two bounds, or `enclosing` them; `whole` allows only integers."""
    if not high > low:
        return [low]
    rough = max((high - low) / 5, 1.0 if whole else 0.0)
    power = 10 ** math.floor(math.log10(rough))
    rounds = (1, 2, 5, 10) if whole and power == 1 else (1, 2, 2.5, 5, 10)
    step = next(power * k for k in rounds if power * k >= rough * 0.999)
    start, end, slack = low / step, high / step, 1e-9
    if enclosing:
        first, last = math.floor(start + slack), math.ceil(end - slack)
    else:
        first, last = math.ceil(start - slack), math.floor(end + slack)
    return [k * step for k in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """Format the ticks of an axis with a common unit and as many decimals as needed."""
    most = max(map(abs, values), default=0.0)
    unit, suffix = 1.0, ""
    if most >= 1e7 or 0 < most < 1e-3:
        exponent = math.floor(math.log10(most) + 1e-9)
        unit, suffix = 10.0**exponent, f"e{exponent}"
    elif most >= 1e4:
        unit, suffix = 1e3, "k"
    shown = [value / unit for value in values]
    near = (abs(shown[1] - shown[0]) if len(shown) > 1 else 1.0) / 1000
    decimals = next((d for d in range(15) if all(abs(round(value, d) - value) <= near for value in shown)), 15)
    return [f"{value:.{decimals}f}{suffix}" if value else "0" for value in shown]


def _plot(title: str, y_name: str, series: Sequence[Series]) -> str:
    steps, values = ([p[axis] for s in series for p in s.points] for axis in (0, 1))
    x0, x1 = _range(steps, 1.0)
    heights = ticks(*_range(values), enclosing=True)
    y0, y1 = heights[0], heights[-1]
    left = 12 + 7 * max(map(len, labels(heights)))

    def at(x: float, y: float) -> Point:
        across = (x - x0) / (x1 - x0) * (_WIDTH - left - _RIGHT)
        return left + across, _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_axes(at, ticks(x0, x1, whole=True), heights, left)]
    for s in sorted(series, key=lambda s: not s.faint):
        shown = [at(*p) for p in _thinned(s.points)]
        if len(shown) > 1:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
            parts.append(f'<polyline class="curve k{s.style}{" faint" if s.faint else ""}" points="{line}"/>')
        if s.dotted:
            parts += [f'<circle class="dot k{s.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in shown]
    last = "; ".join(f"{s.name} goes from {number(s.points[0][1])} to {number(s.points[-1][1])}" for s in series)
    described = f"{y_name} over steps {min(steps):,.0f} to {max(steps):,.0f}. {last}."
    return svg(title, described, _WIDTH, _HEIGHT, "".join(parts))


def _axes(at: Callable[[float, float], Point], xs: Sequence[float], ys: Sequence[float], left: float) -> str:
    parts: list[str] = []
    for y, label in zip(ys, labels(ys), strict=True):
        height = at(0, y)[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{label}</text>')
    for x, label in zip(xs, labels(xs), strict=True):
        across = at(x, ys[0])[0]
        parts.append(f'<text x="{across:.1f}" y="{_HEIGHT - _BOTTOM + 17}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">step</text>')
    return "".join(parts)


def _range(values: Sequence[float], least: float = 0.0) -> Point:
    """Return the range of some values; a single value is widened by at least `least` to each side."""
    low, high = min(values), max(values)
    around = max(abs(low) / 10 or 0.5, least)
    return (low, high) if high > low else (low - around, low + around)


def _legend(series: Sequence[Series]) -> str:
    def item(s: Series) -> str:
        line = f'<line class="curve k{s.style}{" faint" if s.faint else ""}" x1="1" y1="5" x2="31" y2="5"/>'
        dot = f'<circle class="dot k{s.style}" cx="16" cy="5" r="2.5"/>'
        drawn = (line if len(s.points) > 1 else "") + (dot if s.dotted else "")
        return f'<li><svg viewBox="0 0 32 10" aria-hidden="true">{drawn}</svg>{text(s.name)}</li>'

    return f'<ul class="legend">{"".join(map(item, series))}</ul>'


def _numbers(title: str, series: Sequence[Series]) -> str:
    """Return a table of up to `_MAX_TABLE_ROWS` steps; if there are more, steps of the sparsest series."""
    by_step = [dict(s.points) for s in series]
    steps = sorted({x for points in by_step for x in points})
    sparse = sorted(min(by_step, key=len)) if len(steps) > _MAX_TABLE_ROWS else steps
    chosen = spread(sparse, _MAX_TABLE_ROWS)
    rows = ((f"{x:,.0f}", *(number(points.get(x)) for points in by_step)) for x in chosen)
    return table(f"{title}: {len(chosen)} of {counted(len(steps), 'step')}", ("step", *(s.name for s in series)), rows)


def _thinned(points: Sequence[Point]) -> Iterator[Point]:
    every = max(1, math.ceil(len(points) / _MAX_POINTS))
    for start in range(0, len(points), every):
        part = points[start : start + every]
        yield sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)
