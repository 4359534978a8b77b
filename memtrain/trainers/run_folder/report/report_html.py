"""`report.html`: one page that needs nothing beside itself; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from memtrain.memory.plan.units import GIB, gib
from memtrain.trainers.pages.charts import (
    SMALL_WIDTH,
    Figure,
    Line,
    Point,
    histogram,
    line_chart,
    smoothed,
)
from memtrain.trainers.pages.memory_bars import MEASURED, OwnerBar, memory_figure, predicted_bar
from memtrain.trainers.pages.page import render
from memtrain.trainers.protocols.events import REWARD, DataEvent, StepEvent
from memtrain.trainers.run_folder.folder import RunFolder, Status
from memtrain.trainers.run_folder.progress import duration
from memtrain.trainers.run_folder.report.report import (
    Figures,
    Report,
    eval_name,
    eval_words,
    figures_of,
    host_words,
    load_report,
    loss_words,
    lost_words,
    pair_rows,
    phases_of,
    reward_words,
    source_words,
    state_of,
)
from memtrain.trainers.run_folder.report.rollout_words import counted_words, mean_length_words
from memtrain.trainers.run_folder.report.sample import sample_rows
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole

TEMPLATES = Path(__file__).parent / "templates"
FEW_STEPS = 50
"""A shorter curve is shown as it is, without a smoothed one; taste."""


def write_report(folder: RunFolder, status: Status | None = None) -> Path:
    """Write `report.html` from what the folder says so far, and return its path.

    `status`: how the run stands, where the folder does not say it yet.

    Raises: as `load_report`; LaunchError when the disk refuses.
    """
    report = load_report(folder)
    page = render_report(report if status is None else replace(report, status=status))
    try:
        write_whole(folder.report, page)
    except OSError as error:
        raise disk_fault(error, "the report cannot be written", folder.report) from None
    return folder.report


def render_report(report: Report) -> str:
    """The page as text."""
    decisions = report.plan.decisions if report.plan else ()
    return render(
        TEMPLATES / "report.html.j2",
        report=report,
        state=state_of(report),
        told_at=_moment(report.status.time) if report.status else "",
        tiles=_tiles(report, figures_of(report)),
        curves=[figure for figure in _curves(report) if figure.svg],
        memory=_memory(report),
        phases=phases_of(report),
        splits=[(data, _lengths(report, data), lost_words(data), source_words(data)) for data in report.data],
        decisions=[(one.setting, one.value, one.reason, one.source) for one in decisions],
        environment=_environment(report),
        sample=sample_rows(report),
    )


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _tiles(report: Report, figures: Figures) -> list[tuple[str, str, str]]:
    """Name, value and remark of the numbers at the top."""
    total = f" of {report.plan.settings.max_steps:,}" if report.plan else ""
    tiles = [
        ("steps", f"{report.steps[-1].step if report.steps else 0:,}{total}", duration(figures.seconds)),
        ("loss", *_value_and_remark(loss_words(figures))),
    ]
    if words := reward_words(figures):
        tiles.append((REWARD, *_value_and_remark(words)))
    if words := mean_length_words(figures.lengths):
        tiles.append(("completion length", *_value_and_remark(words)))
    if words := eval_words(figures):
        tiles.append((eval_name(figures), *_value_and_remark(words)))
    tiles += [(name, *_value_and_remark(words)) for name, words in pair_rows(report)]
    if figures.tokens_per_s is not None:
        counted = counted_words(figures.tokens, figures.loss_tokens, figures.lengths)
        tiles.append(("tokens/s", f"{figures.tokens_per_s:,.0f}", counted))
    if report.host is not None:
        tiles.append(("host time", f"{report.host.waited:.1%}", host_words(report)))
    predicted = f"{gib(figures.predicted_bytes)} predicted" if figures.predicted_bytes is not None else ""
    measured = gib(figures.measured_bytes) if figures.measured_bytes is not None else "not measured"
    return [*tiles, ("peak memory", measured, predicted)]


def _value_and_remark(words: str) -> tuple[str, str]:
    value, _, remark = words.replace("->", "→").partition(" (")
    return value, remark.rstrip(")")


def _curves(report: Report) -> list[Figure]:
    def line(pick: Callable[[StepEvent], float | None]) -> list[Point]:
        picked = ((step.step, pick(step)) for step in report.steps)
        return [(float(number), value) for number, value in picked if value is not None]

    losses = line(lambda step: step.loss)
    is_long = len(losses) > FEW_STEPS
    train = [Line("train", losses, "faint" if is_long else "c1")]
    if is_long:
        train.append(Line("train, smoothed", smoothed(losses), "c1"))
    is_judged = any(REWARD in step.extra for step in report.steps)
    held_out = [(float(event.step), event.loss) for event in report.evals if not is_judged]
    loss_lines = [*train, Line("held out", held_out, "c2", has_dots=True)]
    speed = line(lambda step: step.tokens / step.wall_s if step.wall_s else None)
    peaks = line(lambda step: step.peak_bytes / GIB if step.peak_bytes else None)

    def single(title: str, points: list[Point], from_zero: bool) -> Figure:
        drawn = [Line(title, points, "c1")]
        return Figure(title, line_chart(drawn, title, width=SMALL_WIDTH, height=170, from_zero=from_zero))

    extras = sorted({name for step in report.steps for name in step.extra} - {REWARD})
    rewards = [Line("train", line(lambda step: step.extra.get(REWARD)), "c1")]
    judged = [(float(event.step), event.extra[REWARD]) for event in report.evals if REWARD in event.extra]
    rewards.append(Line("held out", judged, "c2", has_dots=True))
    return [
        Figure("Reward", line_chart(rewards, "Reward over steps"), legend_of(rewards)),
        Figure("Loss", line_chart(loss_lines, "Loss over steps"), legend_of(loss_lines)),
        single("Learning rate", line(lambda step: step.lr), True),
        single("Gradient norm, before clipping", line(lambda step: step.grad_norm), True),
        single("Tokens per second", speed, True),
        single("Peak memory, GiB", peaks, True),
        *(single(name, line(lambda step, name=name: step.extra.get(name)), False) for name in extras),
    ]


def legend_of(lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    """Names and colours of the lines that have points."""
    return tuple((one.name, one.colour) for one in lines if one.points)


def _memory(report: Report) -> Figure:
    rows: list[OwnerBar] = []
    for one in phases_of(report):
        if one.predicted:
            rows.append(predicted_bar(f"{one.phase}, predicted", one.predicted))
        if one.measured:
            size = one.measured.allocated
            owners = list(one.measured.owners.items()) or [(MEASURED, size)]
            off = f" ({one.difference:+.1%})" if one.difference is not None else ""
            rows.append(OwnerBar(f"{one.phase}, measured", owners, gib(size) + off))
    if report.plan:
        rows.append(predicted_bar("without any strategy", report.plan.plain.peak, " predicted"))
    return memory_figure(rows, budget=report.plan.prediction.budget_bytes if report.plan else None)


def _lengths(report: Report, data: DataEvent) -> str:
    longest = report.plan.settings.max_length if report.plan else None
    limit = (f"max_length {longest:,}", longest) if longest else None
    firsts = [1, *(bound + 1 for bound, _ in data.lengths)]
    bins = [(first, bound, count) for first, (bound, count) in zip(firsts, data.lengths, strict=False)]
    return histogram(bins, f"Row lengths of {data.split}", limit=limit)


def _environment(report: Report) -> list[tuple[str, str]]:
    if report.plan is None:
        return []
    settings = report.plan.settings
    return [
        *report.plan.versions.items(),
        (
            "device",
            f"{settings.device}, {settings.num_processes} process(es), {settings.threads} thread(s) each",
        ),
        ("prediction", f"made by {report.plan.prediction.method}"),
    ]
