"""Charts as inline SVG: curves, bars and time lines, made of text, without a script and without a library.

Method: shapes are drawn in a space of 1000 x 1000 that stretches with the page while strokes keep their
width, and labels are HTML placed in percent, so that text stays as large on a telephone as on a wide screen.
Curves of more than :data:`MAX_POINTS` points keep the least and the greatest of each bucket, so no spike is
lost.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_POINTS = 1200  # of one curve: about one per pixel of the widest chart
Point = tuple[float, float]


def escape(value: object) -> str:
    """Text safe inside elements and quoted attributes; what UTF-8 cannot carry becomes a question mark."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)


def number(value: float, digits: int = 4) -> str:
    """A number as people write it: so many significant digits, thousands apart."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.{digits}g}'):g}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round values within [low, high], about ``wanted`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(f for f in (1, 2, 2.5, 5, 10) if f * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about ``limit`` points that keep every extreme."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])})
    return kept


@dataclass(frozen=True, slots=True)
class Range:
    """An axis: what lies at 0 and at 1000."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Iterable[float], *, floor: float | None = None, margin: float = 0.06) -> Range:
        """The finite values with a margin; ``floor`` fixes the lower end. Never empty."""
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        gap = (high - low) or abs(high) or 1.0
        bottom = low - margin * gap if floor is None else floor
        return cls(bottom, max(high + margin * gap, bottom + 1e-12))

    def at(self, value: float) -> float:
        return 1000 * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)


@dataclass(slots=True)
class Plot:
    """A chart with two axes. ``unit`` follows the labels of x."""

    name: str
    description: str
    x: Range
    y: Range
    unit: str = ""
    shapes: list[str] = field(default_factory=list)
    badges: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], style: str) -> None:
        """A curve; it breaks where a value is not finite."""
        runs: list[list[Point]] = [[]]
        for point in thin(points):
            if math.isfinite(point[1]):
                runs[-1].append(point)
            elif runs[-1]:
                runs.append([])
        for run in runs:
            if len(run) == 1:  # a lone point has no length: give it some
                run = [(run[0][0] - self._dot(), run[0][1]), (run[0][0] + self._dot(), run[0][1])]
            if run:
                path = " ".join(f"{self.x.at(a):.1f},{1000 - self.y.at(b):.1f}" for a, b in run)
                self.shapes.append(f'<polyline class="{style}" points="{path}"/>')

    def band(self, start: float, end: float, title: str) -> None:
        """A shaded stretch of x."""
        left, right = self.x.at(start), self.x.at(end)
        self.shapes.append(
            f'<rect class="band" x="{left:.1f}" y="0" width="{max(right - left, 0.0):.1f}" height="1000">'
            f"<title>{escape(title)}</title></rect>"
        )

    def mark(self, at: float, label: str, title: str) -> None:
        """A vertical line with a badge above it."""
        x = self.x.at(at)
        self.shapes.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="1000"/>')
        self.badges.append(
            f'<span class="badge" style="left:{x / 10:.2f}%" title="{escape(title)}">{escape(label)}</span>'
        )

    def render(self) -> str:
        """The chart as one HTML element."""
        grid, labels = [], []
        for value in ticks(self.y.low, self.y.high):
            y = 1000 - self.y.at(value)
            grid.append(f'<line class="grid" x1="0" x2="1000" y1="{y:.1f}" y2="{y:.1f}"/>')
            labels.append(f'<span class="y" style="top:{y / 10:.2f}%">{number(value)}</span>')
        for value in ticks(self.x.low, self.x.high, 6):
            text = number(value) + (f" {escape(self.unit)}" if self.unit else "")
            labels.append(f'<span class="x" style="left:{self.x.at(value) / 10:.2f}%">{text}</span>')
        return (
            f'<div class="plot"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img">'
            f"<title>{escape(self.name)}</title><desc>{escape(self.description)}</desc>"
            f'{"".join(grid)}<line class="axis" x1="0" x2="1000" y1="1000" y2="1000"/>{"".join(self.shapes)}</svg>'
            f'<span aria-hidden="true">{"".join(labels)}{"".join(self.badges)}</span></div>'
        )

    def _dot(self) -> float:
        return (self.x.high - self.x.low) / 400


@dataclass(frozen=True, slots=True)
class Piece:
    """A coloured stretch of a bar from ``start`` to ``end``."""

    start: float
    end: float
    colour: str
    title: str


def strip(pieces: Iterable[Piece], total: float, name: str, style: str = "") -> str:
    """Pieces side by side on one bar of length ``total``; each is at least a hair wide, so that none vanishes."""
    found = []
    for piece in pieces:
        x = 1000 * piece.start / total if total > 0 else 0.0
        width = 1000 * (piece.end - piece.start) / total if total > 0 else 0.0
        if width > 0:
            found.append(
                f'<rect x="{x:.2f}" y="0" width="{max(width, 1.5):.2f}" height="10" fill="{piece.colour}">'
                f"<title>{escape(piece.title)}</title></rect>"
            )
    kind = f' class="{style}"' if style else ""
    return (
        f'<svg{kind} viewBox="0 0 1000 10" preserveAspectRatio="none" role="img">'
        f"<title>{escape(name)}</title>{''.join(found)}</svg>"
    )


def two_bars(predicted: float | None, measured: float | None, most: float, colour: str) -> str:
    """Measured above predicted (paler), to one scale; decoration beside a table's numbers."""
    scale = 1000 / most if most > 0 else 0.0
    shapes = []
    if measured is not None:
        shapes.append(f'<rect x="0" y="1" width="{measured * scale:.1f}" height="9" fill="{colour}"/>')
    if predicted is not None:
        shapes.append(
            f'<rect x="0" y="12" width="{predicted * scale:.1f}" height="5" fill="{colour}" opacity="0.45"/>'
        )
    return f'<svg viewBox="0 0 1000 18" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'
