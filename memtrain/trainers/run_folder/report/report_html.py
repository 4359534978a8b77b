"""`report.html`: a page that needs nothing beside itself; no torch."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from memtrain.memory.plan.units import gib, signed
from memtrain.recipes.registry import METHODS
from memtrain.trainers.pages.charts import (
    Figure,
    for_both_widths,
    histogram,
)
from memtrain.trainers.pages.memory_bars import MEASURED, OwnerBar, memory_figure, predicted_bar
from memtrain.trainers.pages.page import render
from memtrain.trainers.protocols.events import REWARD, DataEvent
from memtrain.trainers.run_folder.folder import RunFolder, Status
from memtrain.trainers.run_folder.progress import duration
from memtrain.trainers.run_folder.report.benchmarks import COLUMNS, rows_of
from memtrain.trainers.run_folder.report.curves import curve_groups
from memtrain.trainers.run_folder.report.data_words import lost_words, source_words
from memtrain.trainers.run_folder.report.evaluation_rows import (
    ending_rows,
    held_out_rows,
    sample_columns,
)
from memtrain.trainers.run_folder.report.expert_rows import expert_words, layers_of
from memtrain.trainers.run_folder.report.phase_memory import extra_sizes, lighter_words
from memtrain.trainers.run_folder.report.report import (
    Figures,
    Report,
    eval_name,
    eval_words,
    figures_of,
    load_report,
    loss_words,
    phases_of,
    reward_words,
    state_of,
)
from memtrain.trainers.run_folder.report.rollout_words import (
    counted_words,
    mean_length_words,
    resampled_words,
    turn_words,
)
from memtrain.trainers.run_folder.report.sample import sample_rows
from memtrain.trainers.run_folder.report.time_words import host_memory_words, looked_at
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole

TEMPLATES = Path(__file__).parent / "templates"


def write_report(folder: RunFolder, status: Status | None = None) -> Path:
    """Write `report.html` from the folder's content so far, and return its path.

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
    large, groups, folded = curve_groups(report)
    return render(
        TEMPLATES / "report.html.j2",
        report=report,
        state=state_of(report),
        updated_at=_moment(report.status.time) if report.status else "",
        endings=ending_rows(report.final),
        tiles=_tiles(report, figures_of(report)),
        large=large,
        groups=groups,
        folded=folded,
        memory=memory_of(report),
        phases=phases_of(report),
        extra_sizes=extra_sizes(phases_of(report)),
        lighter=lighter_words(phases_of(report), report.plan),
        splits=[(data, _lengths(report, data), lost_words(data), source_words(data)) for data in report.data],
        experts=layers_of(report.experts),
        expert_words=expert_words(report.experts),
        samples=sample_columns(prompts_of(report), report.samples),
        num_samples=len(report.samples),
        benchmark_columns=COLUMNS,
        benchmarks=rows_of(report.scores),
        decisions=[(one.setting, one.value, one.reason, one.source) for one in decisions],
        environment=_environment(report),
        sample=sample_rows(report),
    )


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _tiles(report: Report, figures: Figures) -> list[tuple[str, str, str]]:
    """Name, value and remark of the numbers at the top."""
    total = f" of {report.plan.settings.max_steps:,}" if report.plan else ""
    tiles = [("steps", f"{report.steps[-1].step if report.steps else 0:,}{total}", duration(figures.seconds))]
    if report.plan and (words := report.plan.parameters_words()):
        trained, _, rest = words.partition(" ")
        tiles.append(("trained parameters", trained, rest))
    if words := reward_words(figures):
        tiles.append((REWARD, *_value_and_remark(words)))
    tiles.append(("loss", *_value_and_remark(loss_words(figures))))
    if words := mean_length_words(figures.lengths):
        tiles.append(("completion length", *_value_and_remark(words)))
    if words := turn_words(figures.turns):
        tiles.append(("turns", *_value_and_remark(words)))
    if words := resampled_words(figures.resampled):
        tiles.append(("groups resampled", *_value_and_remark(words)))
    if words := eval_words(figures):
        tiles.append((eval_name(figures), *_value_and_remark(words)))
    more = held_out_rows(report.evals, report.plan)
    tiles += [(name, *_value_and_remark(words)) for name, words in more]
    if figures.tokens_per_s is not None:
        counted = counted_words(figures.tokens, figures.loss_tokens, figures.lengths)
        tiles.append(("tokens/s", f"{figures.tokens_per_s:,.0f}", counted))
    if report.host is not None:
        on_gpu = report.plan is not None and report.plan.settings.device == "cuda"
        name, why = ("GPU idle", "waited for the host") if on_gpu else ("Python", "outside torch's operators")
        tiles.append((name, f"{report.host.waited:.1%}", f"of {looked_at(report.host)}, {why}"))
    predicted = f"{gib(figures.predicted_bytes)} predicted" if figures.predicted_bytes is not None else ""
    measured = gib(figures.measured_bytes) if figures.measured_bytes is not None else "not measured"
    tiles.append(("peak memory", measured, predicted))
    if words := host_memory_words(report.host_memory, report.plan):
        value, _, remark = words.partition(" measured")
        tiles.append(("host memory", value, remark.lstrip(", ")))
    return tiles


def _value_and_remark(words: str) -> tuple[str, str]:
    """Last value and remark of a tile: `3.2 -> 1.1 (best 1.0)` gives `1.1` and `from 3.2, best 1.0`."""
    value, _, remark = words.partition(" (")
    first, _, last = value.rpartition(" -> ")
    return last, ", ".join(part for part in (f"from {first}" if first else "", remark.rstrip(")")) if part)


def prompts_of(report: Report) -> list[str]:
    """Prompts of `eval.samples`."""
    return [prompt.text for prompt in report.plan.data.samples] if report.plan is not None else []


def memory_of(report: Report) -> Figure:
    """Bars of each phase, predicted and measured, and of the run without any strategy."""
    rows: list[OwnerBar] = []
    for one in phases_of(report):
        if one.predicted:
            rows.append(predicted_bar(f"{one.phase}, predicted", one.predicted))
        if one.measured:
            size = one.measured.allocated
            owners = list(one.measured.owners.items()) or [(MEASURED, size)]
            off = f" ({signed(one.difference)})" if one.difference is not None else ""
            rows.append(OwnerBar(f"{one.phase}, measured", owners, gib(size) + off))
    if report.plan:
        rows.append(predicted_bar("without any strategy", report.plan.plain.peak, " predicted"))
    return memory_figure(rows, budget=report.plan.prediction.budget_bytes if report.plan else None)


def _lengths(report: Report, data: DataEvent) -> tuple[Figure, str]:
    """(histogram of the lengths that a limit bounds, words about them)."""
    name, longest, words = "max_length", None, "tokens of a row"
    if report.plan is not None:
        settings, method = report.plan.settings, METHODS[report.plan.recipe.method]
        longest = settings.max_length
        if method.is_online:
            words = "tokens of a prompt"
            if settings.max_prompt is not None:
                name, longest = "longest prompt", settings.max_prompt
        elif method.num_answers > 1:
            words = "tokens of a prompt with its longer answer, which max_length bounds"
    limit = (f"{name} {longest:,}", longest) if longest else None
    firsts = [1, *(bound + 1 for bound, _ in data.lengths)]
    bins = [(first, bound, count) for first, (bound, count) in zip(firsts, data.lengths, strict=False)]
    title = f"Row lengths of {data.split}"
    drawn = for_both_widths(title, lambda is_narrow: histogram(bins, title, limit=limit, is_narrow=is_narrow))
    return drawn, words


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
