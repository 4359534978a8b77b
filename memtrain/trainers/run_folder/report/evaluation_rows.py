"""Rows of a report on evaluation: each set, the end by early stopping, samples; no torch."""

from __future__ import annotations

from collections.abc import Sequence

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.evaluation import LOSS, REWARD, SET_MARK
from memtrain.trainers.protocols.events import EvalEvent, FinalEvent, SampleEvent
from memtrain.trainers.run_folder.progress import decimal

Row = tuple[str, str]

MOST_COLUMNS = 8
"""Steps whose samples are shown side by side: the first, the last, and some between. Taste."""


def set_rows(evals: Sequence[EvalEvent], sets: Sequence[str]) -> list[Row]:
    """(name, first -> last value) of the held-out loss, or reward, of each named evaluation set."""
    rows: list[Row] = []
    for name in sets:
        for metric in (LOSS, REWARD):
            key = f"{name}{SET_MARK}{metric}"
            values = [event.extra[key] for event in evals if key in event.extra]
            ends = [values[0], values[-1]] if len(values) > 1 else values
            if ends:
                rows.append((f"held-out {metric} of {name}", " -> ".join(decimal(value) for value in ends)))
    return rows


def ending_rows(final: FinalEvent | None) -> list[Row]:
    """(name, words) of the reason that a run ended early, and of the weights that are its model."""
    if final is None:
        return []
    rows = [("early stopping", final.stopped_early)] if final.stopped_early else []
    if final.best_step is not None:
        rows.append(("final model", f"weights of step {final.best_step:,}, the best on held-out rows"))
    return rows


def sample_columns(
    prompts: Sequence[str], samples: Sequence[SampleEvent]
) -> list[tuple[str, list[tuple[int, str]]]]:
    """(prompt, (step, completion) in the order of the steps), of at most MOST_COLUMNS steps."""
    last = len(samples) - 1
    count = min(MOST_COLUMNS, len(samples))
    shown = [samples[round(place * last / max(1, count - 1))] for place in range(count)]
    return [
        (prompt, [(one.step, one.texts[number]) for one in shown if number < len(one.texts)])
        for number, prompt in enumerate(prompts if shown else ())
    ]


def pair_rows(evals: Sequence[EvalEvent]) -> list[Row]:
    """(name, first -> last value) of the held-out accuracy and margin of pairs; nothing for other methods."""
    rows: list[Row] = []
    for key, name in (("rewards/accuracies", "held-out accuracy"), ("rewards/margins", "held-out margin")):
        values = [event.extra[key] for event in evals if key in event.extra]
        if values:
            ends = [values[0], values[-1]] if len(values) > 1 else values
            rows.append((name, " -> ".join(decimal(value) for value in ends)))
    return rows


def sets_of(plan: Plan | None) -> tuple[str, ...]:
    """Names of the evaluation sets of a run; none where its plan is missing."""
    return plan.recipe.data.eval_sets if plan is not None else ()
