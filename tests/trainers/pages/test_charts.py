"""Charts: ticks, lines without lost spikes, bars on one scale, histograms that say their bounds."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.memory.plan.plan import Owned, PhasePeak
from memtrain.trainers.pages.charts import (
    MOST_POINTS,
    SMALL_WIDTH,
    WIDTH,
    Bar,
    Line,
    bar_chart,
    for_both_widths,
    histogram,
    line_chart,
    nice_ticks,
    short,
    smoothed,
    thin,
    tick_words,
    unbroken,
)
from memtrain.trainers.pages.memory_bars import MEASURED, OwnerBar, memory_figure, predicted_bar
from memtrain.trainers.pages.page import standalone
from memtrain.trainers.pages.scatter import Spot, agreement_chart, pareto_chart


@settings(max_examples=50, deadline=None)
@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6))
def test_ticks_hold_the_values_and_are_few(low: float, span: float):
    ticks = nice_ticks(low, low + span)
    assert 2 <= len(ticks) <= 8
    slack = 1e-6 * max(abs(low), span) + 1e-99
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.5, "0.5"), (1200, "1,200"), (35_000, "35k"), (2e6, "2M"), (2.5e-5, "2.5e-05"), (-3, "-3")],
)
def test_ticks_are_short(value: float, said: str):
    assert short(value) == said


def test_no_two_ticks_of_an_axis_read_alike():
    assert tick_words([0.0, 0.5, 1.0]) == ["0", "0.5", "1"]
    assert tick_words([6.90412, 6.90414, 6.90416]) == ["6.90412", "6.90414", "6.90416"]
    assert len(set(tick_words(nice_ticks(6.90412, 6.90492)))) == len(nice_ticks(6.90412, 6.90492))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.0, 1.0, ["1", "1.02"]),
        (0.9999994, 1.0000006, ["0.98", "1", "1.02"]),
        (0.05, 0.05, ["0.05", "0.051"]),
    ],
)
def test_values_that_differ_by_rounding_have_short_ticks(low: float, high: float, said: list[str]):
    assert tick_words(nice_ticks(low, high)) == said


def test_thinning_keeps_every_spike_and_gap():
    points = [(float(x), 1.0) for x in range(10_000)]
    points[5_001] = (5_001.0, 99.0)
    points[7_003] = (7_003.0, math.nan)
    kept = thin(points)
    assert len(kept) <= MOST_POINTS
    assert (5_001.0, 99.0) in kept
    assert any(math.isnan(y) for _, y in kept)
    assert kept == sorted(kept)


def test_a_gap_breaks_a_line_and_a_single_point_is_still_drawn():
    points = [(1.0, 1.0), (2.0, math.nan), (3.0, 3.0), (4.0, 4.0)]
    assert unbroken(points) == [[(1.0, 1.0)] * 2, [(3.0, 3.0), (4.0, 4.0)]]


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant():
    assert smoothed([(0.0, 5.0)]) == [(0.0, 5.0)]
    assert [y for _, y in smoothed([(float(x), 3.0) for x in range(500)])] == pytest.approx([3.0] * 500)


@pytest.mark.parametrize(
    "drawn",
    [
        line_chart([], "none"),
        line_chart([Line("a", [(1.0, math.nan)], "c1")], "no number"),
        bar_chart([], "none"),
        bar_chart([Bar("a", [], "0")], "nothing long"),
        histogram([], "none"),
        histogram([(1, 8, 0)], "no row"),
    ],
)
def test_a_chart_of_nothing_is_left_out(drawn: str):
    assert drawn == ""


@pytest.mark.parametrize(("width", "letter"), [(WIDTH, 6.9), (SMALL_WIDTH, 8.7)])
def test_long_numbers_of_an_axis_have_their_room(width: int, letter: float):
    drawn = line_chart([Line("a", [(1.0, -0.069062), (2.0, -0.069068)], "c1")], "loss", width=width)
    found = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="end">(-[\d.]+)</text>', drawn)
    assert len(found) > 2
    assert min(float(x) - letter * len(text) for x, text in found) >= 0


def test_a_chart_of_one_step_is_drawn():
    assert "polyline" in line_chart([Line("a", [(1.0, 2.0)], "c1")], "one")


def rects(svg: str) -> list[dict[str, str]]:
    root = ElementTree.fromstring(svg)
    return [rect.attrib for rect in root.iter() if rect.tag.endswith("rect")]


def test_a_histogram_says_the_bounds_of_its_bars_and_marks_stand_in_the_middle_of_one():
    drawn = histogram([(1, 4, 2), (5, 8, 4)], "rows", marks=[("half", 6)], limit=("max_length 4", 4))
    bars = rects(drawn)
    assert [(one["data-first"], one["data-last"]) for one in bars] == [("1", "4"), ("5", "8")]
    assert float(bars[1]["height"]) == pytest.approx(2 * float(bars[0]["height"]))
    second = float(bars[1]["x"]) - 0.5
    width = second - (float(bars[0]["x"]) - 0.5)
    mark = re.search(r'class="mark" x1="([\d.]+)"', drawn)
    limit = re.search(r'class="limit" x1="([\d.]+)"', drawn)
    assert mark is not None
    assert limit is not None
    assert float(mark[1]) == pytest.approx(second + width / 2)
    assert float(limit[1]) == pytest.approx(second)
    assert "5 to 8 tokens: 4 rows" in drawn


def test_a_bar_without_a_label_stands_close_below_the_one_before_it_on_a_phone():
    bars = [Bar(label, [("x", 1.0, "c1")], "1") for label in ("first", "", "second")]
    tops = [float(one["y"]) for one in rects(bar_chart(bars, "bars", is_narrow=True))]
    assert tops[1] - tops[0] == 26
    assert tops[2] - tops[1] == 46


def test_a_histogram_of_a_phone_has_the_same_bars_and_fewer_bounds_below():
    bins = [(8 * at + 1, 8 * at + 8, at) for at in range(1, 31)]
    figure = for_both_widths(
        "rows", lambda is_narrow: histogram(bins, "rows", marks=[("median", 99)], is_narrow=is_narrow)
    )
    bounds = [[one["data-last"] for one in rects(drawn)] for drawn in (figure.svg, figure.narrow_svg)]
    assert bounds[0] == bounds[1]
    texts = [drawn.count("<text") for drawn in (figure.svg, figure.narrow_svg)]
    assert texts[1] == texts[0] - 5
    assert f'viewBox="0 0 {SMALL_WIDTH} ' in figure.narrow_svg


def test_bars_of_memory_are_as_long_as_their_owners_and_keep_one_colour_each():
    peak = PhasePeak(
        phase="step",
        num_bytes=300,
        owners=(Owned(owner="weights", num_bytes=200), Owned(owner="<acts>", num_bytes=100)),
    )
    rows = [predicted_bar("step", peak), OwnerBar("measured", [(MEASURED, 150)], "150 B")]
    figure = memory_figure(rows, budget=None)
    bars = rects(figure.svg)
    widths = [float(one["width"]) for one in bars]
    assert widths == pytest.approx([widths[2] * 4 / 3, widths[2] * 2 / 3, widths[2]], abs=0.1)
    assert dict(figure.legend) == {"weights": "c1", "<acts>": "c2", MEASURED: MEASURED}
    assert [one["class"] for one in bars] == ["fill c1", "fill c2", "fill measured"]
    assert "<acts>" not in figure.svg


@pytest.mark.parametrize(("is_narrow", "width", "letter"), [(False, WIDTH, 7), (True, SMALL_WIDTH, 8.75)])
def test_no_bar_label_or_text_of_a_bar_chart_leaves_the_picture(is_narrow: bool, width: int, letter: float):
    """A letter is at most so wide: the label ends left of the bars, or stands above, and texts behind fit."""
    bars = [
        Bar("a long label of a phase, predicted", [("x", 10.0, "c1")], "123.45 GiB (+12.3%)"),
        Bar("z" * 80, [("x", 9.0, "c1")], "8 GiB"),
    ]
    limit = ("budget 12.00 GiB", 12.0)
    drawn = bar_chart(bars, "bars", unit=("GiB", 1.0), limit=limit, is_narrow=is_narrow)
    root = ElementTree.fromstring(drawn)
    for text in (one for one in root.iter() if one.tag.endswith("text")):
        x, letters = float(text.attrib["x"]), len((text[-1].tail if len(text) else text.text) or "")
        sides = {"end": (-letter, 0), "middle": (-letter / 2, letter / 2)}
        room = sides.get(text.attrib.get("text-anchor", ""), (0, letter))
        assert x + room[0] * letters >= 0
        assert x + room[1] * letters <= width
    assert "<title>" + "z" * 80 in drawn
    assert ">GiB</text>" in drawn


def test_a_pareto_chart_steps_up_and_rings_the_plan():
    spots = [Spot(10, 100, "a"), Spot(30, 90, "worse"), Spot(20, 200, "b", is_chosen=True)]
    drawn = pareto_chart(spots, "plans", x_unit="GiB", y_unit="tokens/s", limit=("budget 24 GiB", 24.0))
    assert drawn.count('class="ring"') == 1
    points = re.search(r'class="line faint" points="([^"]+)"', drawn)
    assert points is not None
    heights = [float(place.split(",")[1]) for place in points[1].split()]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == 4
    assert pareto_chart([], "none", x_unit="", y_unit="") == ""


def test_equal_values_lie_on_the_line_of_an_agreement_chart_and_the_file_stands_alone():
    drawn = agreement_chart([Spot(10.0, 10.0, "a"), Spot(40.0, 20.0, "b")], "peaks", unit="GiB")
    line = re.search(r'points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', drawn)
    dot = re.search(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)
    assert line is not None
    assert dot is not None
    (x0, y0, x1, y1), (x, y) = map(float, line.groups()), map(float, dot.groups())
    assert (y - y0) / (y1 - y0) == pytest.approx((x - x0) / (x1 - x0), abs=1e-3)
    alone = standalone(drawn)
    assert ElementTree.fromstring(alone).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in alone
    box = re.search(r'viewBox="0 0 720 (\d+)"', standalone(drawn, [("<a>", "c1")]))
    assert box is not None
    assert int(box[1]) == 420 + 24
    assert "&lt;a&gt;</text>" in standalone(drawn, [("<a>", "c1")])
