"""Charts as inline SVG, coloured by the page: lines over steps, stacked bars, histograms; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
Bin = tuple[int, int, int]
"""First and last value of a bar of a histogram, and how many there are."""

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c7", "c9", "c10", "c11", "c8")
"""CSS classes of the page's colours; more lines or parts share the last one, which is grey."""

WIDTH = 720
SMALL_WIDTH = 420
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 12, 34
UNIT_ROOM = 14
"""Height above a chart for the unit of its upright axis."""
FOOT = 21
"""Height below a chart's floor to the line of its steps: the lowest number is clear of it on a phone too."""
LETTER, NARROW_LETTER = 6.9, 8.7
"""Width of a letter of the page's font at 12 and at a phone's 15 px, at most: every text has its room."""
ROUNDING = 1e-5
"""Share of a value by which others may differ from it and still be drawn as the same. Taste."""
MOST_LETTERS = 40
"""Letters of a bar's label; the whole of a longer one is shown under the pointer."""
MOST_POINTS = 800
"""Points of one line; more would not be seen at this width."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its heading."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    """Name and CSS class of each line or part."""
    narrow_svg: str = ""
    """The same for a phone; empty where one drawing serves all."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart."""

    name: str
    points: Sequence[Point]
    colour: str
    """CSS class: c1 to c11, or faint."""
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar: its parts lie end to end."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    """Name, length and CSS class of each part."""
    text: str
    """Written behind the bar."""


def line_chart(
    lines: Sequence[Line],
    label: str,
    *,
    unit: str = "",
    width: int = WIDTH,
    height: int = 280,
    from_zero: bool = False,
) -> str:
    """An SVG of lines over steps with the pointer's data in `data-lines`; empty when there is no point.

    Values that are no number make a gap. `unit`: of the upright axis.
    """
    shown = [Line(one.name, thin(one.points), one.colour, one.has_dots) for one in lines if one.points]
    values = [y for one in shown for _, y in one.points if math.isfinite(y)]
    if not values:
        return ""
    xs = [x for one in shown for x, _ in one.points]
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1)
    ticks = nice_ticks(min(0.0, *values) if from_zero else min(values), max(values))
    low, high = ticks[0], ticks[-1]
    right, bottom, top = width - RIGHT, height - BOTTOM, TOP + (UNIT_ROOM if unit else 0)
    words = tick_words(ticks)
    left = max(LEFT, round(max(map(len, words)) * (LETTER if width == WIDTH else NARROW_LETTER) + 10))

    def place(point: Point) -> str:
        x = left + (point[0] - low_x) / (high_x - low_x) * (right - left)
        y = bottom - (point[1] - low) / (high - low) * (bottom - top)
        return f"{x:.1f},{y:.1f}"

    drawn = [grid_line(place((low_x, y)), right, word) for y, word in zip(ticks, words, strict=True)]
    drawn += axis_unit(unit)
    drawn.append(f'<text x="{left - 8}" y="{bottom + FOOT}" text-anchor="end">step</text>')
    for tick in nice_ticks(low_x, high_x):
        if low_x <= tick <= high_x and tick == int(tick):
            x = place((tick, low)).split(",")[0]
            drawn.append(f'<text x="{x}" y="{bottom + FOOT}" text-anchor="middle">{short(tick)}</text>')
    for one in shown:
        drawn += [
            f'<polyline class="line {one.colour}" points="{" ".join(map(place, run))}"/>'
            for run in unbroken(one.points)
        ]
        if one.has_dots:
            drawn += [_dot(place(point), one.colour) for point in one.points if math.isfinite(point[1])]
    chart_data = {
        "x": [low_x, high_x],
        "px": [left, right],
        "lines": [
            {"name": one.name, "points": [[x, y if math.isfinite(y) else None] for x, y in one.points]}
            for one in shown
        ],
    }
    drawn.append(f'<line class="cursor" y1="{top}" y2="{bottom}" x1="-9" x2="-9"/>')
    data = escape(json.dumps(chart_data), quote=True)
    return svg(drawn, label, (width, height), f' data-lines="{data}"')


def bar_chart(
    bars: Sequence[Bar],
    label: str,
    *,
    unit: tuple[str, float] = ("", 1.0),
    limit: tuple[str, float] | None = None,
    is_narrow: bool = False,
) -> str:
    """An SVG of stacked horizontal bars on one scale, and a line at `limit` (name, value) when it is near.

    `unit`: name and size of the unit of the axis below. Labels and the texts behind the bars have the room
    that they need: no bar and no text is clipped. `is_narrow`: for a phone, with the labels above the bars.
    """
    longest = max((sum(length for _, length, _ in bar.parts) for bar in bars), default=0.0)
    if longest <= 0:
        return ""
    width, letter, row, above = (SMALL_WIDTH, NARROW_LETTER, 46, 20) if is_narrow else (WIDTH, LETTER, 26, 0)
    labels = len(unit[0]) if is_narrow else min(max(len(bar.label) for bar in bars), MOST_LETTERS)
    left = labels * letter + 14
    right = width - max(max(len(bar.text) for bar in bars) * letter + 10, 70.0)
    is_near = limit is not None and limit[1] <= 2 * longest
    end = max(longest, limit[1] if is_near and limit else 0.0)
    scale = (right - left) / end
    top = TOP + (UNIT_ROOM if is_near else 0)
    # Above a bar without a label no room is left for one: it belongs to the bar before it.
    rows = [row if bar.label else row - above for bar in bars]
    foot = top + sum(rows)
    drawn: list[str] = []
    for tick in nice_ticks(0.0, end / unit[1]):
        x = left + tick * unit[1] * scale
        if tick * unit[1] <= end * 1.0001:
            drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{foot}"/>')
            drawn.append(f'<text x="{x:.1f}" y="{foot + 15}" text-anchor="middle">{short(tick)}</text>')
    drawn.append(f'<text x="{left - 8:.1f}" y="{foot + 15}" text-anchor="end">{escape(unit[0])}</text>')
    texts: list[str] = []
    name_place = 'x="0"' if is_narrow else f'x="{left - 8:.1f}" text-anchor="end"'
    for index, bar in enumerate(bars):
        x, y = left, top + sum(rows[: index + 1]) - row + above
        name = bar.label if len(bar.label) <= MOST_LETTERS else f"{bar.label[: MOST_LETTERS - 1]}…"
        words = f"<title>{escape(bar.label)}</title>{escape(name)}" if name != bar.label else escape(name)
        drawn.append(f'<text {name_place} y="{y + 13 - above}">{words}</text>')
        for name, length, colour in bar.parts:
            title = f"<title>{escape(name)}</title>"
            drawn.append(
                f'<rect class="fill {colour}" x="{x:.1f}" y="{y}" width="{length * scale:.1f}" height="18">'
                f"{title}</rect>"
            )
            x += length * scale
        texts.append(f'<text class="value" x="{x + 6:.1f}" y="{y + 13}">{escape(bar.text)}</text>')
    if is_near and limit is not None:
        x = left + limit[1] * scale
        drawn.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{foot}"/>')
        drawn.append(limit_text(limit[0], x, top - 12, width))
    return svg([*drawn, *texts], label, (width, foot + 22))


def histogram(
    bins: Sequence[Bin],
    label: str,
    *,
    limit: tuple[str, int] | None = None,
    marks: Sequence[tuple[str, int]] = (),
    unit: str = "tokens",
    height: int = 200,
    is_narrow: bool = False,
) -> str:
    """An SVG of counts, with a line at `limit` between the bins and one at each mark; empty without counts.

    Every bar is as wide as any other and says its bounds (`data-first`, `data-last`); a line of the class
    `cursor` waits outside for a script. `is_narrow`: for a phone, with fewer bounds below.
    """
    most = max((count for *_, count in bins), default=0)
    if not most:
        return ""
    ticks = nice_ticks(0, most)
    width, num_bounds = (SMALL_WIDTH, 5) if is_narrow else (WIDTH, 10)
    right, bottom, top = width - RIGHT, height - BOTTOM, TOP + UNIT_ROOM
    step = (right - LEFT) / len(bins)
    drawn = [
        grid_line(f"{LEFT},{bottom - tick / ticks[-1] * (bottom - top):.1f}", right, short(tick))
        for tick in ticks
        if tick == int(tick)
    ]
    drawn += axis_unit("rows")
    drawn.append(f'<text x="{LEFT - 8}" y="{bottom + FOOT}" text-anchor="end">{escape(unit)}</text>')
    every = -(-len(bins) // num_bounds)
    for index, (lowest, bound, count) in enumerate(bins):
        x, tall = LEFT + index * step, count / ticks[-1] * (bottom - top)
        shape = f'x="{x + 0.5:.1f}" y="{bottom - tall:.1f}" width="{max(step - 1.5, 0.5):.1f}"'
        title = f"<title>{lowest:,} to {bound:,} {escape(unit)}: {count:,} rows</title>"
        bounds = f'data-first="{lowest}" data-last="{bound}"'
        drawn.append(f'<rect class="fill c1" {shape} height="{tall:.1f}" {bounds}>{title}</rect>')
        if index % every == every - 1 or len(bins) <= num_bounds:
            middle = f'x="{x + step / 2:.1f}" y="{bottom + FOOT}" text-anchor="middle"'
            drawn.append(f"<text {middle}>{short(bound)}</text>")
    for name, value in marks:
        x = LEFT + step * sum(bound < value for _, bound, _ in bins) + step / 2
        drawn += _mark(name, x, bottom, (top, width))
    drawn.append(f'<line class="cursor" y1="{top}" y2="{bottom}" x1="-9" x2="-9"/>')
    if limit is not None and any(bound > limit[1] for _, bound, _ in bins):
        x = LEFT + step * sum(bound <= limit[1] for _, bound, _ in bins)
        drawn.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom}"/>')
        drawn.append(limit_text(limit[0], x, top - 12, width))
    return svg(drawn, label, (width, height))


def for_both_widths(
    title: str, draw: Callable[[bool], str], legend: Sequence[tuple[str, str]] = ()
) -> Figure:
    """A chart for a page and for a phone; `draw` is told whether it is the narrow one."""
    return Figure(title, draw(False), tuple(legend), draw(True))


def nice_ticks(low: float, high: float) -> list[float]:
    """Two to seven round values whose first is not above `low` and whose last is not below `high`.

    Values that differ by rounding only are one value: their axis says `1` and `1.02`, and no ten digits.
    """
    most = max(abs(low), abs(high))
    span = high - low if high - low > ROUNDING * most else 0.08 * most
    span = span if span > 1e-100 else 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / 5))
    step = next(one * magnitude for one in (1, 2, 5, 10) if span / (one * magnitude) <= 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    digits = 1 - math.floor(math.log10(step))
    return [round(index * step, digits) for index in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    """A number as a tick says it: `0.5`, `1,200`, `35k`, `2M`, `1e-05`."""
    if value and not 1e-3 <= abs(value) < 1e15:
        return f"{value:.3g}"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:,.6g}{unit}"
    return f"{value:,.4g}" if abs(value) < 1e3 else f"{value:,.0f}"


def tick_words(ticks: Sequence[float]) -> list[str]:
    """The ticks of one axis, each as short as can be while no two read alike."""
    words = [short(tick) for tick in ticks]
    for digits in range(5, 16):
        if len(set(words)) == len(words):
            break
        words = [f"{tick:,.{digits}g}" for tick in ticks]
    return words


def smoothed(points: Sequence[Point]) -> list[Point]:
    """An exponential mean over about a fiftieth of the points, without a bias at the start; gaps are skipped.

    Source: Kingma & Ba 2015, arXiv:1412.6980, section 3 (bias correction).
    """
    keep = 1 - 1 / max(len(points) / 50, 1.0)
    mean = weight = 0.0
    found: list[Point] = []
    for x, y in points:
        if math.isfinite(y):
            mean = keep * mean + (1 - keep) * y
            weight = keep * weight + (1 - keep)
            found.append((x, mean / weight))
    return found


def thin(points: Sequence[Point]) -> list[Point]:
    """The points, or the lowest and highest of each of `MOST_POINTS / 2` stretches: no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = len(points) / (MOST_POINTS // 2)
    found: list[Point] = []
    for index in range(MOST_POINTS // 2):
        stretch = points[int(index * size) : int((index + 1) * size)]
        broken = [point for point in stretch if not math.isfinite(point[1])]
        by_height = sorted(stretch, key=lambda point: point[1])
        ends = {broken[0]} if broken else {by_height[0], by_height[-1]}
        found += sorted(ends)
    return found


def unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """The points in runs of finite values; a run of one is drawn as a short dash."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run if len(run) > 1 else run * 2 for run in runs if run]


def axis_unit(unit: str) -> list[str]:
    """The unit of the upright axis, above its numbers."""
    return [f'<text x="2" y="11">{escape(unit)}</text>'] if unit else []


def limit_text(text: str, x: float, y: float, width: int) -> str:
    """The name of a line at `x`, in the middle above it, moved to where all of it is in the picture."""
    half = len(text) * (LETTER if width == WIDTH else NARROW_LETTER) / 2
    x = min(max(x, half + 2), width - half - 2)
    return f'<text class="value" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


def grid_line(place: str, right: float, text: str) -> str:
    """A line across the chart at a place (`x,y`), with its number before it."""
    x, y = place.split(",")
    return (
        f'<line class="grid" x1="{x}" x2="{right}" y1="{y}" y2="{y}"/>'
        f'<text x="{float(x) - 8:.1f}" y="{float(y) + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _mark(name: str, x: float, bottom: float, top_and_width: tuple[int, int]) -> list[str]:
    top, width = top_and_width
    return [
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>',
        limit_text(name, x, top - 2, width),
    ]


def _dot(place: str, colour: str) -> str:
    x, y = place.split(",")
    return f'<circle class="fill {colour}" cx="{x}" cy="{y}" r="3"/>'


def svg(drawn: Sequence[str], label: str, size: tuple[int, int], more: str = "") -> str:
    """The picture of its elements; `label` is read to those who do not see it."""
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(label, quote=True)}"{more}>'
        f"{''.join(drawn)}</svg>"
    )
