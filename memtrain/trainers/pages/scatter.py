"""A scatter of plans or runs as inline SVG: size against speed, prediction against measurement; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from memtrain.trainers.pages.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    SMALL_WIDTH,
    TOP,
    UNIT_ROOM,
    WIDTH,
    axis_unit,
    grid_line,
    limit_text,
    nice_ticks,
    short,
    svg,
)


@dataclass(frozen=True, slots=True)
class Spot:
    """A point of a scatter."""

    x: float
    y: float
    text: str
    """Shown under the pointer."""
    colour: str = "c1"
    """CSS class."""
    is_chosen: bool = False
    """A larger point with a ring."""


def pareto_chart(
    spots: Sequence[Spot],
    label: str,
    *,
    x_unit: str,
    y_unit: str,
    limit: tuple[str, float] | None = None,
    is_narrow: bool = False,
) -> str:
    """An SVG of points and the steps of their frontier, both axes from zero.

    `limit`: name and x of a line. Empty without points.
    """
    if not spots:
        return ""
    ordered = sorted(spots, key=lambda spot: (spot.x, spot.y))
    width = SMALL_WIDTH if is_narrow else WIDTH
    last = max(ordered[-1].x, limit[1] if limit else 0.0)
    chart = _Chart(nice_ticks(0.0, last), nice_ticks(0.0, max(spot.y for spot in spots)), 300, width)
    best, path = 0.0, []
    for spot in ordered:
        if spot.y > best:
            path += (
                [chart.place(spot.x, best), chart.place(spot.x, spot.y)]
                if best
                else [chart.place(spot.x, spot.y)]
            )
            best = spot.y
    path.append(chart.place(chart.xs[-1], best))
    drawn = [*chart.axes(x_unit, y_unit), f'<polyline class="line faint" points="{" ".join(path)}"/>']
    if limit is not None:
        x = chart.place(limit[1], 0.0).split(",")[0]
        drawn.append(f'<line class="limit" x1="{x}" x2="{x}" y1="{chart.top - 6}" y2="{chart.bottom}"/>')
        drawn.append(limit_text(limit[0], float(x), chart.top - 10, width))
    drawn += [chart.dot(spot) for spot in ordered]
    return svg(drawn, label, (width, chart.height))


def agreement_chart(
    spots: Sequence[Spot],
    label: str,
    *,
    unit: str,
    legend: Sequence[tuple[str, str]] = (),
    height: int = 420,
) -> str:
    """An SVG of y against x on one logarithmic scale, with the line where they are equal.

    `legend`: name and CSS class of each kind of points, written into the picture. Empty without points.
    """
    if not spots:
        return ""
    values = [value for spot in spots for value in (spot.x, spot.y)]
    low = 10.0 ** math.floor(math.log10(min(values)))
    ticks = [
        one * low * 10**power
        for power in range(math.ceil(math.log10(max(values) / low)) + 1)
        for one in (1, 2, 5)
    ]
    first = max(tick for tick in ticks if tick <= min(values))
    end = min(tick for tick in ticks if tick >= max(values))
    ticks = [tick for tick in ticks if first <= tick <= end]
    chart = _Chart(ticks, ticks, height=height, is_log=True)
    corners = f"{chart.place(first, first)} {chart.place(end, end)}"
    equal = f'<polyline class="line faint" points="{corners}"/>'
    drawn = [*chart.axes(f"measured, {unit}", f"predicted, {unit}"), equal]
    drawn += [chart.dot(spot) for spot in spots]
    for at, (name, colour) in enumerate(legend):
        y = chart.top + 16 + 18 * at
        drawn.append(f'<circle class="fill {colour}" cx="{LEFT + 16}" cy="{y - 4}" r="4"/>')
        drawn.append(f'<text x="{LEFT + 28}" y="{y}">{escape(name)}</text>')
    return svg(drawn, label, (WIDTH, height))


@dataclass(frozen=True, slots=True)
class _Chart:
    """Ticks of both axes, and where a value lies between them."""

    xs: Sequence[float]
    ys: Sequence[float]
    height: int
    width: int = WIDTH
    is_log: bool = False

    @property
    def top(self) -> float:
        return TOP + UNIT_ROOM

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM - UNIT_ROOM

    def place(self, x: float, y: float) -> str:
        """`x,y` in the picture."""
        right = self._share(x, self.xs) * (self.width - RIGHT - LEFT)
        up = self._share(y, self.ys) * (self.bottom - self.top)
        return f"{LEFT + right:.1f},{self.bottom - up:.1f}"

    def axes(self, x_unit: str, y_unit: str) -> list[str]:
        """Grid, numbers and units."""
        drawn = [grid_line(self.place(self.xs[0], y), self.width - RIGHT, short(y)) for y in self.ys]
        for x in self.xs:
            at = self.place(x, self.ys[0]).split(",")[0]
            drawn.append(f'<text x="{at}" y="{self.bottom + 17}" text-anchor="middle">{short(x)}</text>')
        middle = (LEFT + self.width - RIGHT) / 2
        words = f'<text x="{middle}" y="{self.height - 6}" text-anchor="middle">{escape(x_unit)}</text>'
        return [*drawn, words, *axis_unit(y_unit)]

    def dot(self, spot: Spot) -> str:
        """The point, with its text under the pointer."""
        x, y = self.place(spot.x, spot.y).split(",")
        ring = f'<circle class="ring" cx="{x}" cy="{y}" r="9"/>' if spot.is_chosen else ""
        title = f"<title>{escape(spot.text)}</title>"
        size = 5.5 if spot.is_chosen else 4
        return f'{ring}<circle class="fill {spot.colour}" cx="{x}" cy="{y}" r="{size}">{title}</circle>'

    def _share(self, value: float, ticks: Sequence[float]) -> float:
        low, high = ticks[0], ticks[-1]
        if self.is_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)
