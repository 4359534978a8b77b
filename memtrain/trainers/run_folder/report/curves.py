"""Curves of the report in groups: loss or reward first, then a group for each question; others are folded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memtrain.trainers.pages.charts import (
    COLOURS,
    SMALL_WIDTH,
    Figure,
    Line,
    Point,
    for_both_widths,
    line_chart,
    smoothed,
)
from memtrain.trainers.pages.memory_bars import memory_unit
from memtrain.trainers.protocols.events import REWARD, StepEvent
from memtrain.trainers.run_folder.progress import ROLLOUT_TOKENS, speed_tokens
from memtrain.trainers.run_folder.report.report import Report

FEW_STEPS = 50
"""A shorter curve is shown as it is, without a smoothed one; taste."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one or more metrics of steps."""

    title: str
    unit: str
    metrics: tuple[str, ...]
    """Names in the metrics; a name that ends in `/` stands for all that begin so."""
    names: tuple[str, ...] = ()
    """Words for them in the legend; their own names if not given."""


@dataclass(frozen=True, slots=True)
class CurveGroup:
    """Charts under one heading."""

    title: str
    figures: tuple[Figure, ...]


KNOWN: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Preferences",
        (
            Chart("Accuracy", "share of pairs", ("rewards/accuracies",)),
            Chart("Margin", "implicit reward", ("rewards/margins",)),
            Chart(
                "Implicit rewards",
                "implicit reward",
                ("rewards/chosen", "rewards/rejected"),
                ("chosen", "rejected"),
            ),
            Chart("Log-probs of answers", "nats", ("logps/chosen", "logps/rejected"), ("chosen", "rejected")),
        ),
    ),
    (
        "Rewards",
        (
            Chart("Rewards by function", "reward", ("rewards/",)),
            Chart("Standard deviation of rewards", "reward", ("reward_std",)),
            Chart("Groups of equal rewards", "share of groups", ("zero_std_groups",)),
            Chart("Groups resampled", "groups", ("groups_resampled",)),
        ),
    ),
    (
        "KL and entropy",
        (
            Chart("KL to the reference", "nats a token", ("kl",)),
            Chart("Entropy", "nats a token", ("entropy",)),
            Chart("Clipped ratios", "share of tokens", ("clip_low", "clip_high"), ("low", "high")),
            Chart("Trainer against sampler", "|difference of log-probs|", ("mismatch/mean", "mismatch/max")),
        ),
    ),
    (
        "Lengths",
        (
            Chart(
                "Length of completions",
                "tokens",
                ("completion_tokens", "completion_tokens_max"),
                ("mean", "longest"),
            ),
            Chart("Truncated completions", "share of completions", ("completions_cut",)),
        ),
    ),
    (
        "Time",
        (
            Chart(
                "Time of a rollout",
                "s",
                ("seconds_generation", "seconds_rewards", "seconds_passes"),
                ("generation", "rewards", "log-probs"),
            ),
            Chart("Speed of generation", "tokens/s", ("generated_per_s",)),
        ),
    ),
)
"""Groups of the metrics that the methods write; other metrics are folded under the last heading."""

FOLDED: tuple[Chart, ...] = (
    Chart("Accuracy of tokens", "share of loss tokens", ("accuracy",)),
    Chart("Cross-entropy", "nats a loss token", ("nll",)),
    Chart("Agreement with the teacher", "share of loss tokens", ("agreement",)),
    Chart("Tokens of a rollout", "tokens", (ROLLOUT_TOKENS,)),
    Chart("Completions trained on", "share of completions", ("completions_trained",)),
    Chart("Ratio of the policy to the sampler", "mean ratio", ("ratio",)),
    Chart(
        "Ratio of trainer to sampler",
        "ratio of probabilities",
        ("mismatch/ratio_p1", "mismatch/ratio_p50", "mismatch/ratio_p99"),
        ("1%", "median", "99%"),
    ),
    Chart("Pairs of a step", "pairs", ("pairs",)),
    Chart("Accuracy of pairs", "share of pairs", ("pairs/accuracy",)),
    Chart("Margin of pairs", "implicit reward", ("pairs/margin",)),
    Chart(
        "Implicit rewards of pairs",
        "implicit reward",
        ("pairs/chosen", "pairs/rejected"),
        ("chosen", "rejected"),
    ),
    Chart("Weight of the KL term", "beta", ("beta",)),
    Chart("Losses of policy and value", "loss", ("loss/policy", "loss/value"), ("policy", "value")),
    Chart("Mean value", "reward", ("value/mean",)),
    Chart("Variance that the values explain", "share of the returns' variance", ("value/explained",)),
)
"""Metrics that are looked at when something is wrong; one that is in no list has its own name and no unit."""


def curve_groups(report: Report) -> tuple[list[Figure], list[CurveGroup], list[Figure]]:
    """(large charts, groups of small ones, charts that are folded), as far as there are values."""
    names = {name for step in report.steps for name in step.extra} - {REWARD}
    groups: list[CurveGroup] = []
    for title, charts in KNOWN:
        # Accuracies of pairs lie under `rewards/`, too: a group takes its names from those after it.
        figures, taken = _drawn(report, charts, names)
        names -= taken
        if figures:
            # A heading of two things ("KL and entropy") is not one over the second alone.
            is_of_two = " and " in title and len(figures) == 1
            groups.append(CurveGroup(figures[0].title if is_of_two else title, tuple(figures)))
    groups.append(CurveGroup("Optimization and speed", tuple(_of_every_method(report))))
    folded, taken = _drawn(report, FOLDED, names)
    others, _ = _drawn(report, [Chart(name, "", (name,)) for name in sorted(names - taken)], names)
    return _large(report), [group for group in groups if group.figures], folded + others


def _drawn(report: Report, charts: Sequence[Chart], names: set[str]) -> tuple[list[Figure], set[str]]:
    """(charts of the metrics that there are, the names that they show)."""
    figures, taken = [], set[str]()
    for chart in charts:
        shown = [name for metric in chart.metrics for name in sorted(_matching(metric, names))]
        taken |= set(shown)
        if drawn := _small(report, chart, shown):
            figures.append(drawn)
    return figures, taken


def legend_of(lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    """Names and colours of the lines that have points."""
    return tuple((one.name, one.colour) for one in lines if one.points)


def _matching(metric: str, names: set[str]) -> set[str]:
    if metric.endswith("/"):
        return {name for name in names if name.startswith(metric)}
    return {metric} & names


def _line(report: Report, pick: Callable[[StepEvent], float | None]) -> list[Point]:
    picked = ((step.step, pick(step)) for step in report.steps)
    return [(float(number), value) for number, value in picked if value is not None]


def _large(report: Report) -> list[Figure]:
    """The reward, where completions are scored, and the loss; with held-out values."""
    losses = _line(report, lambda step: step.loss)
    is_long = len(losses) > FEW_STEPS
    train = [Line("train", losses, "faint" if is_long else "c1")]
    if is_long:
        train.append(Line("train, smoothed", smoothed(losses), "c1"))
    is_judged = any(REWARD in step.extra for step in report.steps)
    held_out = [(float(event.step), event.loss) for event in report.evals if not is_judged]
    loss_lines = [*train, Line("held out", held_out, "c2", has_dots=True)]
    rewards = [Line("train", _line(report, lambda step: step.extra.get(REWARD)), "c1")]
    judged = [(float(event.step), event.extra[REWARD]) for event in report.evals if REWARD in event.extra]
    rewards.append(Line("held out", judged, "c2", has_dots=True))
    loss_unit = "loss" if is_judged else "nats a loss token"
    if any("rewards/margins" in step.extra for step in report.steps):
        loss_unit = "loss"
    found = [_over_steps("Reward", rewards, "mean reward"), _over_steps("Loss", loss_lines, loss_unit)]
    # What an online method learns by is its reward; its loss says little, and stands among the small ones.
    return [figure for figure in found[: 1 if is_judged else 2] if figure.svg]


def _over_steps(title: str, lines: Sequence[Line], unit: str) -> Figure:
    """A chart over the whole width, and a smaller one for a phone."""
    label = f"{title} over steps"

    def draw(is_narrow: bool) -> str:
        if is_narrow:
            return line_chart(lines, label, unit=unit, width=SMALL_WIDTH, height=230)
        return line_chart(lines, label, unit=unit)

    return for_both_widths(title, draw, legend_of(lines))


def _small(report: Report, chart: Chart, shown: Sequence[str]) -> Figure | None:
    """The chart of the metrics that there are, with their held-out values; None without any value."""
    words = dict(zip(chart.metrics, chart.names, strict=False))
    lines: list[Line] = []
    for at, name in enumerate(shown):
        colour = COLOURS[min(at, len(COLOURS) - 1)]
        word = words.get(name, name.rpartition("/")[2] if len(shown) > 1 else "train")
        lines.append(Line(word, _line(report, lambda step, name=name: step.extra.get(name)), colour))
    for name in shown if len(shown) == 1 else ():
        held = [(float(event.step), event.extra[name]) for event in report.evals if name in event.extra]
        lines.append(Line("held out", held, "c2", has_dots=True))
    drawn = line_chart(lines, chart.title, unit=chart.unit, width=SMALL_WIDTH, height=190)
    return Figure(chart.title, drawn, legend_of(lines)) if drawn else None


def _of_every_method(report: Report) -> list[Figure]:
    """Learning rate, gradients, speed and memory."""
    has_rollouts = any(ROLLOUT_TOKENS in step.extra for step in report.steps)
    unit, size = memory_unit(max((step.peak_bytes or 0 for step in report.steps), default=0))
    speed = _line(report, lambda step: _speed(step, has_rollouts))
    peaks = _line(report, lambda step: step.peak_bytes / size if step.peak_bytes else None)
    is_judged = any(REWARD in step.extra for step in report.steps)
    made = [
        *([("Loss", "loss", _line(report, lambda step: step.loss))] if is_judged else []),
        ("Learning rate", "learning rate", _line(report, lambda step: step.lr)),
        ("Gradient norm, before clipping", "L2 norm", _line(report, lambda step: step.grad_norm)),
        ("Speed", "tokens/s", speed),
        ("Peak memory", unit, peaks),
    ]
    figures: list[Figure] = []
    for title, of, points in made:
        line, is_loss = [Line(title, points, "c1")], title == "Loss"
        drawn = line_chart(line, title, unit=of, width=SMALL_WIDTH, height=190, from_zero=not is_loss)
        figures.append(Figure(title, drawn))
    return [figure for figure in figures if figure.svg]


def _speed(step: StepEvent, has_rollouts: bool) -> float | None:
    """Tokens of a step by its wall time; nothing for a step that learns from an earlier rollout."""
    tokens = speed_tokens(step, has_rollouts)
    return tokens / step.wall_s if step.wall_s and (tokens or not has_rollouts) else None
