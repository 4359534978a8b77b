"""The evaluation of a run as its own tool makes it: on micro-batches of their own number of rows."""

from __future__ import annotations

from dataclasses import replace

from memtrain.memory.estimate.pricing import PlannerInputs, Priced, heaviest, need_of, pass_alone
from memtrain.recipes.importers.importing import Foreign

DEFAULT_ROWS = 8
"""Rows of a micro-batch of evaluation where nothing says them: transformers' `per_device_eval_batch_size`."""

_STRATEGIES = ("eval_strategy", "evaluation_strategy")
_HELD_OUT = ("val_size", "eval_dataset")


def evaluation_rows(foreign: Foreign) -> int | None:
    """Rows that a device evaluates at once; None where nothing is evaluated, or as many as are trained."""
    config = foreign.config
    if foreign.tool.name in ("axolotl", "verl"):
        rows = config.get("eval_batch_size")
        return rows if isinstance(rows, int) else None
    asked = next((config[key] for key in _STRATEGIES if config.get(key) is not None), "no")
    if asked in ("no", False):
        return None
    if foreign.tool.name == "llamafactory" and not any(config.get(key) for key in _HELD_OUT):
        return None
    rows = config.get("per_device_eval_batch_size", DEFAULT_ROWS)
    return rows if isinstance(rows, int) else None


def evaluated(priced: Priced, foreign: Foreign, facts: PlannerInputs) -> Priced:
    """The run with its evaluation on micro-batches of as many rows as its tool takes."""
    rows, settings = evaluation_rows(foreign), priced.settings
    held = settings.micro_batch_size
    if rows is None or held is None or rows <= held:
        return priced
    asked = settings.model_copy(update={"micro_batch_size": rows, "batch_size": rows * settings.num_replicas})
    own = pass_alone("evaluation", settings, facts, heaviest(asked, facts))
    phases = tuple(own if phase.phase == own.phase else phase for phase in priced.prediction.phases)
    prediction = priced.prediction.model_copy(update={"phases": phases})
    return replace(priced, prediction=prediction, need_bytes=need_of(prediction, settings))
