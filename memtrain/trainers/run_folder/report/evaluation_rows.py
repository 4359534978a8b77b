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


def held_out_rows(evals: Sequence[EvalEvent], plan: Plan | None) -> list[Row]:
    """(name, first -> last value) of the held-out figures beside the loss: accuracy and margin of pairs, the
    metrics of a Python file, and both the loss and these metrics of each named evaluation set."""
    sets = plan.recipe.data.eval_sets if plan is not None else ()
    metrics = plan.recipe.eval.metric_names if plan is not None else ()
    names = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"} | {one: one for one in metrics}
    keys = [(key, f"held-out {name}") for key, name in names.items()]
    for name in sets:
        keys += [(f"{name}{SET_MARK}{one}", f"held-out {one} of {name}") for one in (LOSS, REWARD, *metrics)]
    rows: list[Row] = []
    for key, name in keys:
        values = [event.extra[key] for event in evals if key in event.extra]
        if values:
            ends = [values[0], values[-1]] if len(values) > 1 else values
            rows.append((name, " -> ".join(decimal(value) for value in ends)))
    return rows
