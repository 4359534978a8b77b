"""The report of a run from its folder, and the same at the end in the terminal; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memtrain.errors import printable
from memtrain.memory.plan.plan import Plan, read_plan
from memtrain.memory.plan.units import count_of, gib, signed
from memtrain.trainers.protocols.events import (
    REWARD,
    DataEvent,
    EvalEvent,
    ExpertsEvent,
    FinalEvent,
    HostEvent,
    HostMemoryEvent,
    MemoryEvent,
    NoteEvent,
    SampleEvent,
    SaveEvent,
    StepEvent,
)
from memtrain.trainers.run_folder.folder import RunFolder, Status
from memtrain.trainers.run_folder.metrics import read_metrics
from memtrain.trainers.run_folder.progress import ROLLOUT_TOKENS, decimal, duration, speed_tokens
from memtrain.trainers.run_folder.report.benchmarks import Score, read_scores
from memtrain.trainers.run_folder.report.data_words import lost_words, source_words
from memtrain.trainers.run_folder.report.evaluation_rows import ending_rows, held_out_rows
from memtrain.trainers.run_folder.report.expert_rows import expert_words
from memtrain.trainers.run_folder.report.phase_memory import PhaseMemory, lighter_words
from memtrain.trainers.run_folder.report.rollout_words import (
    RESAMPLED,
    counted_words,
    mean_length_words,
    resampled_words,
    turn_words,
)
from memtrain.trainers.run_folder.report.time_words import host_memory_words, host_words, save_words

MOST_AVERAGED_STEPS = 10
"""First and last loss are means over a tenth of the steps, at most of this many: steps are noisy; taste."""


DRY_RUN = "dry run: "
"""Words before the name of a phase of the dry run: its peak is compared with the same prediction."""


@dataclass(frozen=True, slots=True)
class Report:
    """Contents of a run folder, by kind. Any may be missing: a run can be read while it goes on."""

    name: str
    """Name of the run folder."""
    plan: Plan | None
    recipe_text: str
    status: Status | None
    steps: tuple[StepEvent, ...]
    evals: tuple[EvalEvent, ...]
    data: tuple[DataEvent, ...]
    """The last of each split."""
    memory: tuple[MemoryEvent, ...]
    """The highest of each phase, in the order they were met."""
    notes: tuple[NoteEvent, ...]
    final: FinalEvent | None
    saves: tuple[SaveEvent, ...] = ()
    samples: tuple[SampleEvent, ...] = ()
    experts: tuple[ExpertsEvent, ...] = ()
    host: HostEvent | None = None
    """The last step whose host time was measured."""
    host_memory: HostMemoryEvent | None = None
    scores: tuple[Score, ...] = ()
    """Of benchmarks on the final model."""

    def __repr__(self) -> str:
        return f"Report({self.name}: {state_of(self)}, {loss_words(figures_of(self))})"


@dataclass(frozen=True, slots=True)
class Figures:
    """The run in a few numbers; None where it has none."""

    num_steps: int
    averaged_steps: int
    """Steps that the first and the last loss are means of."""
    first_loss: float | None
    last_loss: float | None
    first_eval: float | None
    last_eval: float | None
    best_eval: EvalEvent | None
    num_evals: int
    rewards: tuple[float, ...]
    """Mean reward of each rollout, of online methods. Their held-out loss is minus
    the held-out reward, and is reported as that."""
    lengths: tuple[float, ...]
    """Mean length of the completions of each rollout, in tokens."""
    turns: tuple[tuple[float, float], ...]
    """Mean turns of a completion and tokens of the environment in it, of each rollout with an environment."""
    resampled: tuple[float, ...]
    """Groups that dynamic sampling replaced, of each rollout where it is on."""
    tokens: int
    """Of the sequences of the steps; of the rollouts, where completions are written."""
    loss_tokens: int
    seconds: float
    """Of a run that was continued: of all its steps and evaluations; else from start to end."""
    tokens_per_s: float | None
    """Tokens by wall time: of rows that are read, without the first step's, which also warms up;
    of rollouts, every prompt and completion, by the time of rollouts and steps together."""
    measured_bytes: int | None
    predicted_bytes: int | None
    plain_bytes: int | None
    """Predicted peak of the same run without any memory strategy."""


def load_report(folder: RunFolder) -> Report:
    """Report of the folder so far.

    Raises: DataError for a damaged metrics file; LaunchError for a plan of another version.
    """
    events = read_metrics(folder.metrics)
    peaks: dict[str, MemoryEvent] = {}
    for event in events:
        if isinstance(event, MemoryEvent):
            event = replace(event, phase=_phase_of_today(event.phase))
            known = peaks.get(event.phase)
            peaks[event.phase] = event if known is None or event.allocated > known.allocated else known
    finals = [event for event in events if isinstance(event, FinalEvent)]
    return Report(
        name=folder.path.resolve().name,
        scores=read_scores(folder),
        plan=read_plan(folder.plan, reveals=False) if folder.plan.exists() else None,
        recipe_text=_text(folder.recipe),
        status=folder.read_status(),
        steps=tuple(event for event in events if isinstance(event, StepEvent)),
        evals=tuple(event for event in events if isinstance(event, EvalEvent)),
        data=tuple({event.split: event for event in events if isinstance(event, DataEvent)}.values()),
        memory=tuple(peaks.values()),
        notes=tuple(event for event in events if isinstance(event, NoteEvent)),
        saves=tuple(event for event in events if isinstance(event, SaveEvent)),
        samples=tuple(event for event in events if isinstance(event, SampleEvent)),
        experts=tuple(event for event in events if isinstance(event, ExpertsEvent)),
        final=finals[-1] if finals else None,
        host=next((event for event in reversed(events) if isinstance(event, HostEvent)), None),
        host_memory=next((event for event in reversed(events) if isinstance(event, HostMemoryEvent)), None),
    )


def figures_of(report: Report) -> Figures:
    """The run in a few numbers."""
    steps = report.steps
    averaged = max(1, min(MOST_AVERAGED_STEPS, len(steps) // 10))
    # A rollout is made for several steps: leaving its first step out would leave out its time.
    has_rollouts = any(step.rollout_s for step in steps)
    counts_rollouts = any(ROLLOUT_TOKENS in step.extra for step in steps)
    timed = steps if has_rollouts else steps[1:] or steps
    timed_s = sum(step.wall_s for step in timed)
    counted_s = sum(step.wall_s for step in steps) + sum(event.seconds for event in report.evals)
    peaks = [event.allocated for event in report.memory] + [step.peak_bytes or 0 for step in steps]
    plan = report.plan
    return Figures(
        num_steps=len(steps),
        averaged_steps=averaged,
        first_loss=_mean([step.loss for step in steps[:averaged]]),
        last_loss=_mean([step.loss for step in steps[-averaged:]]),
        first_eval=report.evals[0].loss if report.evals else None,
        last_eval=report.evals[-1].loss if report.evals else None,
        best_eval=min(report.evals, key=lambda event: event.loss) if report.evals else None,
        num_evals=len(report.evals),
        rewards=tuple(step.extra[REWARD] for step in steps if REWARD in step.extra),
        tokens=sum(speed_tokens(step, counts_rollouts) for step in steps),
        loss_tokens=sum(step.loss_tokens for step in steps),
        seconds=max(counted_s, report.final.seconds if report.final else 0.0),
        lengths=tuple(step.extra["completion_tokens"] for step in steps if "completion_tokens" in step.extra),
        turns=tuple(
            (step.extra["turns"], step.extra["environment_tokens"]) for step in steps if "turns" in step.extra
        ),
        resampled=tuple(step.extra[RESAMPLED] for step in steps if RESAMPLED in step.extra),
        tokens_per_s=sum(speed_tokens(step, counts_rollouts) for step in timed) / timed_s
        if timed_s
        else None,
        measured_bytes=max(peaks, default=0) or None,
        predicted_bytes=plan.prediction.peak.num_bytes if plan else None,
        plain_bytes=plan.plain.peak.num_bytes if plan else None,
    )


def phases_of(report: Report) -> list[PhaseMemory]:
    """Every phase that was predicted or measured: the plan's in its order, then the others.

    No evaluation where no row is held out.
    """
    phases = report.plan.prediction.phases if report.plan else ()
    predicted = {_phase_of_today(peak.phase): peak for peak in phases}
    measured = {event.phase: event for event in report.memory}
    if report.plan is not None and report.plan.data.eval is None and not report.plan.data.held_out_rows:
        predicted = {
            name: peak for name, peak in predicted.items() if name != "evaluation" or name in measured
        }
    predicted |= {
        f"{DRY_RUN}{phase}": peak for phase, peak in predicted.items() if f"{DRY_RUN}{phase}" in measured
    }
    return [
        PhaseMemory(phase, predicted.get(phase), measured.get(phase)) for phase in {**predicted, **measured}
    ]


def _phase_of_today(phase: str) -> str:
    """The name of a phase that a run of an earlier version wrote."""
    return phase.replace("rehearsal: ", DRY_RUN).replace("passes", "log-probs")


def state_of(report: Report) -> str:
    """State of the run, in words."""
    if report.status is None:
        return "not started"
    if report.status.message:
        return f"{report.status.state.value}: {report.status.message}"
    return report.status.state.value


def summary(folder: RunFolder) -> RenderableType:
    """Summary at the end of a run on the terminal: the figures, memory by phase, rows and losses of them.

    Raises: as `load_report`.
    """
    report = load_report(folder)
    parts: list[RenderableType] = [_figures_table(report)]
    if report.memory:
        parts += ["", _memory_table(report), *lighter_words(phases_of(report), report.plan)]
    if report.data:
        parts += ["", _data_table(report.data)]
        parts += [Text(words) for data in report.data for words in source_words(data)]
        parts += [Text(f"lost from {data.split}: {lost_words(data)}") for data in report.data]
    # What was told at the start stands above on the terminal, and in the report.
    parts += [Text(f"note: step {note.step}: {printable(note.text)}") for note in report.notes if note.step]
    return Group(*parts)


def loss_words(figures: Figures) -> str:
    """First and last training loss: `3.2101 -> 1.0542 (means of 10 steps)`. After one step, one number."""
    if figures.first_loss is None or figures.last_loss is None:
        return "no step yet"
    if figures.num_steps == 1:
        return decimal(figures.last_loss)
    means = f" (means of {figures.averaged_steps} steps)" if figures.averaged_steps > 1 else ""
    return f"{decimal(figures.first_loss)} -> {decimal(figures.last_loss)}{means}"


def eval_name(figures: Figures) -> str:
    """Name of the figure in `eval_words`."""
    return "held-out reward" if figures.rewards else "held-out loss"


def eval_words(figures: Figures) -> str:
    """First and last held-out loss (or reward), and the best where it is another one.

    One number after one evaluation, empty without any.
    """
    if figures.first_eval is None or figures.last_eval is None or figures.best_eval is None:
        return ""
    sign = -1 if figures.rewards else 1
    if figures.num_evals == 1:
        return decimal(sign * figures.last_eval)
    words = f"{decimal(sign * figures.first_eval)} -> {decimal(sign * figures.last_eval)}"
    best = figures.best_eval
    if best.loss == figures.last_eval:
        return words
    return f"{words} (best {decimal(sign * best.loss)} at step {best.step})"


def reward_words(figures: Figures) -> str:
    """First and last mean reward of a rollout; empty for methods without."""
    known = [reward for reward in figures.rewards if not math.isnan(reward)]
    count = max(1, min(MOST_AVERAGED_STEPS, len(known) // 10))
    first, last = _mean(known[:count]), _mean(known[-count:])
    if first is None or last is None:
        return ""
    if len(known) == 1:
        return decimal(last)
    means = f" (means of {count} rollouts)" if count > 1 else ""
    return f"{decimal(first)} -> {decimal(last)}{means}"


def _figures_table(report: Report) -> Table:
    figures = figures_of(report)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    steps = count_of(len(report.steps), "step")
    table.add_row("run", f"{state_of(report)}, {steps} in {duration(figures.seconds)}")
    for row in ending_rows(report.final):
        table.add_row(*row)
    if words := reward_words(figures):
        table.add_row(REWARD, words)
    table.add_row("loss", loss_words(figures))
    if words := mean_length_words(figures.lengths):
        table.add_row("completion length", words)
    if words := turn_words(figures.turns):
        table.add_row("turns", words)
    if words := resampled_words(figures.resampled):
        table.add_row("groups resampled", words)
    if words := eval_words(figures):
        table.add_row(eval_name(figures), words)
    for row in held_out_rows(report.evals, report.plan):
        table.add_row(*row)
    if figures.tokens_per_s is not None:
        counted = counted_words(figures.tokens, figures.loss_tokens, figures.lengths)
        table.add_row("speed", f"{figures.tokens_per_s:,.0f} tokens/s ({counted})")
    is_on_gpu = report.plan is not None and report.plan.settings.device == "cuda"
    if words := host_words(report.host, is_on_gpu=is_on_gpu):
        table.add_row("host time", words)
    if words := expert_words(report.experts):
        table.add_row("fullest expert", words)
    if figures.measured_bytes is not None:
        table.add_row("peak memory", _peak_words(figures))
    if words := host_memory_words(report.host_memory, report.plan):
        table.add_row("host memory", words)
    if report.saves:
        table.add_row("checkpoints", save_words(report.saves))
    return table


def _peak_words(figures: Figures) -> str:
    words = f"{gib(figures.measured_bytes or 0)} measured"
    if figures.predicted_bytes is not None:
        words += f", {gib(figures.predicted_bytes)} predicted"
    if figures.plain_bytes is not None:
        words += f", {gib(figures.plain_bytes)} without strategies"
    return words


def _memory_table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("peak memory")
    for name in ("predicted", "measured", "difference"):
        table.add_column(name, justify="right")
    for one in phases_of(report):
        table.add_row(
            one.phase,
            gib(one.predicted.num_bytes) if one.predicted else "-",
            gib(one.measured.allocated) if one.measured else "-",
            signed(one.difference) if one.difference is not None else "",
        )
    return table


def _data_table(data: Sequence[DataEvent]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column("data")
    for name in ("rows", "tokens", "loss tokens", "sequences", "fill"):
        table.add_column(name, justify="right")
    for one in data:
        fill = f"{one.fill:.2%}" if one.fill is not None else "-"
        # Prompts have no loss tokens before completions are written.
        loss_tokens = f"{one.loss_tokens:,}" if one.loss_tokens else "-"
        counts = (f"{one.rows:,}", f"{one.tokens:,}", loss_tokens, f"{one.sequences:,}")
        table.add_row(one.split, *counts, fill)
    return table


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
