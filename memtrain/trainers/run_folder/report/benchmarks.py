"""Scores of lm-evaluation-harness in a run folder, for terminal, report and model card; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memtrain.trainers.run_folder.folder import RunFolder

RESULT_FILE = "lm_eval.json"
NOT_SCORES = ("alias", "sample_len", "name")
"""Fields of a task's results that are no numbers of the model."""


@dataclass(frozen=True, slots=True)
class Score:
    """A number of a benchmark."""

    task: str
    metric: str
    """With the filter that it was taken behind, where the task has one: `exact_match, strict-match`."""
    value: float
    stderr: float | None
    num_rows: float | None = None
    """Rows that it was taken over, where the harness says so."""


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """The numbers in the results of the harness, in its order."""
    found: list[Score] = []
    for task, values in results.items():
        rows = values.get("sample_len")
        for key, value in values.items():
            metric, _, behind = key.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if metric in NOT_SCORES or metric.endswith("_stderr") or not is_number:
                continue
            error = values.get(f"{metric}_stderr,{behind}")
            name = metric if behind in ("", "none") else f"{metric}, {behind}"
            stderr = error if isinstance(error, float) else None
            found.append(Score(task, name, float(value), stderr, rows if isinstance(rows, int) else None))
    return found


def rows_of(scores: Sequence[Score]) -> list[tuple[str, str, str, str]]:
    """Scores as rows of a table: benchmark, metric, value with its standard error, rows."""
    return [
        (
            one.task,
            one.metric,
            f"{one.value:.4g}" + (f" ±{one.stderr:.2g}" if one.stderr is not None else ""),
            "" if one.num_rows is None else f"{one.num_rows:,}",
        )
        for one in scores
    ]


COLUMNS = ("benchmark", "metric", "value", "rows")


def is_of_this_model(folder: RunFolder) -> bool:
    """Whether the benchmarks were run after the run ended; a run that went on since has another model."""
    results = folder.path / RESULT_FILE
    return results.is_file() and (
        not folder.status.is_file() or results.stat().st_mtime >= folder.status.stat().st_mtime
    )


def read_scores(folder: RunFolder) -> tuple[Score, ...]:
    """The scores of a run's model as it is now; none where no benchmark was run on it."""
    if not is_of_this_model(folder):
        return ()
    given = json.loads((folder.path / RESULT_FILE).read_text(encoding="utf-8"))
    return tuple(scores_of(given["results"]))
